"""A backend without a library that returns zeros of the right type. For testing the machinery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.calling.executable import Executable


@dataclass(frozen=True, slots=True)
class NullBackend:
    """Never a candidate in a race: it is fast and wrong."""

    name: str = "null"

    def missing(self) -> str | None:
        return None

    def unsupported(self, program: Program) -> list[Unsupported]:
        return []

    def compile(self, program: Program) -> Executable:
        types = [item.type for item in program.signature.outputs]

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=t.device) for t in types]

        state = [program.state[item.name] for item in program.signature.state_inputs]
        return Executable(self.name, program.signature, run, state=state)
