"""Models and short cuts that the tests of the runtime share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tsopt.compiler.example import as_example
from tsopt.runtime import artifact
from tsopt.runtime.environment import environment
from tsopt.runtime.report import Report, Row


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
    rows = (Row("eager"),) if winner == "eager" else (Row("eager"), Row(winner))
    return Report("Model", rows, winner, "chosen", (), (1, 1), 0.0, environment(), "EXACT")


def save(executable: Any, path: Path, model: Callable[..., Any], example: Any) -> Path:
    return artifact.save(executable, path, model, as_example(example), report())
