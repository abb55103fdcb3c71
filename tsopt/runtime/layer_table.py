"""The per-layer results of quantization, as values and as table rows. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tsopt.compiler.precision_names import FP32, INT4, INT8

SHOWN = 3  # names of layers in a line
COLUMNS = ("layer", "op", "SQNR dB", "output dB", "KB fp32", "KB int8", "ms fp32", "ms int8", "precision", "because")
TIMES = ("ms fp32", "ms int8")
WITH_INT4 = {"KB int8": "KB quantized", "ms int8": "ms quantized"}  # columns where some layers have 4 bits
ATTENTION = "scaled_dot_product_attention"  # as an op of a record: its product of queries and keys


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """A layer that can be quantized.

    Attributes:
        name: its module path; the name of its value where it has none.
        where: module path and source line.
        op: `linear`, `conv2d`, or ATTENTION.
        sqnr: signal to quantization noise of its own result, in dB; None where it was not measured.
        bytes_float, bytes_int8: of its weight, in float32 and quantized.
        kept: why it is not quantized; empty where it is.
        output_sqnr: that of the outputs of the model if only this layer is quantized, by gradients, in dB; None
            where that is not known.
        ms_float, ms_int8: of a call, in the winner's engine, in float32 and as it runs; None where that has not been
            profiled, or the engine has fused the layer into another one.
        kept_in: the precision that it has otherwise: that of the engine's other ops.
        bits: of its weight, where it is quantized.
        wider: why it has 8 bits where others have 4; otherwise empty.
    """

    name: str
    where: str
    op: str
    sqnr: float | None
    bytes_float: int
    bytes_int8: int
    kept: str = ""
    output_sqnr: float | None = None
    ms_float: float | None = None
    ms_int8: float | None = None
    kept_in: str = FP32
    bits: int = 8
    wider: str = ""

    @property
    def precision(self) -> str:
        """What it is computed in."""
        return self.kept_in if self.kept else INT4 if self.bits == 4 else INT8

    def cells(self) -> tuple[str, ...]:
        """The record under COLUMNS."""
        losses = ("-" if loss is None else f"{loss:.1f}" for loss in (self.sqnr, self.output_sqnr))
        sizes = (f"{self.bytes_float / 1e3:.1f}", f"{self.bytes_int8 / 1e3:.1f}")
        times = map(_milliseconds, (self.ms_float, self.ms_int8))
        return (self.name, self.op, *losses, *sizes, *times, self.precision, self.kept or self.wider)

    def record(self) -> dict[str, Any]:
        """The record for machines."""
        losses = {"sqnr": self.sqnr, "output_sqnr": self.output_sqnr}
        return asdict(self) | {
            key: loss if loss is not None and math.isfinite(loss) else None for key, loss in losses.items()
        }


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def layer_table(records: Iterable[LayerRecord]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A header and a row for each layer, those that lose most first; without times where there are none."""
    ranked = by_loss(records)
    timed = any(item.ms_float is not None or item.ms_int8 is not None for item in ranked)
    shown = [place for place, name in enumerate(COLUMNS) if timed or name not in TIMES]
    cells = (item.cells() for item in ranked)
    names = {name: name for name in COLUMNS} | (WITH_INT4 if _has_int4(ranked) else {})
    return tuple(names[COLUMNS[place]] for place in shown), [tuple(row[place] for place in shown) for row in cells]


def _has_int4(records: Iterable[LayerRecord]) -> bool:
    return any(item.precision == INT4 for item in records)


def by_loss(records: Iterable[LayerRecord]) -> list[LayerRecord]:
    """Sorted by what they cost at the outputs, or by their own SQNR where that is not known; unmeasured layers last."""

    def loss(item: LayerRecord) -> float:
        known = item.sqnr if item.output_sqnr is None else item.output_sqnr
        return math.inf if known is None else known

    return sorted(records, key=loss)


def lines(records: Sequence[LayerRecord], calibration: str, *, chosen: bool = True) -> list[str]:
    """The lines of a report: how many layers are quantized, the calibration data, and why the others are not.

    Args:
        chosen: whether the winner is the candidate that runs them so.
    """
    if not records:
        return []
    name = INT4 if _has_int4(records) else INT8
    said = [f"{name}{'' if chosen else ', which was not chosen'}: {summary(records)}"]
    if calibration:
        said.append(f"calibration: {calibration}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for item in records:
        if why := item.kept or item.wider:
            reasons.setdefault((item.precision, why), []).append(item.name)
    for (precision, reason), names in reasons.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        kept = f"kept in {'float32' if precision == FP32 else precision}"
        said.append(f"{kept} ({reason}): {', '.join(names[:SHOWN])}{more}")
    return said


def summary(records: Sequence[LayerRecord]) -> str:
    """`50 of 54 layers in int8, 11 of 12 calls of attention; lowest SQNR 24.1 dB (layer1.conv1)`.

    With weights in 4 bits: `40 of 54 layers in int4, 10 in int8; ...`.
    """
    layers, attentions = ([item for item in records if (item.op == ATTENTION) is wanted] for wanted in (False, True))
    quantized = [item for item in layers if not item.kept]
    narrow = sum(item.precision == INT4 for item in quantized)
    said = f"{narrow or len(quantized)} of {len(layers)} layers in {INT4 if narrow else INT8}"
    if narrow:
        said += f", {len(quantized) - narrow} in {INT8}"
    if attentions:
        said += f", {sum(not item.kept for item in attentions)} of {len(attentions)} calls of attention"
    measured = [(item.sqnr, item.name) for item in quantized if item.sqnr is not None and math.isfinite(item.sqnr)]
    if measured:
        lowest, name = min(measured)
        said += f"; lowest SQNR {lowest:.1f} dB ({name})"
    return said
