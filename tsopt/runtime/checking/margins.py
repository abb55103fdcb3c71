"""How far values that are compared, chosen among or cut are from another decision, and how far rounding reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.jumps import COMPARISONS, jump
from tsopt.compiler.analysis.non_finite import PASSING
from tsopt.compiler.analysis.range_rules import PLACES
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.analysis.whole_numbers import SUMS, exact_sums
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.values import Values
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
    | {"select_scatter", "copy", "fill", "tril", "triu", "nan_to_num", "max_pool3d", "pixel_shuffle", "pixel_unshuffle"}
    | {f"upsample_nearest{exact}{n}d" for exact in ("", "_exact") for n in (1, 2, 3)}
) - {"dropout"}
# Of these IEEE 754 says the last bit. Where eager gives the float64 value itself, another value is a wrong one.
CORRECTLY_ROUNDED = frozenset(
    {*("add", "sub", "subtract", "rsub", "mul", "multiply"), *("div", "divide", "true_divide", "reciprocal", "sqrt")}
)
Known = Mapping[fx.Node, Any] | Values
PEERS = 100.0  # times a number: others as large as this say how it is rounded; a mask of -1e9 among them does not
DRAWS = 10  # times the largest error of eager's own: another order of the same operations may be off by as much


def sources_of(node: fx.Node) -> list[fx.Node]:
    return [arg for arg in node.args if isinstance(arg, fx.Node)]


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
class Margin:
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


class Margins:
    """How far the decisions of a program are from other ones, and how far rounding reaches in what they depend on.

    Args:
        wide: values in float64.
        own: the same values in the dtypes of the program.
        further: how much further some of the values may be moved, by other decisions before them.
    """

    def __init__(self, wide: Known, own: Known, further: Mapping[fx.Node, torch.Tensor] | None = None) -> None:
        self.wide, self.own, self._further = wide, own, further or {}

    def of(self, node: fx.Node) -> Margin | None:
        """Of a comparison, or of a call whose result jumps at some numbers."""
        name, sources = base_name(node), sources_of(node)
        if name in COMPARISONS and len(node.args) == 2:
            place = self.wide[sources[0]].device

            def values(known: Known) -> Iterator[torch.Tensor]:
                given = (known[arg] if isinstance(arg, fx.Node) else arg for arg in node.args)
                return (torch.as_tensor(value, device=place) for value in given)

            (a, b), (own_a, own_b) = values(self.wide), values(self.own)
            found = self._between(sources, a, b, own_a, own_b)
            return self._moved(found, [self._further[source] for source in sources if source in self._further])
        distance = jump(node)
        if distance is None or not sources or not self.wide[sources[0]].is_floating_point():
            return None
        return Margin(distance(self.wide[sources[0]].double()), self.reach(sources[0]))

    def of_places(self, node: fx.Node, result: torch.Tensor, reference: torch.Tensor) -> Margin | None:
        """Of two places that an argmax may return; None for a place that does not exist."""
        bound = ops.bind(node)
        source: fx.Node = bound["self"]
        value, mine, dim = self.wide[source], self.own[source], bound["dim"]
        if dim is None:
            value, mine, dim = value.reshape(-1), mine.reshape(-1), 0
        elif not bound["keepdim"]:
            result, reference = result.unsqueeze(dim), reference.unsqueeze(dim)
        places = [place.reshape(1) if not place.dim() else place for place in (result, reference)]
        if bool(((places[0] < 0) | (places[0] >= value.shape[dim])).any()):
            return None
        (a, own_a), (b, own_b) = ([given.gather(dim, place) for given in (value, mine)] for place in places)
        shape = reference.shape if bound["dim"] is None or bound["keepdim"] else reference.squeeze(dim).shape
        found = self._between([source], a, b, own_a, own_b)
        further = self._further.get(source)
        if further is not None:
            further = further.amax().expand(1) if bound["dim"] is None else further.amax(dim, keepdim=True)
        found = self._moved(found, [] if further is None else [further])
        return Margin(found.gap.reshape(shape), found.reach.reshape(shape), in_order=True)

    def reach(self, node: fx.Node) -> torch.Tensor:
        """How far rounding moves a number."""
        value, mine = self.wide[node], self.own[node]
        further = [self._further[node]] if node in self._further else []
        return self._moved(self._between([node], value, value, mine, mine), further).reach

    @staticmethod
    def _moved(margin: Margin, further: Iterable[torch.Tensor]) -> Margin:
        return replace(margin, reach=margin.reach + sum(further))

    def _between(
        self,
        operands: list[fx.Node],
        a: torch.Tensor,
        b: torch.Tensor,
        own_a: torch.Tensor,
        own_b: torch.Tensor,
    ) -> Margin:
        """How far two values are apart, and how far rounding moves what the operands are."""
        if not is_float(a) and not is_float(b):
            gap = (a != b).double()  # any difference of whole numbers is one
            return Margin(gap, torch.zeros_like(gap))
        a, b, own_a, own_b = torch.broadcast_tensors(*(_widest(value, a, b) for value in (a, b, own_a, own_b)))
        gap = (a - b).abs()
        reach = torch.zeros_like(gap)
        size = torch.maximum(a.abs(), b.abs())
        about = torch.maximum(size, torch.maximum(own_a.abs(), own_b.abs()))
        for source in operands:
            dtype = roundings([source])
            if dtype is None:
                continue
            rtol, atol, _ = TOLERANCES[dtype]
            scale, error = _of_peers(self.wide[source], self.own[source], about)
            reach = torch.maximum(reach, rtol * size + atol * scale + DRAWS * error)
        if _is_correctly_rounded(operands):
            reach = reach.masked_fill((a == own_a) & (b == own_b), 0.0)
        return Margin(gap, reach)


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


def is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def roundings(sources: list[fx.Node]) -> torch.dtype | None:
    """The coarsest dtype in which values were computed; None where nothing on their way has rounded them."""
    found: set[torch.dtype] = set()
    rounds = False
    for node in upstream(*sources, floats_only=True):
        rounds = rounds or base_name(node) not in UNROUNDED
        found |= {tensor.dtype for tensor in ops.tensors_of(node.meta.get("val")) if is_float(tensor)}
    known = found & TOLERANCES.keys() or {torch.bfloat16}
    return max(known, key=lambda dtype: TOLERANCES[dtype][0]) if rounds else None


def _is_correctly_rounded(sources: list[fx.Node]) -> bool:
    """Whether values are made by calls of which it is known to the last bit what they return."""
    known = UNROUNDED | CORRECTLY_ROUNDED
    others = [node for node in upstream(*sources, floats_only=True) if base_name(node) not in known]
    if not others or any(base_name(node) not in SUMS for node in others):
        return not others
    return exact_sums(others[0].graph).issuperset(others)


def upstream(*nodes: fx.Node, floats_only: bool = False) -> Iterator[fx.Node]:
    """The calls that values depend on; only as far as there are floating-point numbers, if asked for."""
    seen: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in seen or not ops.is_call(node):
            continue
        seen.add(node)
        if floats_only and not any(map(is_float, ops.tensors_of(node.meta.get("val")))):
            continue
        yield node
        pending += node.all_input_nodes
