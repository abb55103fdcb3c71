"""Inputs generated from the example: for verdicts, for timing, and for tracing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.narrow_floats import widened
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.calls.types import TensorType, contiguous_strides
from tsopt.compiler.graph.program import Program
from tsopt.runtime.checking.extremes import EXTREME as EXTREME
from tsopt.runtime.checking.extremes import extreme_values
from tsopt.runtime.checking.masks import MASKS, mask_values

LARGE = 100.0  # times the example
SPECIAL, ZEROS = "special", "zeros"


@dataclass(frozen=True, slots=True)
class InputSet:
    """A call to try: how it was made, and the call."""

    kind: str
    example: Example

    def clone(self) -> Example:
        """The same values in other memory: what a model writes to its input stays there."""
        leaves, structure = flatten((self.example.args, self.example.kwargs))
        args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in leaves])
        return Example(args, kwargs)


def blank(signature: Signature) -> tuple[torch.Tensor, ...]:
    """Zeros for every input of a signature, laid out as captured: what tracers and exporters want to see."""

    def zeros(kind: TensorType) -> torch.Tensor:
        stride = contiguous_strides(kind.shape) if kind.contiguous else kind.stride
        return torch.empty_strided(kind.shape, stride, dtype=getattr(torch, kind.dtype), device=kind.device).zero_()

    return tuple(zeros(item.type) for item in signature.inputs)


def exported(program: Program) -> ExportedProgram:
    """The program through torch.export once more: what exporters and torch's compiler take. Flat in, a tuple out."""
    signature = program.signature
    shapes = tuple({axis: Dim.AUTO for axis, name in enumerate(item.axes) if name} for item in signature.inputs)
    return torch.export.export(
        program.module(), blank(signature), dynamic_shapes=shapes if signature.dims else None, strict=False
    )


# Beginnings of the kinds of inputs that are made up as large as the example.
OF_THE_SAME_SIZE = ("drawn", "random", "near", MASKS)
# What the largest number of a `large` input is at least, where the dtype has the exponents of float32: exp overflows
# there, and so does what a formula computes by way of it.
REACH = {torch.float32: 200.0, torch.bfloat16: 200.0}
NEAR = 0.01  # the part of a number that a value near it may be off by


def is_ordinary(kind: str) -> bool:
    """Whether inputs of this kind have ordinary magnitudes."""
    return kind != "large" and not kind.startswith(EXTREME)


def input_sets(example: Example, seed: int, program: Program | None = None) -> list[InputSet]:
    """The example, values drawn from it, and for floats: normal values of its mean and spread, x100 (see REACH) and
    x0.001, `special` ones (NaN, infinities, zeros of both signs, denormals), on which only bits can be compared, and
    `zeros` of both signs, such as padding.

    In these, integers and booleans are drawn from the example's own values, so that an index stays an index. With the
    program, which says where that is safe, the `extreme` sets hold the ends of each dtype and numbers as they are in
    the world: of one input at a time, because one may be an index, and of all. In the `mask` sets, masks hide nothing,
    all, or whole rows.
    """
    generator = torch.Generator().manual_seed(seed)
    leaves, structure = flatten((example.args, example.kwargs))

    def rebuilt(kind: str, values: Sequence[Any]) -> InputSet:
        args, kwargs = unflatten(structure, values)
        return InputSet(kind, Example(args, kwargs))

    sets = [InputSet("example", example)]
    sets += [rebuilt(f"drawn-{i}", [_drawn(leaf, generator) for leaf in leaves]) for i in (1, 2)]
    if any(leaf.is_floating_point() for leaf in leaves):
        for kind, scale in (("random", 1.0), ("large", LARGE), ("tiny", 1e-3)):
            sets.append(rebuilt(kind, [_normal(leaf, scale, generator) for leaf in leaves]))
        sets.append(rebuilt(SPECIAL, [_special(leaf, generator) for leaf in leaves]))
        sets.append(rebuilt(ZEROS, [_zeros(leaf, generator) for leaf in leaves]))
    else:
        sets += [rebuilt(f"drawn-{i}", [_drawn(leaf, generator) for leaf in leaves]) for i in (3, 4)]
    if program is not None:
        sets += [rebuilt(kind, values) for kind, values in extreme_values(program, leaves, generator)]
        sets += [rebuilt(kind, values) for kind, values in mask_values(program, leaves, generator)]
    return sets


def sets_near(example: Example, seed: int) -> list[InputSet]:
    """The example, and values so near that any code that takes the example takes them."""
    generator = torch.Generator().manual_seed(seed)
    leaves, structure = flatten((example.args, example.kwargs))
    made = [unflatten(structure, values_near(leaves, generator)) for _ in range(2)]
    return [InputSet("example", example), *(InputSet(f"near-{i}", Example(*call)) for i, call in enumerate(made, 1))]


def values_near(leaves: Sequence[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Floats that are off by 1 % at most, and integers and booleans as they are."""

    def near(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point():
            return leaf
        off = NEAR * (2 * torch.rand(leaf.shape, generator=generator, device="cpu") - 1)
        return _like(leaf, (widened(leaf.detach()) * (1 + off.to(leaf.device))).to(leaf.dtype))

    return [near(leaf) for leaf in leaves]


def by_column(inputs: InputSet, example: Example, seed: int, *, floats: bool = False) -> InputSet | None:
    """The same input set with integers that the example has in the same place along the last axis.

    The columns of a table have codes of their own, and that of one may be none of another. None if it changes nothing.

    Args:
        floats: draw other numbers in this way too, for they may be codes as well.
    """
    generator = torch.Generator().manual_seed(seed)
    made_up, structure = flatten((inputs.example.args, inputs.example.kwargs))
    own, _ = flatten((example.args, example.kwargs))
    leaves = [
        made if not floats and (known.is_floating_point() or known.is_complex()) else _drawn_by_column(known, generator)
        for made, known in zip(made_up, own, strict=True)
    ]
    if all(a is b or torch.equal(a, b) for a, b in zip(leaves, made_up, strict=True)):
        return None
    return InputSet(inputs.kind, Example(*unflatten(structure, leaves)))


def _drawn_by_column(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if leaf.dim() < 2 or leaf.numel() == 0:
        return leaf
    rows = leaf.detach().reshape(-1, leaf.shape[-1])
    places = torch.randint(len(rows), rows.shape, generator=generator, device="cpu").to(leaf.device)
    return _like(leaf, rows.gather(0, places).reshape(leaf.shape))


def _drawn(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if leaf.numel() == 0:
        return leaf
    flat = leaf.detach().reshape(-1)
    if leaf.is_floating_point() and bool((flat == flat[0]).all()):
        return _normal(leaf, 1.0, generator)
    places = torch.randint(flat.numel(), (flat.numel(),), generator=generator, device="cpu").to(flat.device)
    return _like(leaf, flat[places].reshape(leaf.shape))


def _normal(leaf: torch.Tensor, scale: float, generator: torch.Generator) -> torch.Tensor:
    if not leaf.is_floating_point() or leaf.numel() == 0:
        return _drawn(leaf, generator)
    values = leaf.detach().float()
    spread = float(values.std()) if leaf.numel() > 1 else 0.0
    noise = torch.randn(leaf.shape, generator=generator, device="cpu").to(leaf.device)
    made = (noise * (spread or 1.0) + float(values.mean())) * scale
    largest = float(made.abs().max())
    if scale == LARGE and 0 < largest < REACH.get(leaf.dtype, 0.0):
        made *= REACH[leaf.dtype] / largest
    return _like(leaf, made.to(leaf.dtype))


def _zeros(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not leaf.is_floating_point():
        return _drawn(leaf, generator)
    wide = torch.zeros(leaf.numel(), device=leaf.device)
    wide[::2] = -0.0  # where nothing reads the sign of a zero, both are the same
    return _like(leaf, wide.to(leaf.dtype).reshape(leaf.shape))


def _special(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = _normal(leaf, 1.0, generator)
    if not leaf.is_floating_point():
        return values
    tiny = torch.finfo(leaf.dtype).smallest_normal / 2
    flat = widened(values).clone().reshape(-1)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, tiny, -tiny], dtype=flat.dtype, device=leaf.device)
    # One place in eight: enough for each of them, and most of the values stay ordinary.
    places = torch.arange(0, flat.numel(), 8 if flat.numel() >= 8 * len(odd) else 1, device=leaf.device)
    flat[places] = odd[torch.arange(len(places), device=leaf.device) % len(odd)]
    return _like(leaf, flat.to(leaf.dtype).reshape(leaf.shape))


def _like(leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if values.stride() == leaf.stride() or any(step == 0 for step in leaf.stride()):
        return values
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(values)
