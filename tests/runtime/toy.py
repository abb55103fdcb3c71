"""A backend in one file: it takes one linear layer, and its file holds that layer's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.calling.executable import Executable, Runner

FILE = "toy.safetensors"


@dataclass(frozen=True, slots=True)
class Toy:
    """scale: what the result is multiplied by, for a test to make it wrong."""

    scale: int = 1
    name: str = "toy"

    def missing(self) -> str | None:
        return None

    def unsupported(self, program: Program) -> list[Unsupported]:
        others = [ops.name_of(node) for node in program.calls() if ops.name_of(node) != "aten.linear"]
        return [Unsupported("", f"only linear layers, not {others[0]}")] if others else []

    def compile(self, program: Program) -> Executable:
        (layer,) = program.calls()
        weights = {name: program.weights[str(node.target)] for name, node in zip("wb", layer.args[1:], strict=True)}

        def save(directory: Path) -> None:
            save_file(weights, directory / FILE)

        run, options = runner(weights, self.scale), {"scale": self.scale}
        return Executable(self.name, program.signature, run, save=save, options=options)

    @staticmethod
    def load_runner(directory: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
        return runner(load_file(directory / FILE), options["scale"])


def runner(weights: Mapping[str, torch.Tensor], scale: int) -> Runner:
    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return [linear(inputs[0], weights["w"], weights["b"]) * scale]

    return run
