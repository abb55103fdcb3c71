"""Decisions that rounding may have made: a comparison, an argmax, a floor of values that are within its reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.jumps import CASTS, COMPARISONS, is_decision, jump
from tsopt.compiler.analysis.non_finite import PASSING
from tsopt.compiler.analysis.range_rules import PLACES
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.values import Unknown, Values
from tsopt.runtime.checking.compare import TOLERANCES

CHOICES = ("argmax", "argmin")
# Equal values may be taken in any order. `max` and `min` do so where they return places as well.
ORDERING = PLACES | {"argsort", "cummax", "cummin", "multinomial"} | set(CHOICES)
ORDERING_POOLS = frozenset(f"{kind}max_pool{n}d" for kind in ("", "adaptive_", "fractional_") for n in (1, 2, 3))
# Values of the operands, or what every engine makes of them to the last bit.
UNROUNDED = (
    PASSING
    | PLACES
    | {"type_as", "pad", "neg", "abs", "relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max"}
    | {"maximum", "minimum", "fmax", "fmin", "sign", "floor", "ceil", "trunc", "round", "embedding", "msort"}
    | {"full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_full", "new_zeros", "new_ones"}
    | {"scalar_tensor", "index_put", "index_copy", "index_fill", "scatter", "masked_scatter", "slice_scatter"}
    | {"select_scatter", "copy", "fill", "tril", "triu", "nan_to_num", "max_pool3d"}
) - {"dropout"}
# Of these the sizes of results are in the order of those of the operand, and nothing is rounded.
MONOTONE = CASTS | {"floor", "ceil", "trunc", "round", "sign", "relu", "relu6", "hardtanh", "clamp", "clamp_min"}
MONOTONE |= {"clamp_max", "view", "reshape", "flatten", "permute", "transpose", "unsqueeze", "squeeze", "expand"}
MONOTONE |= {"slice", "select", "clone", "contiguous", "detach", "alias"}
NOT, AND, OR = ({name, f"logical_{name}", f"bitwise_{name}"} for name in ("not", "and", "or"))
DEPTH = 6  # of what is made of decisions: each step asks about two operands, and about both of their values
Known = Mapping[fx.Node, Any] | Values
PEERS = 100.0  # times a number: others as large as this say how it is rounded; a mask of -1e9 among them does not
DRAWS = 10  # times the largest error of eager's own: another order of the same operations may be off by as much


def sources_of(node: fx.Node) -> list[fx.Node]:
    return [arg for arg in node.args if isinstance(arg, fx.Node)]


def values_behind(node: fx.Node) -> list[fx.Node]:
    """The values that a decision depends on, or what is made of several."""
    found: dict[fx.Node, None] = {}
    level = [node]
    for depth in range(DEPTH + 1):
        parts = [part for item in level for part in _parts(item)] if depth < DEPTH else []
        margins = [source for item in level for source in (*sources_of(item), *_origin(item))]
        found |= dict.fromkeys([*parts, *margins])
        level = list(dict.fromkeys(parts))
    return list(found)


def decided_within_rounding(
    node: fx.Node,
    wide: Known,
    own: Known,
    result: torch.Tensor,
    reference: torch.Tensor,
) -> bool:
    """Whether what a call returns differs only where a decision is within rounding, and is what the other one gives.

    Args:
        wide: the values that the decision depends on, in float64: `values_behind`.
        own: the same values in the dtypes of the program.
    """
    if any(isinstance(values[source], Unknown) for source in values_behind(node) for values in (wide, own)):
        return False
    margin = _margin_of_places(node, wide, own, result, reference)
    if margin is not None:
        return margin.shape == result.shape and bool(margin.is_within[result != reference].all())
    possible = _may_be(node, result, wide, own, reference) | (result == reference)
    return possible.shape == result.shape and bool(possible.all())


def _may_be(
    node: fx.Node, result: torch.Tensor, wide: Known, own: Known, reference: torch.Tensor, depth: int = 0
) -> torch.Tensor:
    """Which elements of a result a call may return, if rounding decides what is within its reach.

    Args:
        reference: what the call returns in the dtypes of the program.
    """

    def may_be(part: Any, result: torch.Tensor) -> torch.Tensor:
        if not isinstance(part, fx.Node):
            return result == part
        return _may_be(part, result, wide, own, own[part], depth + 1)

    parts, name = _parts(node) if depth < DEPTH else [], base_name(node)
    if parts and name in NOT:
        return may_be(parts[0], ~result)
    if parts and name in AND | OR:
        no, yes = (torch.full_like(reference, value) for value in (False, True))
        all_no, all_yes = (may_be(parts[0], value) & may_be(parts[1], value) for value in (no, yes))
        some_no, some_yes = (may_be(parts[0], value) | may_be(parts[1], value) for value in (no, yes))
        return torch.where(result, all_yes, some_no) if name in AND else torch.where(result, some_yes, all_no)
    if parts and name == "where":
        condition, chosen, other = node.args
        chooses = torch.ones_like(reference, dtype=torch.bool)
        return (may_be(condition, chooses) & may_be(chosen, result)) | (
            may_be(condition, ~chooses) & may_be(other, result)
        )
    if parts:  # a cast of a boolean
        return may_be(parts[0], result != 0) & ((result == 0) | (result == 1))
    if name in COMPARISONS:
        margin = _margin(node, wide, own)
        return (result == reference) if margin is None else (result == reference) | margin.is_within
    origin = _origin(node)
    return _between_ends(node, result, *_ends(origin[0], wide, own)) if origin else result == reference


def _parts(node: fx.Node) -> list[fx.Node]:
    """The decisions of which a call makes another one; empty where it makes one of numbers, or none."""
    name, value, sources = base_name(node), node.meta.get("val"), sources_of(node)
    is_made = isinstance(value, torch.Tensor) and not _is_float(value)
    is_boolean = all(_is_boolean(source) for source in sources) and len(sources) == len(node.args)
    if name == "where":
        return sources if is_made and len(node.args) == 3 else []
    if name in NOT | AND | OR:
        return sources if is_boolean else []
    return sources[:1] if name in CASTS and is_made and sources and _is_boolean(sources[0]) else []


def _is_boolean(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _origin(node: fx.Node) -> list[fx.Node]:
    """The number by whose size a call with a jump decides, before what keeps the order of sizes; empty for others."""
    value = node.meta.get("val")
    if jump(node) is None or not isinstance(value, torch.Tensor) or _is_float(value):
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


def _ends(origin: fx.Node, wide: Known, own: Known) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest that rounding may make of a number."""
    value, mine = wide[origin], own[origin]
    reach = _between([(origin, value, mine)], value, value, mine, mine).reach
    decisions = (item for item in _upstream(origin) if is_decision(item) or breaks_ties(item))
    if any(_roundings(sources_of(item)) for item in decisions):
        reach = reach.clamp(min=1.0)  # rounding may have made another decision before: off by one step
    return value - reach, value + reach


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
    for node in _upstream(output):
        if breaks_ties(node):
            return True
        if not is_decision(node) or not _roundings(sources_of(node)):
            continue
        if _is_unknown(node, wide, own):
            return True
        margin = _margin(node, wide, own)
        if margin is None or bool(margin.is_within.any()):
            return True
    return False


def _is_unknown(node: fx.Node, *known: Known) -> bool:
    """Whether a value that a decision depends on cannot be had: random numbers are others in float64."""
    return any(isinstance(values[source], Unknown) for source in sources_of(node) for values in known)


def breaks_ties(node: fx.Node) -> bool:
    """Whether a call may take equal values in another order; of calls that are not known it is not known."""
    if not ops.is_call(node) or ops.is_number(node):
        return False
    name = base_name(node)
    if not name:
        return True
    if name in ("max", "min", "median") or name.removesuffix("_with_indices") in ORDERING_POOLS:
        return len(ops.tensors_of(node.meta.get("val"))) > 1
    return name in ORDERING


@dataclass(frozen=True, slots=True)
class _Margin:
    """How far each decision is from another one, and how far rounding reaches; equal values are a tie in an order."""

    gap: torch.Tensor
    reach: torch.Tensor
    in_order: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.gap.shape

    @property
    def is_within(self) -> torch.Tensor:
        return (self.gap < self.reach) | ((self.gap == 0) & self.in_order)


def _margin_of_places(
    node: fx.Node,
    wide: Known,
    own: Known,
    result: torch.Tensor,
    reference: torch.Tensor,
) -> _Margin | None:
    """Of two places that an argmax may return; None for anything else, or a place that does not exist."""
    if base_name(node) not in CHOICES:
        return None
    bound = ops.bind(node)
    source: fx.Node = bound["self"]
    value, mine, dim = wide[source], own[source], bound["dim"]
    if dim is None:
        value, mine, dim = value.reshape(-1), mine.reshape(-1), 0
    elif not bound["keepdim"]:
        result, reference = result.unsqueeze(dim), reference.unsqueeze(dim)
    places = [place.reshape(1) if not place.dim() else place for place in (result, reference)]
    if bool(((places[0] < 0) | (places[0] >= value.shape[dim])).any()):
        return None
    (a, own_a), (b, own_b) = ([given.gather(dim, place) for given in (value, mine)] for place in places)
    shape = reference.shape if bound["dim"] is None or bound["keepdim"] else reference.squeeze(dim).shape
    found = _between([(source, wide[source], own[source])], a, b, own_a, own_b)
    return _Margin(found.gap.reshape(shape), found.reach.reshape(shape), in_order=True)


def _margin(node: fx.Node, wide: Known, own: Known) -> _Margin | None:
    """Of a comparison, or of a call whose result jumps at some numbers."""
    name = base_name(node)
    if name in COMPARISONS and len(node.args) == 2:
        place = wide[sources_of(node)[0]].device

        def values(known: Known) -> Iterator[torch.Tensor]:
            return (torch.as_tensor(known[arg] if isinstance(arg, fx.Node) else arg, device=place) for arg in node.args)

        (a, b), (own_a, own_b) = values(wide), values(own)
        return _between([(item, wide[item], own[item]) for item in sources_of(node)], a, b, own_a, own_b)
    distance, sources = jump(node), sources_of(node)
    if distance is None or not sources or not wide[sources[0]].is_floating_point():
        return None
    source = sources[0]
    gap = distance(wide[source].double())
    found = _between([(source, wide[source], own[source])], wide[source], wide[source], own[source], own[source])
    return _Margin(gap, found.reach)


def _between(
    operands: list[tuple[fx.Node, Any, Any]],
    a: torch.Tensor,
    b: torch.Tensor,
    own_a: torch.Tensor,
    own_b: torch.Tensor,
) -> _Margin:
    """How far two values are apart, and how far rounding moves what the operands are."""
    if not _is_float(a) and not _is_float(b):
        gap = (a != b).double()  # any difference of whole numbers is one
        return _Margin(gap, torch.zeros_like(gap))
    a, b, own_a, own_b = torch.broadcast_tensors(*(_widest(value, a, b) for value in (a, b, own_a, own_b)))
    gap = (a - b).abs()
    reach = torch.zeros_like(gap)
    size = torch.maximum(a.abs(), b.abs())
    about = torch.maximum(size, torch.maximum(own_a.abs(), own_b.abs()))
    for source, wide, own in operands:
        dtype = _roundings([source])
        if dtype is None:
            continue
        rtol, atol, _ = TOLERANCES[dtype]
        scale, error = _of_peers(wide, own, about)
        reach = torch.maximum(reach, rtol * size + atol * scale + DRAWS * error)
    return _Margin(gap, reach)


def _of_peers(wide: torch.Tensor, own: torch.Tensor, about: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The root mean square of the values that are no larger than others by far, and eager's largest error in them."""
    value, mine = (tensor.reshape(-1) for tensor in (wide, own.to(wide.dtype)))
    finite = value.isfinite() & mine.isfinite()
    sizes, order = value[finite].abs().sort()
    if not len(sizes):
        return torch.zeros_like(about), torch.zeros_like(about)
    errors = (value[finite] - mine[finite]).abs()[order].cummax(0).values
    means = sizes.square().cumsum(0) / torch.arange(1, len(sizes) + 1, dtype=sizes.dtype, device=sizes.device)
    count = torch.searchsorted(sizes, (PEERS * about).contiguous(), right=True)
    last, none = (count - 1).clamp(min=0), count == 0
    return means.sqrt()[last].masked_fill(none, 0.0), errors[last].masked_fill(none, 0.0)


def _widest(value: torch.Tensor, *like: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if any(item.is_complex() for item in like) else torch.float64)


def _is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _roundings(sources: list[fx.Node]) -> torch.dtype | None:
    """The coarsest dtype in which values were computed; None where nothing on their way has rounded them."""
    found: set[torch.dtype] = set()
    rounds = False
    for node in _upstream(*sources, floats_only=True):
        rounds = rounds or base_name(node) not in UNROUNDED
        found |= {tensor.dtype for tensor in ops.tensors_of(node.meta.get("val")) if _is_float(tensor)}
    known = found & TOLERANCES.keys() or {torch.bfloat16}
    return max(known, key=lambda dtype: TOLERANCES[dtype][0]) if rounds else None


def _upstream(*nodes: fx.Node, floats_only: bool = False) -> Iterator[fx.Node]:
    """The calls that values depend on; only as far as there are floating-point numbers, if asked for."""
    seen: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in seen or not ops.is_call(node):
            continue
        seen.add(node)
        if floats_only and not any(map(_is_float, ops.tensors_of(node.meta.get("val")))):
            continue
        yield node
        pending += node.all_input_nodes
