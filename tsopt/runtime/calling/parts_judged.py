"""Judges a model while its parts are optimized in turn, and stops as soon as it is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.protect import protected
from tsopt.runtime.calling.parts_in_turn import Parts
from tsopt.runtime.checking.accuracy import FIRST, ONE_CALL, Oracle
from tsopt.runtime.checking.verdict import Verdict
from tsopt.runtime.racing.contenders import Progress
from tsopt.runtime.racing.timing import seconds_of_calls

log = logging.getLogger("tsopt")


def judged(
    title: str,
    run: Callable[..., Any],
    example: Example,
    parts: Parts,
    oracle: Oracle,
    model: Callable[..., Any],
    progress: Progress,
) -> Verdict:
    """The verdict on a model whose parts are optimized in turn, each in a call on the example.

    As soon as the model is wrong, the remaining parts are left as they are. If calls take long, the first check is
    whether rounding errors alone are enough to change the results.
    """
    if oracle.eager.takes_long:
        unstable = _unstable(run, parts, oracle, progress)
        if unstable is not None:
            return unstable
    for is_last in parts.in_turn():
        with torch.no_grad(), protected(model):
            seconds_of_calls(run, [example], 1)
        if not is_last and not parts.is_changed:
            continue
        progress(f"check {title}")
        verdict = oracle.judge(run, part="" if is_last else FIRST)
        if not verdict.ok:
            parts.leave_the_others()
            break
    return verdict


def _unstable(run: Callable[..., Any], parts: Parts, oracle: Oracle, progress: Progress) -> Verdict | None:
    """The verdict if the model is wrong even with accurate results for its largest part; None otherwise.

    The part runs in float64, and its results are rounded. If even these make the model wrong, so does any compiled form
    of the part that is not bit-equal to eager. Bit-equal forms gain next to nothing when calls take long.
    """
    with parts.largest_in_float64() as part:
        if not part:
            return None
        progress(f"check {part} in float64")
        try:
            verdict = oracle.judge(run, part=ONE_CALL)
        except Exception as error:  # of the model: between the parts, its code meets values that it may not expect
            log.info("%s in float64: %r", part, error)
            return None
    if verdict.ok:
        return None
    found = f"rounding decides its results: they are wrong with {part} in float64"
    parts.leave_all(f"not tried: {found.replace(part, 'a part')}")
    return replace(verdict, reason=f"{found}; {verdict.reason}")
