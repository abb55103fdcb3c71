"""ONNX translations of nearest-neighbor upsampling, with the source indices of PyTorch.

PyTorch multiplies a position by a scale that has been rounded to float32; Resize divides by another one, and reads a
neighbor where the quotient is near a whole number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnxscript import ir, opset18
from torch import fx

from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.specialize import evaluate, traced_sizes

op: Any = opset18
DOUBLE = ir.DataType.DOUBLE
SPATIAL = 2  # the first spatial axis
RANK = len("2d")
NAMES = {"upsample_nearest": False, "_upsample_nearest_exact": True}


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """By op, as the exporter takes them."""
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name, exact in NAMES.items():
        for rank in (1, 2, 3):
            packet = getattr(aten, f"{name}{rank}d")
            found[packet.vec] = _of_lists(packet.default, exact)
            found[packet.default] = _of_scales(packet.default, exact)
    return found


def imprecise(program: Program) -> Iterator[fx.Node]:
    """The calls at whose dynamic sizes the indices depend on how a quotient or a float64 is rounded."""
    calls = [node for node in all_calls(program) if _name(node) in NAMES and _depends_on_rounding(node)]
    if not calls or not program.signature.dims:
        return
    recorded = traced_sizes(program.signature)
    others = {d.name: d.low if d.low != recorded[d.name] else d.low + d.step for d in program.signature.dims}
    values = evaluate(program, others)
    for node in calls:
        source: Any = node.args[0]
        before, after = (
            value.shape[SPATIAL:] for value in (source.meta["val"], values.get(source, source.meta["val"]))
        )
        if before != after:
            yield node


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))[:-RANK]


def _depends_on_rounding(node: fx.Node) -> bool:
    found = [value for key, value in bind(node).items() if key.startswith("scale") and value is not None]
    scales = [scale for part in found for scale in (part if isinstance(part, list | tuple) else (part,))]
    if not scales or any(scale is None or math.frexp(scale)[0] != 0.5 for scale in scales):
        return True
    return NAMES[_name(node)] and any(scale < 1 for scale in scales)


def _of_lists(kernel: Any, exact: bool) -> Callable[..., Any]:
    def upsample(x: Any, output_size: Any = None, scale_factors: Sequence[float] | None = None) -> Any:
        return _upsampled(kernel, exact, x, output_size, scale_factors or ())

    return upsample


def _of_scales(kernel: Any, exact: bool) -> Callable[..., Any]:
    def upsample(
        x: Any, output_size: Any, first: float | None = None, second: float | None = None, third: float | None = None
    ) -> Any:
        return _upsampled(kernel, exact, x, output_size, (first, second, third))

    return upsample


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis that is upsampled.

    Attributes:
        kernel: PyTorch's op.
        exact: of nearest-exact, which rounds from the middle of an element.
        size: before; None if it differs from call to call.
        made: after: a number, or a value of the ONNX model; None if that follows from the scale.
        scale: as the user gave it, or None.
    """

    kernel: Any
    exact: bool
    x: Any
    position: int
    size: int | None
    made: Any
    scale: float | None

    @property
    def ratio(self) -> float | None:
        """A power of two by which the axis grows, or without `exact` shrinks: there all ways agree. Otherwise None."""
        if self.size is None:
            ratio = self.scale if self.made is None else None
        else:
            made = self._static()
            ratio = None if made is None else made / self.size
            if self.scale is not None and ratio != self.scale:
                return None
        if ratio is None or math.frexp(ratio)[0] != 0.5 or (self.exact and ratio < 1):
            return None
        return ratio

    def _static(self) -> int | None:
        if self.made is None and self.size is not None and self.scale is not None:
            return int(self.size * self.scale)
        return self.made if isinstance(self.made, int) else None

    def index(self) -> Any:
        """Where each element is read from."""
        made = self._static()
        if self.size is None or made is None:
            return self._computed()
        others = len(self.x.shape) - SPATIAL - 1
        wide = torch.arange(self.size, dtype=torch.float64 if self.x.dtype == DOUBLE else torch.float32, device="cpu")
        # From the op itself: its kernels round in several ways.
        found = self.kernel(wide.reshape(1, 1, *[1] * others, -1), [*[1] * others, made], *[None] * others, self.scale)
        return op.Constant(value=ir.tensor(found.reshape(-1).long().numpy()))

    def _computed(self) -> Any:
        size = op.Shape(self.x, start=self.position, end=self.position + 1)
        made = self._made(size)
        dtype = DOUBLE if self.x.dtype == DOUBLE else ir.DataType.FLOAT
        if self.scale is None:
            scale = op.Div(op.Cast(size, to=dtype), op.Cast(made, to=dtype))
        else:
            scale = _number(1 / self.scale, dtype)
        places = op.Range(op.Constant(value_int=0), op.Squeeze(made), op.Constant(value_int=1))
        if not self.exact:
            source = op.Mul(op.Cast(places, to=dtype), scale)
        elif len(self.x.shape) == SPATIAL + 2:
            source = op.Mul(op.Add(op.Cast(places, to=dtype), _number(0.5, dtype)), scale)
        else:
            # These kernels subtract a half and add it again, the first without a rounding in between.
            half = _number(0.5, DOUBLE)
            middle = op.Mul(op.Add(op.Cast(places, to=DOUBLE), half), op.Cast(scale, to=DOUBLE))
            source = op.Add(op.Cast(op.Sub(middle, half), to=dtype), _number(0.5, dtype))
        found = op.Cast(op.Floor(source), to=ir.DataType.INT64)
        return op.Min(op.Max(found, op.Constant(value_int=0)), op.Sub(size, op.Constant(value_int=1)))

    def _made(self, size: Any) -> Any:
        if isinstance(self.made, int):
            return op.Constant(value_ints=[self.made])
        if self.made is not None:
            return op.Reshape(op.Cast(self.made, to=ir.DataType.INT64), op.Constant(value_ints=[1]))
        assert self.scale is not None, "PyTorch requires a size or a scale"
        return op.Cast(op.Mul(op.Cast(size, to=DOUBLE), _number(self.scale, DOUBLE)), to=ir.DataType.INT64)


def _number(value: float, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(value, dtype=dtype))


def _upsampled(kernel: Any, exact: bool, x: Any, output_size: Any, scales: Sequence[float | None]) -> Any:
    axes = []
    for number in range(len(x.shape) - SPATIAL):
        size = x.shape[SPATIAL + number]
        axes.append(
            _Axis(
                kernel,
                exact,
                x,
                SPATIAL + number,
                size if isinstance(size, int) else None,
                None if output_size is None else output_size[number],
                scales[number] if number < len(scales) else None,
            )
        )
    ratios = [axis.ratio for axis in axes]
    if all(ratio is not None for ratio in ratios):
        factors = op.Constant(value_floats=[1.0, 1.0, *ratios])
        modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return op.Resize(x, None, factors, None, mode="nearest", **modes)
    for axis, ratio in zip(axes, ratios, strict=True):
        if ratio != 1:
            x = op.Gather(x, axis.index(), axis=axis.position)
    return x
