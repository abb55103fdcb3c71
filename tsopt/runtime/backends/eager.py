"""Runs the Program with torch itself, op by op: measures the effect of the passes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.serialize import write_program
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.calling.executable import Executable, Runner
from tsopt.runtime.profiling.kernels import Timed
from tsopt.runtime.profiling.op_by_op import timed
from tsopt.runtime.thread_count import torch_threads


@dataclass(frozen=True, slots=True)
class EagerBackend:
    """torch's own kernels.

    threads: intra-op threads during a call; None leaves torch's own setting.
    """

    threads: int | None = None
    name: str = "eager"

    def missing(self) -> str | None:
        return None

    def unsupported(self, program: Program) -> list[Unsupported]:
        return []

    def compile(self, program: Program) -> Executable:
        forward = program.module().forward

        def save(directory: Path) -> None:
            write_program(program, directory)

        return Executable(
            self.name,
            program.signature,
            torch_runner(forward, program.signature, self.threads),
            state=[program.state[item.name] for item in program.signature.state_inputs],
            save=save,
            options={"threads": self.threads},
        )

    def profile(self, program: Program, inputs: Sequence[Any]) -> Timed:
        with torch_threads(self.threads):
            return timed(program, inputs)


def by_torch(program: Program) -> Runner:
    """Runs a program with torch's own kernels, for calls that an engine must not serve."""
    return torch_runner(program.module().forward, program.signature, None)


def torch_runner(forward: Any, signature: Signature, threads: int | None) -> Runner:
    """Calls flat torch code without gradients, on inputs laid out as captured, with the thread count asked for."""
    strides = [None if item.type.contiguous else item.type.stride for item in signature.inputs]
    process = os.getpid()

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return forward(*[laid_out(t, s) for t, s in zip(inputs, strides, strict=True)])  # type: ignore[no-any-return]

    def run_with_threads(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        before = torch.get_num_threads()
        # NOTE: in a forked process with more than one thread, torch waits forever for the parent's threads.
        if before == threads or threads is None or os.getpid() != process:
            return run(inputs)
        torch.set_num_threads(threads)
        try:
            return run(inputs)
        finally:
            torch.set_num_threads(before)

    return run if threads is None else run_with_threads


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """A tensor with these strides, or contiguous where there are none; itself where it is so."""
    # NOTE: views in the program were checked for the captured strides; other strides would fail or read wrong places.
    if stride is None:
        return tensor if tensor.is_contiguous() else tensor.contiguous()
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
