"""Edits of a graph: typed calls, weights under fresh names, dead values erased, no memory that outputs newly share."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Mapping
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.infer import infer, infer_weight
from tsopt.compiler.graph.program import Program


class Impossible(Exception):
    """The op rejects a call that a rule wanted to make; the driver declines the rule there."""


def new_call(
    program: Program, before: fx.Node, origin: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Node:
    """A new call before a node, typed; it says that it comes from where `origin` does.

    Raises:
        Impossible: the op takes no such arguments.
    """
    try:
        value = infer(program, target, args, kwargs)
    except Exception as error:  # the op's own checks decide what fits
        raise Impossible(f"{target} rejects its arguments: {str(error).splitlines()[0][:120]}") from error
    with program.graph.inserting_before(before):
        node = program.graph.call_function(target, args, kwargs)
    node.meta = {key: origin.meta[key] for key in ("module", "source") if key in origin.meta} | {"val": value}
    return node


def new_weight(program: Program, before: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    """A new weight, read before a node."""
    program.weights[name] = value
    with program.graph.inserting_before(before):
        node = program.graph.create_node("get_attr", name)
    node.meta = {"val": infer_weight(program, value)}
    return node


def fresh_name(hint: str, taken: Container[str]) -> str:
    """The hint, or the first of `hint.2`, `hint.3` ... that is not taken."""
    numbered = (f"{hint}.{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([hint], numbered) if name not in taken)


def erase_unused(
    program: Program, nodes: list[fx.Node], erased: set[fx.Node], replaced: Collection[fx.Node] = ()
) -> None:
    """Erases values that nobody uses, then what only they used; the last of `nodes` first.

    Args:
        erased: what is erased already; what is erased here is added.
        replaced: calls that go although they draw or have an effect.
    """
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node in erased or node.users or not (node.op == "get_attr" or ops.is_pure(node) or node in replaced):
            continue
        sources = node.all_input_nodes
        program.graph.erase_node(node)
        erased.add(node)
        todo += sources


def without_idle_draws(program: Program) -> Program:
    """A program for an engine that does not use torch's generator: it need not draw what no result depends on.

    Returns:
        The program itself where it draws nothing.
    """
    if not any(map(ops.draws, program.calls())):
        return program
    made = program.copy()
    for node in reversed(list(made.calls())):
        if not node.users and (ops.is_pure(node) or ops.draws(node)) and not ops.has_effect(node):
            made.graph.erase_node(node)
    return made


def shares_new_memory(
    program: Program, node: fx.Node, result: fx.Node, roots: Mapping[fx.Node, ops.Roots] | None = None
) -> bool:
    """Whether putting `result` for `node` makes an output share memory that it did not share before.

    Args:
        roots: the memory of every value, where it is known; worked out for the whole program otherwise.
    """
    if roots is None:
        if not reaches_output(node):
            return False
        roots = ops.storage_roots(program.graph.nodes)
    gained = roots[result] - roots[node]
    if not gained or not reaches_output(node):
        return False
    if any(source.op in ("placeholder", "get_attr") for source, _ in gained):
        return True
    mine = [value for value in program.outputs if roots[value] & roots[node]]
    others = [value for value in program.outputs if value not in mine]
    return any(roots[value] & gained for value in others)


def reaches_output(node: fx.Node) -> bool:
    """Whether the memory of a value, or a view of it, is returned."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return True
            if user not in seen and any(source in seen for source in ops.may_alias(user)):
                seen.add(user)
                todo.append(user)
    return False
