"""Decisions that rounding may have made: a comparison, an argmax, a floor of values that are within its reach."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.jumps import CASTS, COMPARISONS, is_decision, jump
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph.values import Unknown, Values
from tsopt.runtime.checking.margins import (
    CHOICES,
    Known,
    Margins,
    breaks_ties,
    is_float,
    roundings,
    sources_of,
    upstream,
)
from tsopt.runtime.checking.other_decisions import OtherDecisions

# Of these the sizes of results are in the order of those of the operand, and nothing is rounded.
MONOTONE = CASTS | {"floor", "ceil", "trunc", "round", "sign", "relu", "relu6", "hardtanh", "clamp", "clamp_min"}
MONOTONE |= {"clamp_max", "view", "reshape", "flatten", "permute", "transpose", "unsqueeze", "squeeze", "expand"}
MONOTONE |= {"slice", "select", "clone", "contiguous", "detach", "alias"}
NOT, AND, OR = ({name, f"logical_{name}", f"bitwise_{name}"} for name in ("not", "and", "or"))
MOST = 50  # decisions that a call is made of: what they depend on is kept in float64


def values_behind(node: fx.Node) -> list[fx.Node]:
    """The values that a decision depends on, or what is made of several."""
    return list(dict.fromkeys(source for item in _followed(node) for source in (*sources_of(item), *_origin(item))))


def _followed(node: fx.Node) -> list[fx.Node]:
    """A call and the decisions that it is made of, the nearest first."""
    found = [node]
    for item in found:  # which grows meanwhile
        found += [part for part in dict.fromkeys(_parts(item)) if part not in found][: MOST - len(found)]
    return found


def decided_within_rounding(
    node: fx.Node,
    wide: Known,
    own: Known,
    result: torch.Tensor,
    reference: torch.Tensor,
    program: Values | None = None,
) -> bool:
    """Whether what a call returns differs only where a decision is within rounding, and is what the other one gives.

    Args:
        wide: the values that the decision depends on, in float64: `values_behind`.
        own: the same values in the dtypes of the program.
        program: all values in these dtypes, as rounding may have decided before, too; None where it has not.
    """
    sources = values_behind(node)
    if any(isinstance(values[source], Unknown) for source in sources for values in (wide, own)):
        return False
    before = None if program is None else OtherDecisions(_numbers_behind(node), program)
    if before is not None and before.differ:
        wide = before.as_made(sources)  # otherwise what other decisions make would be taken for rounding
        if any(isinstance(wide[source], Unknown) for source in sources):
            return False
    possible = _Question(node, result, reference, Margins(wide, own)).possible() | (result == reference)
    if before is None or bool(possible.all()):
        return possible.shape == result.shape and bool(possible.all())
    combined = [source for source in sources if _is_number(source) and before.are_combined(source)]
    further: dict[fx.Node, torch.Tensor] = {}
    for other in before.otherwise([node, *sources]):
        if other.own[node].shape == result.shape:
            possible = possible | _Question(node, result, other.own[node], other).possible()
        for source in combined if other.own[node].shape == result.shape else ():
            # Of many decisions, only some may be made otherwise: what they make is in between.
            moved = (other.wide[source] - wide[source]).abs()
            further[source] = torch.maximum(further.get(source, moved), moved)
    if further:
        possible = possible | _Question(node, result, reference, Margins(wide, own, further)).possible()
    return possible.shape == result.shape and bool(possible.all())


def _numbers_behind(node: fx.Node) -> list[fx.Node]:
    """What is compared, cut or chosen among."""
    followed = _followed(node)
    numbers = (source for item in followed for source in _origin(item) or sources_of(item))
    return [source for source in dict.fromkeys(numbers) if source not in followed]


class _Question:
    """Which elements of a result a call may return, if rounding decides what is within its reach.

    Of each value behind the call it is asked once, however many others are made of it.

    Args:
        reference: what the call returns by the decisions that the margins are of.
    """

    def __init__(self, node: fx.Node, result: torch.Tensor, reference: torch.Tensor, margins: Margins) -> None:
        self.node, self.result, self.reference, self.margins = node, result, reference, margins
        self._followed = set(_followed(node))
        self._possible: dict[fx.Node, torch.Tensor] = {}
        self._truths: dict[fx.Node, tuple[torch.Tensor, torch.Tensor]] = {}

    def possible(self) -> torch.Tensor:
        """The elements of the result that are among those that the call may return."""
        if base_name(self.node) not in CHOICES:
            return self._may_be(self.node)
        margin = self.margins.of_places(self.node, self.result, self.reference)
        return self.result == self.reference if margin is None else margin.is_within

    def _may_be(self, part: Any) -> torch.Tensor:
        """Where the result is what a part of the call may be."""
        if not isinstance(part, fx.Node):
            return self.result == part
        if part not in self._possible:
            self._possible[part] = self._is_possible(part)
        return self._possible[part]

    def _is_possible(self, part: fx.Node) -> torch.Tensor:
        parts = self._parts(part)
        if not parts and not _is_boolean(part):
            return self._may_be_made(part, self.result)
        if base_name(part) == "where" and not _is_boolean(part):
            condition, chosen, other = part.args
            no, yes = self._truth(condition)
            return (yes & self._may_be(chosen)) | (no & self._may_be(other))
        no, yes = self._truth(part if _is_boolean(part) else parts[0])  # otherwise a cast of a boolean
        return ((self.result == 0) & no) | ((self.result == 1) & yes)

    def _truth(self, part: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a boolean may be false, and where it may be true."""
        if not isinstance(part, fx.Node):
            yes = torch.as_tensor(bool(part), device=self.result.device)
            return ~yes, yes
        if part not in self._truths:
            self._truths[part] = self._truth_of(part)
        return self._truths[part]

    def _truth_of(self, part: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
        parts, name = self._parts(part), base_name(part)
        if not parts:
            no, yes = (torch.full_like(self._made(part), value) for value in (False, True))
            return self._may_be_made(part, no), self._may_be_made(part, yes)
        no, yes = self._truth(part.args[0])
        if name in CASTS:
            return no, yes
        if name in NOT:
            return yes, no
        others = [self._truth(item) for item in part.args[1:]]
        if name == "where":
            (chosen_no, chosen_yes), (other_no, other_yes) = others
            return (yes & chosen_no) | (no & other_no), (yes & chosen_yes) | (no & other_yes)
        ((other_no, other_yes),) = others
        return (no | other_no, yes & other_yes) if name in AND else (no & other_no, yes | other_yes)

    def _may_be_made(self, part: fx.Node, result: torch.Tensor) -> torch.Tensor:
        """Where a result is what a call may make of numbers."""
        is_made = result == self._made(part)
        if base_name(part) in COMPARISONS:
            margin = self.margins.of(part)
            return is_made if margin is None else is_made | margin.is_within
        for origin in _origin(part):
            value, reach = self.margins.wide[origin], self.margins.reach(origin)
            return is_made | _between_ends(part, result, value - reach, value + reach)
        return is_made

    def _parts(self, node: fx.Node) -> list[fx.Node]:
        """The decisions that a call is made of, if they are all followed."""
        parts = _parts(node) if node in self._followed else []
        return parts if self._followed.issuperset(parts) else []

    def _made(self, part: fx.Node) -> torch.Tensor:
        found: torch.Tensor = self.reference if part is self.node else self.margins.own[part]
        return found


def _parts(node: fx.Node) -> list[fx.Node]:
    """The decisions of which a call makes another one; empty where it makes one of numbers, or none."""
    name, value, sources = base_name(node), node.meta.get("val"), sources_of(node)
    is_made = isinstance(value, torch.Tensor) and not is_float(value)
    is_boolean = all(_is_boolean(source) for source in sources) and len(sources) == len(node.args)
    if name == "where":
        return sources if is_made and len(node.args) == 3 else []
    if name in NOT | AND | OR:
        return sources if is_boolean else []
    return sources[:1] if name in CASTS and is_made and sources and _is_boolean(sources[0]) else []


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and is_float(value)


def _is_boolean(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _origin(node: fx.Node) -> list[fx.Node]:
    """The number by whose size a call with a jump decides, before what keeps the order of sizes; empty for others."""
    value = node.meta.get("val")
    if jump(node) is None or not isinstance(value, torch.Tensor) or is_float(value):
        return []
    return _steps(node)[-1:]


def _steps(node: fx.Node) -> list[fx.Node]:
    """What a call with a jump is given, and what that is made of, as far as it is only moved, rounded and limited."""
    found: list[fx.Node] = []
    while not found or _keeps_order(node):
        sources = sources_of(node)[:1] if base_name(node) in CASTS else node.all_input_nodes
        value = sources[0].meta.get("val") if len(sources) == 1 else None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            break
        (node,) = sources
        found.append(node)
    return found


def _keeps_order(node: fx.Node) -> bool:
    if base_name(node) not in CASTS:
        return base_name(node) in MONOTONE
    made, given = (item.meta["val"].dtype for item in (node, sources_of(node)[0]))
    return made == given or made.itemsize > given.itemsize  # otherwise it rounds


def _between_ends(node: fx.Node, result: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Which elements of a result a call with a jump may return for numbers between two ends."""
    near_zero = torch.zeros_like(low).clamp(low, high)  # a cast to bool tells zero from what is on either side of it
    found = result.long()
    least, middle, most = (_made_of(node, end).long() for end in (low, near_zero, high))
    is_between = (least <= found) & (found <= most)
    is_wrapped = (most < least) & ((least <= found) | (found <= most))
    return is_between | is_wrapped | (found == middle)


def _made_of(node: fx.Node, number: torch.Tensor) -> torch.Tensor:
    """What a call with a jump makes of another number than the one that it comes from."""
    for step in (*reversed(_steps(node)[:-1]), node):
        dtype = step.meta["val"].dtype
        if base_name(step) in CASTS:
            number = number if dtype.is_floating_point else number.to(dtype)
            continue
        target: Any = step.target
        given = dict.fromkeys(step.all_input_nodes, number)
        args, kwargs = fx.node.map_arg((step.args, dict(step.kwargs)), given.__getitem__)
        number = target(*args, **kwargs)
    return number


def may_be_decided_by_rounding(output: fx.Node, wide: Known, own: Known) -> bool:
    """Whether an output depends on a decision within rounding: an order of equal values, or a small margin.

    Where all that is compared is zero, such as products of zeros, no order of operations makes anything else of it.
    """
    margins = Margins(wide, own)
    for node in upstream(output):
        if breaks_ties(node):
            return True
        if not is_decision(node) or not roundings(sources_of(node)):
            continue
        if _is_unknown(node, wide, own):
            return True
        margin = margins.of(node)
        if margin is None or bool(margin.is_within.any()):
            return True
    return False


def _is_unknown(node: fx.Node, *known: Known) -> bool:
    """Whether a value that a decision depends on cannot be had: random numbers are others in float64."""
    return any(isinstance(values[source], Unknown) for source in sources_of(node) for values in known)
