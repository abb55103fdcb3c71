"""The model as a race calls it: a shadow copy, so that other threads can call the model at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.capture.shadow import Shadow, shadow_of
from tsopt.compiler.capture.shadow_check import answers_alike
from tsopt.compiler.graph.program import Program
from tsopt.compiler.model_reads import Reads, reads_of
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.outside import kept_outside
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
        state = {name: self.twin(tensor) for name, tensor in program.state.items()}
        weights = tuple(map(self.twin, program.returned_weights))
        return replace(program, state=state, returned_weights=weights)

    def ended(self, executable: Executable | None) -> Executable | None:
        """The winner, which from now on writes and returns what the model holds."""
        if executable is not None:
            executable.state[:] = map(self.twin, executable.state)
            executable.share(map(self.twin, executable.returned_weights))
        return executable

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor of the model is in what is called here, and the other way round."""
        return tensor if self.shadow is None else self.shadow.twin(tensor)


@dataclass(frozen=True, slots=True)
class StandIn:
    """A shadow that computes on an example what the model does, and does not change the model.

    Attributes:
        reads: what its code reads.
    """

    shadow: Shadow
    reads: Reads

    @property
    def called(self) -> Callable[..., Any]:
        return self.shadow.called


def stand_in(
    model: Callable[..., Any],
    written: Iterable[torch.Tensor],
    example: Example,
    *,
    always_compared: bool = False,
    draws: bool = True,
) -> StandIn | None:
    """What can be called in place of a model; None where there is nothing.

    Code may reach the model past its shadow, or know the model by its identity.

    Args:
        written: tensors that the model writes in a call.
        always_compared: with a call of the model even where that changes the model.
        draws: as for `answers_alike`.
    """
    written = list(written)
    shadow = shadow_of(model, written=written)
    if shadow is None:
        return None
    reads = reads_of(shadow.called)
    if any(map(shadow.holds, reads.modules)):
        return None
    alone = not others_run()  # what others write stays, unless the shadow writes the very same
    shared = [tensor for tensor in written if alone or shadow.twin(tensor) is tensor]
    with kept_outside(model):
        called, compared = shadow.called, written if always_compared else None
        writes = bool(written)
        same = answers_alike(model, called, example, shared=shared, written=compared, writes=writes, draws=draws)
    return StandIn(shadow, reads) if same else None


def rehearsal_of(model: Callable[..., Any], signature: Signature, shadow: Shadow | None) -> Rehearsal:
    """What is to be called in place of a model.

    Args:
        signature: of what was captured.
        shadow: one that is known to do what the model does.
    """
    if shadow is None or _returns_its_own(signature, shadow):
        return Rehearsal(model)
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
