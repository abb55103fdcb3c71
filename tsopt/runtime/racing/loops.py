"""Calls in loops that are not like the rounds, where those who may win must not lose to eager either.

In the rounds, the same calls follow each other at once. In a user's loop, sizes may change (new_sizes.py), and torch
computes between the calls (between_ops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.racing import outcomes
from tsopt.runtime.racing.between_ops import time_between_ops
from tsopt.runtime.racing.contenders import Contender, Progress
from tsopt.runtime.racing.new_sizes import time_at_new_sizes
from tsopt.runtime.racing.row import BETWEEN_OPS, MODEL, NEW_SIZES, Loop, Row
from tsopt.runtime.racing.speedup import Timing, decimals, speedup
from tsopt.runtime.racing.tournament import LEVEL


def timed_in_loops(
    model: Callable[..., Any],
    inputs: Sequence[Example],
    new_sizes: Sequence[InputSet],
    rows: Sequence[Row],
    contenders: Mapping[str, Contender],
    wait: Callable[[], None],
    progress: Progress,
) -> list[Row]:
    """Rows with what was measured in other loops; those that are slower than eager in one of them are out.

    Args:
        inputs: calls of one signature; none where torch has no other threads.
        new_sizes: calls with other sizes; none where only one size is served.
    """
    found = list(rows)
    for when, given, measured in (
        (NEW_SIZES, new_sizes, lambda calls: time_at_new_sizes(calls, new_sizes, wait)),
        (BETWEEN_OPS, inputs, lambda calls: time_between_ops(calls, inputs, wait)),
    ):
        if not given:
            continue
        keys = [row.key for row in found if row.key in contenders and row.verdict in ("faster", "same")]
        progress(f"time: {when}")
        timings = measured({MODEL: model, **{key: contenders[key] for key in keys}}) if keys else {}
        if timings:
            base = timings[MODEL]
            found = [_with_loop(row, when, timings[row.key], base) if row.key in keys else row for row in found]
    return found


def _with_loop(row: Row, when: str, timing: Timing, base: Timing) -> Row:
    """A row with its speed-up in a loop; one that is slower there is out."""
    if timing.error:
        return replace(row, status=timing.ending, reason=f"when {when}: {timing.error}")
    gain = speedup(timing, base)
    if not gain.rounds:
        return row
    row = replace(row, loops=(*row.loops, Loop(when, timing, gain)))
    # Between operations, calls that are short are not what takes the time, and all are about as fast but for noise.
    if gain.ratio >= 1 or (when == BETWEEN_OPS and gain.ratio * LEVEL >= 1 and gain.verdict != "slower"):
        return row
    times = f"{gain.ratio:.{decimals(gain.ratio)}f}x as fast as eager"
    return replace(row, status=outcomes.SLOWER, reason=f"after timing: {times} when {when}")
