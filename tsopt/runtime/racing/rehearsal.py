"""The model as a race calls it: a shadow copy, so that other threads can call the model at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tsopt.compiler.capture.shadow import Shadow, shadow_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.protect import InEvalMode, modules_of
from tsopt.runtime.calling.executable import Executable


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What is called in the model's place.

    Attributes:
        model: the shadow, or the model itself.
        shadow: None where it is the model itself.
    """

    model: Callable[..., Any]
    shadow: Shadow | None = None

    def program(self, program: Program) -> Program:
        """A program of the model as one of the shadow, or the other way round: it writes what is called here."""
        return replace(program, state={name: self._twin(tensor) for name, tensor in program.state.items()})

    def ended(self, executable: Executable | None) -> Executable | None:
        """The winner, which from now on writes what the model holds."""
        if executable is not None:
            executable.state[:] = map(self._twin, executable.state)
        return executable

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.shadow is None else self.shadow.twin(tensor)


def rehearsal_of(model: Callable[..., Any], program: Program) -> Rehearsal:
    """What is to be called in place of a model.

    Args:
        program: captured from a shadow of the model.
    """
    itself = Rehearsal(model)
    shadow = shadow_of(model, written=program.state.values())
    if shadow is None or _returns_its_own(program, shadow):
        return itself
    if isinstance(model, InEvalMode):
        for module in modules_of(shadow.called):
            module.training = False
    return Rehearsal(shadow.called, shadow)


def _returns_its_own(program: Program, shadow: Shadow) -> bool:
    """Whether a call returns objects that the model holds: a shadow returns copies of them."""
    signature = program.signature
    todo = [signature.result, *(effect.parts for effect in signature.effects)]
    while todo:
        node = todo.pop()
        if shadow.holds(node.value):
            return True
        todo += node.children
    return False
