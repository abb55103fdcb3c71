"""The model at other sizes than those of a call: what is asked of it there, and whether it may be asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Signature, dim_of
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.graph.program import Program
from tsopt.compiler.protect import protected
from tsopt.compiler.sizes.dims import resized
from tsopt.compiler.sizes.specialize import specialize, type_at
from tsopt.errors import AccuracyError
from tsopt.runtime.checking import gpu_asserts
from tsopt.runtime.checking.accuracy import Oracle

LARGEST = 1 << 30  # bytes of inputs


@dataclass(frozen=True, slots=True)
class ModelAtSizes:
    """The model, asked at other sizes than those of a call."""

    model: Callable[..., Any]
    example: Example
    seed: int
    is_reference: bool = True

    def runs_at(self, program: Program, sizes: Mapping[str, int], called: Callable[..., Any] | None = None) -> bool:
        """Whether the model takes these sizes, or what is called in its place. Takes one call."""
        if not self.survives(program, sizes):
            return False
        call = call_at(program.signature, self.example, sizes)
        try:
            with protected(self.model, written=program.state.values()):
                (called or self.model)(*call.args, **call.kwargs)
        except Exception:  # whatever is said about sizes that do not fit
            return False
        return True

    def answers_at(self, program: Program, sizes: Mapping[str, int]) -> Oracle | None:
        """Eager's answers; None where the model fails."""
        if not self.survives(program, sizes):
            return None
        call = call_at(program.signature, self.example, sizes)
        state, reference = list(program.state.values()), self._at(program, sizes)
        try:
            return Oracle(self.model, call, reference, seed=self.seed, few=True, state=state)
        except AccuracyError:
            return None

    def _at(self, program: Program, sizes: Mapping[str, int]) -> Program | None:
        """The program at these sizes; None where it does not say what the model does there."""
        try:
            return specialize(program, sizes) if self.is_reference else None
        except Exception:  # whatever an op says about sizes that do not fit: there the model may run all the same
            return None

    def survives(self, program: Program, sizes: Mapping[str, int]) -> bool:
        """Whether the GPU of such a call, if it has one, is known to survive it: all indices exist."""
        if not is_on_gpu(self.example):
            return True
        reference = self._at(program, sizes)
        if reference is None:
            return not gpu_asserts.has_indices(program)
        return gpu_asserts.all_exist(reference, call_at(program.signature, self.example, sizes))


def is_too_large(signature: Signature, sizes: Mapping[str, int]) -> bool:
    types = [type_at(item, sizes) for item in signature.user_inputs]
    return sum(kind.numel * getattr(torch, kind.dtype).itemsize for kind in types) > LARGEST


def call_at(signature: Signature, example: Example, sizes: Mapping[str, int]) -> Example:
    """The same call at other sizes."""
    places = {
        (position, axis): sizes[dim] + more
        for position, item in enumerate(signature.user_inputs)
        for axis, name in enumerate(item.axes)
        if name is not None
        for dim, more in [dim_of(name)]
    }
    return resized(example, places, signature.outer)
