"""Models and short cuts that the tests of the runtime share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tsopt.compiler.calls.example import as_example
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.bundles import store
from tsopt.runtime.bundles.members import digest_of
from tsopt.runtime.checking.verdict import Verdict
from tsopt.runtime.racing.cache import Entry
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.row import BETWEEN_OPS, Loop, Row
from tsopt.runtime.racing.speedup import Speedup, Timing
from tsopt.runtime.racing.timing import ColdStart
from tsopt.runtime.report import Report

# What a cache keeps of one race.
KEY = "ab" * 32
ENTRY = Entry(
    (
        Row("eager", timing=Timing((2.0, 2.1), 3)),
        Row(
            "ONNX Runtime",
            timing=Timing((1.0, 1.1)),
            speedup=Speedup(1.9, 1.8, 2.0),
            accuracy=Verdict(True, "bits", 0.0, ("example",), ("large",)),
            compile_seconds=2.5,
            cold=ColdStart(7.5, 2),
            notes=("a note",),
            key="onnxruntime",
            loops=(Loop(BETWEEN_OPS, Timing((1.2, 1.3)), Speedup(1.5, 1.4, 1.6)),),
        ),
        Row("TorchScript", "wrong", "it is", key="torchscript"),
    ),
    "onnxruntime",
    "1.90x as fast",
    10.0,
    1_700_000_000.0,
)


def candidates(*specs: str) -> tuple[Candidate, ...]:
    return tuple(map(Candidate.parse, specs))


class Counter(nn.Module):
    """Writes a buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


@dataclass
class Witness:
    """Knows how often it was made."""

    value: Any
    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        Witness.made += 1


def report(winner: str = "eager") -> Report:
    rows = (Row("eager"), *([] if winner == "eager" else [Row(winner, key=winner)]))
    key = rows[-1].key
    return Report(model="Model", rows=rows, winner_key=key, why="chosen", nodes=(1, 1), environment=environment())


def save(executable: Any, path: Path, model: Callable[..., Any], example: Any) -> Path:
    return store.save(executable, path, model, as_example(example), report())


def sign(directory: Path, change=None) -> None:
    """Makes a bundle's hashes right again: what a hostile author would do as well."""
    place = directory / "manifest.json"
    manifest = json.loads(place.read_text())
    for name in list(manifest["members"]):
        file = directory / name
        if file.is_file():
            raw = file.read_bytes()
            manifest["members"][name] = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)}
    if change is not None:
        change(manifest)
    manifest["sha256"] = digest_of(manifest)
    place.write_text(json.dumps(manifest))
