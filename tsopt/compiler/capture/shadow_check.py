"""Checks that a shadow copy behaves like the model: one call of each on the example, compared bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.capture.export_errors import unflatten_clones
from tsopt.compiler.protect import is_untouched, protected, same_bytes
from tsopt.compiler.random_state import seed_all

log = logging.getLogger("tsopt")
SEED = 20011


def answers_alike(model: Callable[..., Any], shadow: Callable[..., Any], example: Example) -> bool:
    """Whether the shadow does on the example what the model does.

    The model is called once, and only where a call changes nothing in it: what would have to be put back could be what
    another thread has written meanwhile.
    """
    answers: list[Any] = []
    try:
        with protected(shadow):
            if not is_untouched(shadow, lambda: answers.append(_answer(shadow, example))):
                return True
        with protected(model):
            answers.append(_answer(model, example))
        (mine, *my_form), (theirs, *their_form) = answers
        return my_form == their_form and len(mine) == len(theirs) and all(map(_same_bits, mine, theirs))
    except Exception as error:  # of the model, or of a shadow that is not the same model: the model itself will tell
        log.info("capturing the model itself instead of its shadow copy: %s: %s", type(error).__name__, error)
        return False


def _answer(called: Callable[..., Any], example: Example) -> tuple[Any, ...]:
    args, kwargs = unflatten_clones(example)
    seed_all(SEED)
    leaves, *form = outcome_of(called, args, kwargs)
    return [leaf.detach().clone() for leaf in leaves], *form


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and same_bytes(a, b)
