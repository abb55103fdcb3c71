"""Rewrite rules, a pattern and its replacement, and the driver that applies them everywhere until none matches.

The driver takes care of everything that rules need not check: the type of the replaced value stays the same down to
its strides, values with other users are kept, outputs do not start to share memory, and new nodes get a type and an
origin.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._ops import OpOverload

from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import (
    Impossible,
    erase_unused,
    new_call,
    shares_new_memory,
)
from tsopt.compiler.graph.origin import origin_of, record_rewrite
from tsopt.compiler.graph.program import Numerics, Program, format_type, tensor_type, type_of
from tsopt.compiler.rewriting.made_weights import MadeWeights
from tsopt.compiler.rewriting.match import EXAMPLE, Match, Pattern, match, pattern
from tsopt.compiler.rewriting.pass_base import Changes, Declined, Done, Limits, Pass
from tsopt.compiler.rewriting.relayout import retyped_behind
from tsopt.errors import PassError, RuleError, TsoptError

USED_ELSEWHERE = "a value inside the pattern has other users"
OTHER_LAYOUT = "the value would have a different memory layout"
OTHER_LAYOUT_BEHIND = "a downstream value would have a different memory layout"
NEW_ALIAS = "an output would start to share memory with an input, a weight or another output"
NO_DOC = "the equation is in the docstring, which python -OO removes"


@dataclass(frozen=True, slots=True)
class Skip:
    """What a rule returns when a condition fails."""

    reason: str


@dataclass(frozen=True)
class Rule:
    """A rewrite rule: patterns, the function that replaces a match, and its numerics class. `doc` is the equation."""

    name: str
    functions: tuple[Callable[..., Any], ...] = field(repr=False)
    body: Callable[..., fx.Node | Skip | None] = field(repr=False)
    numerics: Numerics
    doc: str

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns, traced at first use because that imports most of torch. Raises RuleError for an invalid one."""
        try:
            return tuple(pattern(function) for function in self.functions)
        except RuleError as error:
            error.rule = self.name
            raise


def rule(*patterns: Callable[..., Any], numerics: Numerics = Numerics.EXACT) -> Callable[[Callable[..., Any]], Rule]:
    """Turns a function `(at, *holes)` that returns the new value into a rule.

    The function returns `at.skip(reason)` for a near miss, which is reported to the user, and None where the
    pattern is merely too general (a reshape that does reshape).

    Raises:
        RuleError: the pattern or the docstring of the function is missing.
    """
    if not patterns or not all(map(callable, patterns)):
        raise RuleError("a rule needs a pattern, which is a function", fix=f"write @rule({EXAMPLE}) above the function")

    def make(body: Callable[..., Any]) -> Rule:
        doc = (body.__doc__ or "").strip().splitlines() or ([NO_DOC] if sys.flags.optimize > 1 else [])
        if not doc:
            raise RuleError(
                f"the rule {body.__name__} needs a docstring with its equation",
                fix='begin the function with """exp(log(x)) -> x""", for example',
            )
        return Rule(body.__name__, patterns, body, numerics, doc[0])

    return make


class Site:
    """The place where a rule is tried: what it may query and create there."""

    def __init__(self, program: Program, root: fx.Node, made: MadeWeights | None = None) -> None:
        self.program, self.root = program, root
        self.made = made or MadeWeights(program)
        self.created: list[fx.Node] = []

    def call(self, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """Creates a typed call, with the origin of the root."""
        return self.call_from(self.root, target, *args, **kwargs)

    def call_from(self, origin: fx.Node, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """Creates a typed call with the origin of a value: of the layer that it still is, not of what goes into it."""
        node = new_call(self.program, self.root, origin, target, args, kwargs)
        self.created.append(node)
        return node

    def constant(self, value: torch.Tensor, hint: str) -> fx.Node:
        """A weight on the device of the root: one with these bits that this pass has made, or a new one.

        Args:
            hint: what the name of a new one begins with.
        """
        value = value.to(ops.tensors_of(self.root.meta["val"])[0].device)
        node, is_new = self.made.read(value, self.root, hint)
        self.created += [node] if is_new else []
        return node

    def skip(self, reason: str) -> Skip:
        return Skip(reason)

    def type(self, node: fx.Node) -> TensorType:
        return tensor_type(node)

    def is_tensor(self, node: object) -> TypeGuard[fx.Node]:
        """Whether it is one: operands may be numbers that the program computes."""
        return isinstance(node, fx.Node) and isinstance(type_of(node), TensorType)

    def value(self, node: object) -> torch.Tensor | None:
        """The tensor of a weight; None for a computed value."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            return self.program.weights[str(node.target)]
        return None

    def same_type(self, node: object) -> bool:
        """Whether a value has the dtype, shape and device of the root."""
        if not self.is_tensor(node):
            return False
        a, b = tensor_type(node), tensor_type(self.root)
        return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)

    def discard(self) -> None:
        """Removes everything created here."""
        for node in reversed(self.created):
            if node.op == "get_attr":
                self.made.forget(node)
            else:
                self.program.graph.erase_node(node)
        self.created.clear()


@dataclass(frozen=True)
class RulePass(Pass):
    """Applies rules to every value in graph order, and again to everything that changed, until none matches.

    Raises:
        RuleError: `rules` is anything else than rules.
    """

    name: str
    rules: tuple[Rule, ...] = field(repr=False)  # a hundred, in the signature of `optimize`

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Iterable):
            raise RuleError(
                f"the pass {self.name} takes a tuple of rules, got a {type(self.rules).__name__}",
                fix=f'write RulePass("{self.name}", (my_rule,))',
            )
        object.__setattr__(self, "rules", tuple(self.rules))
        other = next((item for item in self.rules if not isinstance(item, Rule)), None)
        if other is not None:
            raise RuleError(
                f"the pass {self.name} has a {type(other).__name__} among its rules",
                why="only what @rule(...) returns is a rule",
                fix=f"write @rule({EXAMPLE}) above the function, with its pattern in the parentheses",
            )

    def run(self, program: Program, limits: Limits) -> Changes:
        return _Driver(self, program, limits).run()


class _Driver:
    def __init__(self, owner: RulePass, program: Program, limits: Limits) -> None:
        self.owner, self.program, self.limits = owner, program, limits
        self.by_root: dict[Any, list[tuple[Rule, Pattern]]] = {}
        for item in owner.rules:
            if item.numerics <= limits.numerics and item.name not in limits.without:
                for wanted in item.patterns:
                    self.by_root.setdefault(wanted.root.target, []).append((item, wanted))
        self.done: list[Done] = []
        self.declined: dict[tuple[str, fx.Node], Declined] = {}
        self.numerics = Numerics.EXACT
        self.erased: set[fx.Node] = set()
        self.made = MadeWeights(program, self.erased)
        self.queue: deque[fx.Node] = deque()
        self.queued: set[fx.Node] = set()
        self.roots: dict[fx.Node, ops.Roots] | None = None
        self.retyped: dict[fx.Node, Any] = {}  # by the rewrite at hand: values that get other strides of size 1

    def run(self) -> Changes:
        nodes = list(self.program.calls())
        bound = 20 * len(nodes) + 100
        self.push(nodes)
        while self.queue:
            node = self.queue.popleft()
            self.queued.discard(node)
            if node in self.erased or node.target not in self.by_root:
                continue
            for item, wanted in self.by_root[node.target]:
                found = match(wanted, node)
                if found is None:
                    continue
                if self.try_rule(item, found, node):
                    break
                if self.limits.fuel is not None and self.limits.fuel < 0:
                    return self.changes()
            if len(self.done) > bound:
                names = sorted({done.rule for done in self.done[-50:]})
                raise PassError(
                    f"the pass {self.owner.name} does not terminate",
                    why=f"rules still being applied: {', '.join(names)}",
                    fix=f"leave one out: --without {names[0]}",
                )
        return self.changes()

    def changes(self) -> Changes:
        alive = tuple(d for (_, node), d in self.declined.items() if node not in self.erased)
        return Changes(tuple(self.done), alive, self.numerics)

    def push(self, nodes: Iterator[fx.Node] | list[fx.Node]) -> None:
        for node in nodes:
            if node not in self.queued and ops.is_call(node):
                self.queued.add(node)
                self.queue.append(node)

    def try_rule(self, item: Rule, found: Match, node: fx.Node) -> bool:
        site = Site(self.program, node, self.made)
        used_elsewhere = any(set(inner.users) - set(found.nodes) for inner in found.nodes if inner is not node)
        result = self.tried(item, found, site)
        if result is None or isinstance(result, Skip):
            site.discard()
            return self.decline(item, node, result.reason) if result else False
        reason = USED_ELSEWHERE if used_elsewhere else self.objection(item, node, result, site.created)
        if reason:
            site.discard()
            return self.decline(item, node, reason)
        if not self.limits.take():
            site.discard()
            return False
        self.done.append(Done(item.name, origin_of(node)))
        record_rewrite(site.created, item.name, found.nodes)
        self.numerics = max(self.numerics, item.numerics)
        users = list(node.users)
        node.replace_all_uses_with(result)
        for behind, value in self.retyped.items():
            behind.meta["val"] = value
        self.moved(users)
        erase_unused(self.program, [node], self.erased, replaced=(node,))
        self.push([*site.created, result, *users])
        return True

    def tried(self, item: Rule, found: Match, site: Site) -> fx.Node | Skip | None:
        """What a rule makes of a match. Raises RuleError: the rule fails."""
        try:
            return item.body(site, *found.holes.values())
        except Impossible as refused:
            return site.skip(str(refused))
        except Exception as error:  # a mistake in the rule: which one, and where, is what helps
            raise RuleError(
                f"the rule {item.name} raises {type(error).__name__}",
                rule=item.name,
                where=origin_of(site.root) or site.root.name,
                why=(error.what if isinstance(error, TsoptError) else str(error)) or None,
                fix=f"correct the rule, or leave it out: --without {item.name}",
            ) from error

    def decline(self, item: Rule, node: fx.Node, reason: str) -> bool:
        self.declined[item.name, node] = Declined(item.name, origin_of(node), reason)
        return False

    def objection(self, item: Rule, node: fx.Node, result: object, made: Iterable[fx.Node]) -> str | None:
        if not isinstance(result, fx.Node):
            raise RuleError(
                f"the rule {item.name} returned {type(result).__name__}",
                rule=item.name,
                where=origin_of(node) or node.name,
                fix="return a value or at.skip(reason)",
            )
        if _reads(result, node, made):
            raise RuleError(
                f"the rule {item.name} returns the value that it is to replace, or computes the new one from it",
                where=origin_of(node) or node.name,
                fix="compute the new value from the holes of the pattern, and return None where there is nothing to do",
            )
        before, after = type_of(node), type_of(result)
        self.retyped = {}
        if not isinstance(before, TensorType) or not isinstance(after, TensorType):
            if before != after:
                what = f"the rule {item.name} replaces {format_type(before)} with {format_type(after)}"
                raise RuleError(what, rule=item.name)
            return None
        if (before.dtype, before.shape, before.device) != (after.dtype, after.shape, after.device):
            raise RuleError(
                f"the rule {item.name} replaces {before} with {after}",
                rule=item.name,
                where=origin_of(node),
                fix="check at.same_type first",
            )
        if not before.same_layout(after.stride):
            return OTHER_LAYOUT
        retyped = retyped_behind(self.program, node, result)
        if retyped is None:
            return OTHER_LAYOUT_BEHIND
        self.retyped = retyped
        return NEW_ALIAS if shares_new_memory(self.program, node, result, self.memory(made)) else None

    def memory(self, made: Iterable[fx.Node]) -> dict[fx.Node, ops.Roots]:
        """Where every value may live. Kept: working it out again for each rewrite takes the square of the time."""
        if self.roots is None:
            self.roots = ops.storage_roots(self.program.graph.nodes)
        for node in made:
            self.roots[node] = ops.roots_of(node, self.roots)
        return self.roots

    def moved(self, users: Iterable[fx.Node]) -> None:
        """Looks again at the users of a value that now lives elsewhere: they may be views of it."""
        todo = [] if self.roots is None else list(users)
        while todo and self.roots is not None:
            node = todo.pop()
            roots = ops.roots_of(node, self.roots)
            if roots != self.roots.get(node):
                self.roots[node] = roots
                todo += node.users


def _reads(result: fx.Node, node: fx.Node, made: Iterable[fx.Node]) -> bool:
    """Whether a value that a rule returns is a node, or is computed from it by what the rule has made."""
    needed = {result}
    for item in reversed(list(made)):
        if item in needed:
            needed.update(item.all_input_nodes)
    return node in needed
