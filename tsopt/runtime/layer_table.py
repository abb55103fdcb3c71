"""The per-layer results of quantization, as values and as table rows. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SHOWN = 3  # names of layers in a line
LAYER_COLUMNS = ("layer", "op", "SQNR dB", "KB fp32", "KB int8", "runs in", "because")


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """A layer that can be quantized.

    Attributes:
        name: its module path; the name of its value where it has none.
        where: module path and source line.
        op: `linear`, `conv2d`.
        sqnr: signal to quantization noise of its own result, in dB; None where it was not measured.
        bytes_float, bytes_int8: of its weight.
        kept: why it stays in float32; empty where it is quantized.
    """

    name: str
    where: str
    op: str
    sqnr: float | None
    bytes_float: int
    bytes_int8: int
    kept: str = ""

    def cells(self) -> tuple[str, ...]:
        """The record under LAYER_COLUMNS."""
        loss = "-" if self.sqnr is None else f"{self.sqnr:.1f}"
        sizes = (f"{self.bytes_float / 1e3:.1f}", f"{self.bytes_int8 / 1e3:.1f}")
        return (self.name, self.op, loss, *sizes, "fp32" if self.kept else "int8", self.kept)

    def record(self) -> dict[str, Any]:
        """The record for machines."""
        sqnr = self.sqnr if self.sqnr is not None and math.isfinite(self.sqnr) else None
        return asdict(self) | {"sqnr": sqnr}


def by_loss(records: Iterable[LayerRecord]) -> list[LayerRecord]:
    """Sorted by SQNR, lowest first; unmeasured layers last."""
    return sorted(records, key=lambda item: math.inf if item.sqnr is None else item.sqnr)


def lines(records: Sequence[LayerRecord], calibration: str) -> list[str]:
    """The lines of a report: how many layers run in int8, the calibration data, and why the others do not."""
    if not records:
        return []
    said = [f"int8: {summary(records)}"]
    if calibration:
        said.append(f"calibration: {calibration}")
    reasons: dict[str, list[str]] = {}
    for item in records:
        if item.kept:
            reasons.setdefault(item.kept, []).append(item.name)
    for reason, names in reasons.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        said.append(f"kept in float32 ({reason}): {', '.join(names[:SHOWN])}{more}")
    return said


def summary(records: Sequence[LayerRecord]) -> str:
    """`50 of 54 layers in int8; lowest SQNR 24.1 dB (layer1.conv1)`."""
    quantized = [item for item in by_loss(records) if not item.kept]
    said = f"{len(quantized)} of {len(records)} layers in int8"
    if quantized and quantized[0].sqnr is not None and math.isfinite(quantized[0].sqnr):
        said += f"; lowest SQNR {quantized[0].sqnr:.1f} dB ({quantized[0].name})"
    return said
