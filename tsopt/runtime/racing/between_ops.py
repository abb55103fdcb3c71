"""How long calls take in a loop in which torch computes between them: it prepares inputs, and reads results.

In the rounds, calls follow each other at once. After an operation, torch's threads wait for more work by spinning, for
milliseconds; so do those of engines that have their own. With as many of each as there are cores, they wait for each
other, and an engine that wins the rounds may take several times as long as eager in such a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.runtime.racing.speedup import Timing, timing_of
from tsopt.runtime.racing.timing import SAMPLE, Remote, rest, seconds_between_ops
from tsopt.runtime.racing.tournament import SETTLE, order_of

TURNS, IN_A_ROW = 6, 2  # of each; samples on each turn


def time_between_ops(
    calls: Mapping[str, Callable[..., Any]],
    inputs: Sequence[Example],
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times callables in turns, in loops in which an operation of torch on all of its threads follows each call.

    That operation counts as well: it takes longer beside threads that spin.

    Args:
        calls: the first one is the model. Another one that raises has an `error` instead of more samples.
        inputs: calls of one signature.
    """
    model = next(iter(calls))
    usual = max(min(seconds_between_ops(calls[model], inputs, 1, 1, 3, wait)), 1e-6)
    times, untimed = (max(1, round(share / usual)) for share in (SAMPLE, SETTLE))
    spent: dict[str, list[float]] = {name: [] for name in calls}
    errors: dict[str, Exception] = {}
    last = ""
    for number in range(TURNS):
        for name in order_of([name for name in calls if name not in errors], number):
            if last not in ("", name) and not isinstance(calls[last], Remote):
                rest()
            last = name
            try:
                found = seconds_between_ops(calls[name], inputs, times, untimed, IN_A_ROW, wait)
            except Exception as error:  # a candidate may raise anything; it costs the candidate alone
                if name == model:
                    raise
                errors[name] = error
            else:
                spent[name] += [value / times for value in found]
    return {name: timing_of(found, errors.get(name)) for name, found in spent.items()}
