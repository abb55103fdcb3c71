"""The model as a race calls it: a shadow copy, so that other threads can call the model at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.capture.shadow import Shadow, shadow_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.model_reads import reads_of
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
        return replace(program, state={name: self.twin(tensor) for name, tensor in program.state.items()})

    def ended(self, executable: Executable | None) -> Executable | None:
        """The winner, which from now on writes what the model holds."""
        if executable is not None:
            executable.state[:] = map(self.twin, executable.state)
        return executable

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor of the model is in what is called here, and the other way round."""
        return tensor if self.shadow is None else self.shadow.twin(tensor)


def stand_in(model: Callable[..., Any], written: Iterable[torch.Tensor]) -> Shadow | None:
    """A shadow of a model; None where there is none, or its code may reach modules of the model past it.

    Args:
        written: parameters that the model writes in a call.
    """
    shadow = shadow_of(model, written=written)
    return None if shadow is None or any(map(shadow.holds, reads_of(shadow.called).modules)) else shadow


def rehearsal_of(
    model: Callable[..., Any], signature: Signature, state: Iterable[torch.Tensor], *, is_apart: bool = True
) -> Rehearsal:
    """What is to be called in place of a model.

    Args:
        signature, state: of what was captured.
        is_apart: it was captured from a shadow, so that one is known not to call modules of the model.
    """
    itself = Rehearsal(model)
    shadow = shadow_of(model, written=state) if is_apart else stand_in(model, state)
    if shadow is None or _returns_its_own(signature, shadow):
        return itself
    if isinstance(model, InEvalMode):
        for module in modules_of(shadow.called):
            module.training = False
    return Rehearsal(shadow.called, shadow)


def _returns_its_own(signature: Signature, shadow: Shadow) -> bool:
    """Whether a call returns objects that the model holds: a shadow returns copies of them."""
    todo = [signature.result, *(effect.parts for effect in signature.effects)]
    while todo:
        node = todo.pop()
        if shadow.holds(node.value):
            return True
        todo += node.children
    return False
