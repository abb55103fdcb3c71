"""Checks that a shadow copy behaves like the model: one call of each on the example, compared bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.capture.export_errors import unflatten_clones
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.protect import is_untouched, protected
from tsopt.compiler.random_state import seed_all
from tsopt.compiler.tensor_bytes import same_bytes

log = logging.getLogger("tsopt")
SEED = 20011


def answers_alike(
    model: Callable[..., Any],
    shadow: Callable[..., Any],
    example: Example,
    *,
    shared: Iterable[torch.Tensor] | None = None,
    written: Iterable[torch.Tensor] | None = None,
    writes: bool = False,
    draws: bool = True,
) -> bool:
    """Whether the shadow does on the example what the model does.

    The model is called once, and only where a call changes nothing in it: what would have to be put back could be what
    another thread has written meanwhile.

    Args:
        shared: tensors of the model that a call of the shadow may write, which are put back. If given, a shadow whose
            call changes anything of the model is not alike.
        written: all tensors that calls write. If given, the model is called in any case, and these are put back.
        writes: calls are known to write something that lasts.
        draws: calls may draw random numbers, from the generators of the process, which are put back.
    """
    answers: list[Any] = []
    apart: list[bool] = []

    def call() -> None:
        answers.append(_answer(shadow, example, draws))

    def call_apart() -> None:
        with protected(model, written=shared or (), among_threads=True, draws=draws):
            apart.append(is_untouched(model, call))

    try:
        with protected(shadow, draws=draws):
            changes = not is_untouched(shadow, call if shared is None else call_apart)
        if not all(apart):
            return False
        if (changes or writes) and written is None:
            return True
        with protected(model, written=written or (), among_threads=others_run(), draws=draws):
            answers.append(_answer(model, example, draws))
        (mine, *my_form), (theirs, *their_form) = answers
        return my_form == their_form and len(mine) == len(theirs) and all(map(_same_bits, mine, theirs))
    except Exception as error:  # of the model, or of a shadow that is not the same model: the model itself will tell
        log.info("capturing the model itself instead of its shadow copy: %s: %s", type(error).__name__, error)
        return False


def _answer(called: Callable[..., Any], example: Example, draws: bool) -> tuple[Any, ...]:
    args, kwargs = unflatten_clones(example)
    if draws:
        seed_all(SEED)
    leaves, *form = outcome_of(called, args, kwargs)
    return [leaf.detach().clone() for leaf in leaves], *form


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and same_bytes(a, b)
