"""The rounds of a race: every candidate in turn, in samples that can be compared, until it is decided.

A candidate leaves as soon as it cannot win: its interval against the one ahead says so at a confidence that allows for
being asked again and again. The rounds end when the best is known to be as good as any within LEVEL, and its speed-up
over the baseline is known well enough to be reported; what noise leaves open is timed until the time is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from tsopt.compiler.calls.example import Example
from tsopt.runtime.racing.outcomes import ending_of, said_by
from tsopt.runtime.racing.speedup import ENOUGH, UNDECIDED, Timing, fastest_first, speedup
from tsopt.runtime.racing.timing import LONG_CALL, SAMPLE, Remote, once_warm, positive, rest, seconds_of_calls

# Untimed calls of each candidate after the first, and of those whose calls take more than LONG_CALL. TorchScript's
# executor specializes during the first three.
WARM_UP, WARM_UP_IF_LONG = 5, 2
SETTLE = 10e-3  # seconds of untimed calls before each sample: the first ones find cold caches and sleeping threads
IN_A_ROW = 4  # samples of SAMPLE seconds on each turn, or as many calls as fit into their time
LONG = 0.1  # seconds: longer calls are not preceded by an untimed one, because cold caches hardly matter to them
DROP_RATIO = 3.0  # times slower than the best after MIN_ROUNDS: no more samples
MIN_ROUNDS, MAX_ROUNDS = 7, 60
SCATTER = 0.2  # interquartile range over the median: above it the machine is busy, so it is watched for longer
MAX_BUSY_ROUNDS = 400
CERTAIN = 99.8  # percent: the intervals are examined repeatedly, and at 95 % one of them would eventually be wrong
LOOK = 1.15  # times as many rounds as at the last look: the next one
SHARE_FOR_LEVEL = 0.4  # of the time, to tell candidates apart: an interval half as wide takes four times as long
SURE = 80.0  # percent: of the interval that says that no other candidate is faster by more than LEVEL
SURE_IF_BUSY = 95.0  # beside other processes, whose moments favour one candidate or another
LEVEL = 1.03  # times: candidates within this factor of each other are equally good
PRECISE = 1.2  # times: how far apart the ends of the winner's interval may be, to be reported; more for a large gain


@dataclass
class _Lane:
    call: Callable[..., Any]
    group: int = 1
    untimed: int = 1
    in_a_row: int = 1
    is_long: bool = False
    error: str = ""
    ending: str = "failed"
    samples: list[float] = field(default_factory=list)

    @property
    def timing(self) -> Timing:
        return Timing(tuple(t * 1e3 for t in self.samples), self.group, self.error, self.ending)


def measure(
    calls: Mapping[str, Callable[..., Any]],
    inputs: Sequence[Example],
    *,
    seconds: float = 10.0,
    extra: float | None = None,
    wait: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] | None = None,
    known: Mapping[str, float] | None = None,
    until_decided: bool = False,
    out: Callable[[str], None] = lambda name: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Timing]:
    """Times callables side by side.

    In every round each of them is called untimed for a moment, then timed; its threads are at rest before another
    one is called; on the inputs in turn (a candidate that remembers its last answer gains nothing), in an
    order that turns round and rotates.

    Args:
        inputs: calls to make, of one signature.
        seconds: about how long to go on; at least MIN_ROUNDS rounds (ENOUGH where calls take long), and no more than
            MAX_ROUNDS unless the samples scatter: what a busy second did to one candidate must not decide.
            The first of `calls` is the baseline; another that raises is out, its `Timing.error` says why.
        extra: seconds to go on for at most, while the speed-up of one that is still in play is undecided or, beside
            other processes, which one is the fastest; as long again when it is None.
        wait: returns when the device has done all that was asked of it; part of every sample.
        known: seconds of a call, about, of those that have been called several times.
        until_decided: stop when it is known which one is the fastest; those that cannot be leave before.
        out: called with the name of each one that gets no more samples although it raised nothing.
        stop: asked after each sample, from the second round on, whether to stop right there.

    Raises:
        BackendError: the clock gives no times for the baseline.
    """
    lanes = {name: _Lane(call) for name, call in calls.items()}
    baseline = next(iter(lanes))
    for name, lane in lanes.items():
        if known and name in known:
            _portion(lane, known[name])
            continue
        if progress:
            progress(f"warm-up {name}")
        _attempt(_warm_up, lane, inputs, wait, is_baseline=name == baseline)
    rest()
    end = time.perf_counter() + seconds
    last = end + (seconds if extra is None else extra)
    names = list(lanes)
    fewest = ENOUGH if lanes[baseline].is_long else MIN_ROUNDS
    look, last_timed = fewest, ""
    for number in range(MAX_BUSY_ROUNDS):
        if progress:
            progress(_standing(number, {name: lanes[name] for name in names}, end - time.perf_counter()))
        names = [name for name in names if not lanes[name].error]
        first = number % len(inputs)
        turned = [*inputs[first:], *inputs[:first]]
        for name in order_of(names, number):
            if last_timed not in ("", name) and not isinstance(lanes[last_timed].call, Remote):
                rest()
            _attempt(_sample, lanes[name], turned, wait, is_baseline=name == baseline)
            last_timed = name
            if number and stop():  # each candidate has been timed at least once
                return {name: lane.timing for name, lane in lanes.items()}
        rounds = number + 1
        if rounds < fewest:
            continue
        left_in = _hopeful(lanes, [name for name in names if not lanes[name].error])
        now = time.perf_counter()
        if until_decided and rounds >= look:
            look = max(rounds + 1, round(rounds * LOOK))
            left_in = still_in({name: lanes[name].timing for name in left_in})
            timings = {name: lanes[name].timing for name in left_in}
            is_busy = any(_scatters(lanes[name].samples) for name in left_in)
            among_level = is_busy or end - now > seconds * (1 - SHARE_FOR_LEVEL)
            if is_decided(timings, among_level=among_level, sure=SURE_IF_BUSY if is_busy else SURE):
                break
        for name in names:
            if name not in left_in and not lanes[name].error:
                out(name)
        names = left_in
        scatter = any(_scatters(lanes[name].samples) for name in names)
        undecided = now > end and (
            _any_undecided(lanes, names, only_the_fastest=until_decided)
            or (until_decided and scatter and not _is_ahead(lanes, names))
        )
        if (rounds >= MAX_ROUNDS and not scatter) or now > last or (now > end and not undecided):
            break
    return {name: lane.timing for name, lane in lanes.items()}


def still_in(timings: Mapping[str, Timing]) -> list[str]:
    """The baseline, which is the first of them, and those that are not certainly slower than the fastest."""
    best = timings[fastest_first(timings)[0]]
    return [
        name
        for number, (name, item) in enumerate(timings.items())
        if number == 0 or item is best or not speedup(best, item, confidence=CERTAIN).low > 1.0
    ]


def is_decided(timings: Mapping[str, Timing], *, among_level: bool = True, sure: float = SURE) -> bool:
    """Whether more samples would not change who is chosen, by more than LEVEL; the baseline is the first of them.

    Args:
        among_level: False leaves open who is the fastest of those that noise has not told apart.
        sure: percent; of the interval that says that no other one is faster by more than LEVEL.
    """
    first, *others = timings
    if not others:
        return True
    baseline, best = timings[first], timings[fastest_first({name: timings[name] for name in others})[0]]
    gain, certain = speedup(best, baseline), speedup(best, baseline, confidence=CERTAIN)
    if gain.verdict == UNDECIDED or gain.high > gain.low * max(PRECISE, math.sqrt(max(gain.low, 1 / gain.high))):
        return False
    if certain.low <= 1.0 <= certain.high and not 1 / LEVEL <= certain.low <= certain.high <= LEVEL:
        return False
    return not among_level or is_ahead_of_all({name: timings[name] for name in others}, sure)


def is_ahead_of_all(timings: Mapping[str, Timing], sure: float) -> bool:
    """Whether no candidate is faster than the one ahead by more than LEVEL, at this confidence in percent."""
    best = timings[fastest_first(timings)[0]]
    return all(speedup(best, item, confidence=sure).low >= 1 / LEVEL for item in timings.values() if item is not best)


def order_of(names: Sequence[str], number: int) -> list[str]:
    """Who is timed after whom in a round: forwards, then backwards, then one place further, and so on.

    So none of them always follows the same one. With two, the order is abba, so that a gradual slowdown of the machine
    affects both equally, and the one that ends a round begins the next one without a rest.
    """
    turn = number // 2 % len(names) if len(names) > 2 else 0
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if number % 2 else order


def _standing(rounds: int, lanes: Mapping[str, _Lane], left: float) -> str:
    """`round 9, ONNX Runtime ahead of 2 others, at most 4 s left`."""
    timed = {name: lane.timing.p50 for name, lane in lanes.items() if lane.samples and not lane.error}
    ahead = ""
    if rounds >= MIN_ROUNDS and len(timed) > 1:
        others = len(timed) - 1
        ahead = f", {min(timed, key=timed.__getitem__)} ahead of {others} other{'s' if others > 1 else ''}"
    return f"round {rounds + 1}{ahead}, " + (f"at most {left:.0f} s left" if left > 0 else "until it is decided")


def _attempt(
    step: Callable[..., None], lane: _Lane, inputs: Any, wait: Callable[[], None], *, is_baseline: bool
) -> None:
    try:
        step(lane, inputs, wait)
    except Exception as error:  # a candidate may raise anything; it costs the candidate alone
        if is_baseline:
            raise
        lane.error, lane.ending = said_by(error), ending_of(error)


def _warm_up(lane: _Lane, inputs: Sequence[Example], wait: Callable[[], None]) -> None:
    (first,) = seconds_of_calls(lane.call, inputs[-1:], 1, wait=wait)
    more = WARM_UP_IF_LONG if first > LONG_CALL else WARM_UP
    spent = seconds_of_calls(lane.call, inputs, 1, samples=more, wait=wait)
    if more < WARM_UP and min(spent) <= LONG_CALL:  # only the first one took long
        spent += seconds_of_calls(lane.call, inputs, 1, samples=WARM_UP - more, wait=wait)
    _portion(lane, once_warm(spent, lane.call, inputs, wait))


def _portion(lane: _Lane, call: float) -> None:
    """How many calls make a sample, where each takes so many seconds."""
    call, lane.is_long = max(call, 1e-7), call > LONG_CALL
    lane.group = max(1, min(1000, int(SAMPLE / call)))
    lane.in_a_row = max(1, min(IN_A_ROW, int(IN_A_ROW * SAMPLE / call)))
    lane.untimed = 0 if call > LONG else max(1, min(2000, int(SETTLE / call)))


def _sample(lane: _Lane, inputs: Sequence[Example], wait: Callable[[], None]) -> None:
    # The median of a few in a row: what held up one of them for a moment says nothing about the candidate.
    counts = lane.group, lane.untimed, lane.in_a_row
    found = positive(lambda: median(seconds_of_calls(lane.call, inputs, *counts, wait)))
    lane.samples.append(found / lane.group)


def _hopeful(lanes: Mapping[str, _Lane], names: list[str]) -> list[str]:
    # The first one is the baseline: everybody's ratio needs its samples.
    best = min(float(np.median(lanes[name].samples)) for name in names)
    return [n for i, n in enumerate(names) if i == 0 or float(np.median(lanes[n].samples)) < DROP_RATIO * best]


def _scatters(samples: Sequence[float]) -> bool:
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return bool(high - low > SCATTER * middle)


def _is_ahead(lanes: Mapping[str, _Lane], names: Sequence[str]) -> bool:
    """Whether one of those after the baseline is known to be as fast as any, beside other processes."""
    others = {name: lanes[name].timing for name in names[1:] if not lanes[name].error}
    return not others or is_ahead_of_all(others, SURE_IF_BUSY)


def _any_undecided(lanes: Mapping[str, _Lane], names: Sequence[str], *, only_the_fastest: bool) -> bool:
    """Whether the speed-up over the first, the baseline, is undecided for one of the others."""
    baseline, *others = names
    if only_the_fastest:  # what is known of the others is enough
        others = fastest_first({name: lanes[name].timing for name in others})[:1]
    base = lanes[baseline].timing
    return any(speedup(lanes[name].timing, base).verdict == UNDECIDED for name in others)
