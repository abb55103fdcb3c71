"""Which input sets are made up for a model: far from the example only where no value can do harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.graph.program import Program
from tsopt.runtime.checking import custom_ops, gpu_asserts
from tsopt.runtime.checking.inputs import InputSet, input_sets, sets_near


def made_up(program: Program, example: Example, seed: int) -> list[InputSet]:
    """Input sets that a program can be called with."""
    return sets_near(example, seed) if why_near(program) else input_sets(example, seed)


def why_near(program: Program) -> str:
    """Why a program is only called with the example and values near it; empty if any values will do."""
    return _said(custom_ops.of_program(program), gpu_asserts.of_program(program))


def why_near_in_call(model: Callable[..., Any], example: Example) -> str:
    """The same for a model that is no program, by the ops of one call."""
    names = custom_ops.ops_of_call(model, example)
    return _said(custom_ops.among(names), gpu_asserts.among(names) if is_on_gpu(example) else ())


def _said(custom: Sequence[str], asserted: Sequence[str]) -> str:
    if custom:
        return f"{', '.join(custom)} might not check them"
    return f"on a GPU, an assert could fail and make it unusable ({', '.join(asserted)})" if asserted else ""
