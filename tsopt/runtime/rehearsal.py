"""The model as comparisons and timings call it: a shadow, so that nobody who calls the model meanwhile sees any of it.

A shadow that does not do what the model does is not used: then the model itself is called, and put back as it was.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tsopt.compiler.effects import outcome_of
from tsopt.compiler.example import Example
from tsopt.compiler.explain import unflatten_clones
from tsopt.compiler.program import Program
from tsopt.compiler.protect import InEvalMode, is_untouched, modules_of, protected
from tsopt.compiler.shadow import Shadow, shadow_of
from tsopt.runtime.backend import Executable
from tsopt.runtime.compare import bit_equal

log = logging.getLogger("tsopt")


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


def rehearsal_of(model: Callable[..., Any], program: Program, example: Example, *, seed: int = 0) -> Rehearsal:
    """What is to be called in the place of a model.

    Args:
        program: captured from a shadow of the model.
    """
    itself = Rehearsal(model)
    shadow = shadow_of(model, written=program.state.values())
    if shadow is None or _returns_its_own(program, shadow):
        return itself
    if isinstance(model, InEvalMode):  # to ask the model itself would flip its flags for all who call it
        for module in modules_of(shadow.called):
            module.training = False
        return Rehearsal(shadow.called, shadow)
    return Rehearsal(shadow.called, shadow) if _answers_alike(model, shadow.called, example, seed) else itself


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


def _answers_alike(model: Callable[..., Any], shadow: Callable[..., Any], example: Example, seed: int) -> bool:
    """Whether the shadow does on the example what the model does, to the bit.

    The model is called once, and only where the call changes nothing in it: what would have to be put back could be
    what another thread has written meanwhile.
    """
    answers: list[Any] = []
    try:
        with protected(shadow):
            if not is_untouched(shadow, lambda: answers.append(_answer(shadow, example, seed))):
                return True
        with protected(model):
            answers.append(_answer(model, example, seed))
    except Exception as error:  # the model's own, or of a shadow that is not the same model: the race will see
        log.info("the model is called itself, not its shadow: %s", error)
        return False
    (mine, *my_form), (theirs, *their_form) = answers
    return my_form == their_form and len(mine) == len(theirs) and all(map(bit_equal, mine, theirs))


def _answer(called: Callable[..., Any], example: Example, seed: int) -> tuple[Any, ...]:
    args, kwargs = unflatten_clones(example)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    leaves, *form = outcome_of(called, args, kwargs)
    return [leaf.detach().clone() for leaf in leaves], *form
