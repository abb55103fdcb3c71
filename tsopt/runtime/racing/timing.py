"""Interleaved timing: every candidate in turn, equal warm-up, medians, and bootstrap intervals."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tsopt.compiler.calls.example import Example
from tsopt.errors import BackendError
from tsopt.runtime.racing.outcomes import ending_of

WARM_UP = 5  # untimed calls of each candidate; TorchScript's executor specializes during the first three
SAMPLE = 1e-3  # seconds: shorter calls are timed in groups, so that the clock does not show
SETTLE = 20e-3  # seconds of untimed calls before each sample: the first ones find cold caches and sleeping threads
PAUSE = 25e-3  # seconds between looks at whether a candidate's threads have come to rest; one that spins may be off its
# core for 10 ms of them, on a busy machine
IDLE = 0.2  # cores in use, at most, when they have
LONGEST_REST = 0.5  # seconds; a model with threads that never rest is timed all the same
DROP_RATIO = 3.0  # times slower than the best after MIN_ROUNDS: no more samples
MIN_ROUNDS, MAX_ROUNDS = 7, 60
SCATTER = 0.2  # interquartile range over the median: above it the machine is busy, so it is watched for longer
MAX_BUSY_ROUNDS = 400
BOOTSTRAP = 2000
MIN_COLD, MAX_COLD, COLD_SECONDS = 4, 12, 1.0  # calls, calls, seconds: how long the first calls are watched
WARM_RATIO = 1.3  # times the fastest call that follows: a call that takes no longer is as all others
TRIES = 3  # for a sample, where the clock stands still or goes back
# An interval decides nothing when its ends are further apart than this many times, unless the speed-up at its lower
# end is larger still. A ratio known to within a factor of 3 says less than most speed-ups amount to, and samples that
# scatter so much were not taken on one machine in one state, which is what the bootstrap assumes.
WIDE = 3.0
ENOUGH = 6  # rounds: the median lies between the extremes of n samples with probability 1 - 2 / 2**n, 95 % from n = 6
UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds per call of one candidate, a value for each round.

    error: why it has no more of them; `ending` is its status then.
    """

    samples: tuple[float, ...]
    calls_per_sample: int = 1
    error: str = ""
    ending: str = "failed"

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.samples, q))

    @property
    def p50(self) -> float:
        return self.percentile(50)

    @property
    def p90(self) -> float:
        return self.percentile(90)

    @property
    def std_percent(self) -> float:
        return 100 * float(np.std(self.samples)) / float(np.mean(self.samples))

    @property
    def is_sound(self) -> bool:
        """Whether there are samples, each of them a time: positive and finite."""
        return bool(self.samples) and all(0 < value < math.inf for value in self.samples)


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The first calls after compiling: milliseconds of the very first, and how many were slower than the rest."""

    first: float
    slow_calls: int


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times faster than the baseline: ratio of medians, and its 95 % interval.

    Attributes:
        rounds: that it was worked out from.
    """

    ratio: float
    low: float
    high: float
    rounds: int = ENOUGH

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, `same`, or `undecided` where the interval is no ground for any of them."""
        if self.why_undecided:
            return UNDECIDED
        if self.low > 1.0:
            return "faster"
        return "slower" if self.high < 1.0 else "same"

    @property
    def why_undecided(self) -> str:
        """Why the interval decides nothing; empty when it does."""
        if self.rounds < ENOUGH:
            return f"{self.rounds} valid rounds are too few for a confidence interval"
        if not 0 < self.low <= self.high < math.inf or not math.isfinite(self.ratio):
            return "the measured times are invalid"
        if not self.low <= self.ratio * (1 + 1e-9) or not self.ratio <= self.high * (1 + 1e-9):
            return "the ratio of the medians is outside its confidence interval"
        if self.high > self.low * max(WIDE, self.low, 1 / self.high):
            return f"the times vary too much: {self.low:.2f} to {self.high:.2f} times as fast as eager"
        return ""

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x [{self.low:.2f}, {self.high:.2f}]"


@runtime_checkable
class Remote(Protocol):
    """A callable that runs in another process, which times it: the way there and back must not count.

    It answers when its threads are at rest (`rest`).
    """

    def seconds(self, inputs: Sequence[Example], times: int, untimed: int = 0) -> float:
        """How long so many calls in a row take, right after `untimed` others; on the inputs in turn."""


@dataclass
class _Lane:
    call: Callable[..., Any]
    group: int = 1
    untimed: int = 1
    error: str = ""
    ending: str = "failed"
    samples: list[float] = field(default_factory=list)


def measure(
    calls: Mapping[str, Callable[..., Any]],
    inputs: Sequence[Example],
    *,
    seconds: float = 10.0,
    extra: float | None = None,
    wait: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Times callables side by side.

    In every round each of them is called untimed for a moment, then timed, then left until its threads are at rest; on
    the inputs in turn (a candidate that remembers its last answer gains nothing), in an order that rotates and turns
    round.

    Args:
        inputs: calls to make, of one signature.
        seconds: about how long to go on; at least MIN_ROUNDS rounds, and no more than MAX_ROUNDS unless the samples
            scatter: what a busy second did to one candidate must not decide.
            The first of `calls` is the baseline; another that raises is out, its `Timing.error` says why.
        extra: seconds to go on for at most, while the speed-up of one that is still in play is undecided; as long
            again when it is None.
        wait: returns when the device has done all that was asked of it; part of every sample.

    Raises:
        BackendError: the clock gives no times for the baseline.
    """
    lanes = {name: _Lane(call) for name, call in calls.items()}
    baseline = next(iter(lanes))
    for name, lane in lanes.items():
        if progress:
            progress(f"warm-up {name}")
        _attempt(_warm_up, lane, inputs, wait, is_baseline=name == baseline)
    rest()
    end = time.perf_counter() + seconds
    last = end + (seconds if extra is None else extra)
    names = list(lanes)
    for number in range(MAX_BUSY_ROUNDS):
        if progress:
            left = max(0.0, end - time.perf_counter())
            progress(f"round {number + 1}, {left:.0f} s left" if left else f"round {number + 1}, until it is decided")
        names = [name for name in names if not lanes[name].error]
        turn = number % len(names)
        first = number % len(inputs)
        turned = [*inputs[first:], *inputs[:first]]
        order = names[turn:] + names[:turn]
        # Backwards every other round: who comes after whom must not be the same all the time.
        for name in order[:: -1 if number % 2 else 1]:
            _attempt(_sample, lanes[name], turned, wait, is_baseline=name == baseline)
        if number + 1 >= MIN_ROUNDS:
            names = _hopeful(lanes, [name for name in names if not lanes[name].error])
            settled = number + 1 >= MAX_ROUNDS and not any(_scatters(lanes[name].samples) for name in names)
            now = time.perf_counter()
            if settled or now > last or (now > end and not _any_undecided(lanes, names)):
                break
    return {
        name: Timing(tuple(t * 1e3 for t in lane.samples), lane.group, lane.error, lane.ending)
        for name, lane in lanes.items()
    }


def _attempt(
    step: Callable[..., None], lane: _Lane, inputs: Any, wait: Callable[[], None], *, is_baseline: bool
) -> None:
    try:
        step(lane, inputs, wait)
    except Exception as error:  # a candidate may raise anything; it costs the candidate alone
        if is_baseline:
            raise
        lane.error, lane.ending = f"{type(error).__name__}: {str(error)[:200]}", ending_of(error)


def _warm_up(lane: _Lane, inputs: Sequence[Example], wait: Callable[[], None]) -> None:
    _time(lane.call, inputs[-1:], 1, wait)
    spent = [_time(lane.call, [inputs[i % len(inputs)]], 1, wait) for i in range(WARM_UP)]
    call = max(min(spent), 1e-7)
    lane.group = max(1, min(1000, int(SAMPLE / call)))
    lane.untimed = max(1, min(2000, int(SETTLE / call)))


def cold_start(
    call: Callable[..., Any], inputs: Sequence[Example], wait: Callable[[], None] = lambda: None
) -> ColdStart:
    """Times the first calls of all, one by one: engines specialize, pack weights and allocate in them."""
    end = time.perf_counter() + COLD_SECONDS
    spent: list[float] = []
    while len(spent) < MIN_COLD or (len(spent) < MAX_COLD and time.perf_counter() < end):
        spent.append(_time(call, [inputs[len(spent) % len(inputs)]], 1, wait))
    steady = next((i for i, seconds in enumerate(spent) if seconds <= WARM_RATIO * min(spent[i:])), len(spent))
    return ColdStart(spent[0] * 1e3, steady)


def rest() -> None:
    """Sleeps until nothing of this process is running.

    The worker threads of ONNX Runtime spin for up to 0.1 s when a call is over. On two cores that makes whoever is next
    up to 1.5 times slower (ResNet-50: 34 ms after another session, 22 ms after a rest).
    """
    end = time.perf_counter() + LONGEST_REST
    busy = True
    while busy and time.perf_counter() < end:
        start, spent = time.perf_counter(), time.process_time()
        time.sleep(PAUSE)
        busy = time.process_time() - spent > IDLE * (time.perf_counter() - start)


def _sample(lane: _Lane, inputs: Sequence[Example], wait: Callable[[], None]) -> None:
    lane.samples.append(_positive(lambda: _time(lane.call, inputs, lane.group, wait, lane.untimed)) / lane.group)
    if not isinstance(lane.call, Remote):
        rest()


def _positive(timed: Callable[[], float]) -> float:
    """A time that can be one. Raises BackendError when there is none in a few tries."""
    for _ in range(TRIES):
        seconds = timed()
        if 0 < seconds < math.inf:
            return seconds
    raise BackendError("timing failed", why=f"the clock measured {seconds!r} seconds for the calls")


def _time(
    call: Callable[..., Any], inputs: Sequence[Example], times: int, wait: Callable[[], None], untimed: int = 0
) -> float:
    if isinstance(call, Remote):
        return call.seconds(inputs, times, untimed)
    return seconds_of_calls(call, inputs, times, untimed, wait)


def seconds_of_calls(
    call: Callable[..., Any],
    inputs: Sequence[Example],
    times: int,
    untimed: int = 0,
    wait: Callable[[], None] = lambda: None,
) -> float:
    """How long so many calls in a row take, right after `untimed` others; on the arguments of `inputs` in turn.

    No call sees what another has done to what it was given: with a cache that has grown it would be another call.
    """
    if any(item.renewed() is not item for item in inputs):
        turns = (item.renewed() for item in itertools.cycle(inputs))
        return sum([_seconds_of_one(call, next(turns), wait) for _ in range(untimed + times)][untimed:])
    arguments = itertools.cycle([(item.args, item.kwargs) for item in inputs])
    for args, kwargs in itertools.islice(arguments, untimed):
        call(*args, **kwargs)
    wait()
    timed = itertools.islice(arguments, times)
    start = time.perf_counter()
    for args, kwargs in timed:
        call(*args, **kwargs)
    wait()
    return time.perf_counter() - start


def _seconds_of_one(call: Callable[..., Any], item: Example, wait: Callable[[], None]) -> float:
    args, kwargs = item.args, item.kwargs
    start = time.perf_counter()
    call(*args, **kwargs)
    wait()
    return time.perf_counter() - start


def seconds_of(call: Callable[..., Any], inputs: Sequence[Example]) -> float:
    """About how long a call takes, for decisions that need no interval."""
    return _time(call, inputs, 3, lambda: None, untimed=1) / 3


def _hopeful(lanes: Mapping[str, _Lane], names: list[str]) -> list[str]:
    # The first one is the baseline: everybody's ratio needs its samples.
    best = min(float(np.median(lanes[name].samples)) for name in names)
    return [n for i, n in enumerate(names) if i == 0 or float(np.median(lanes[n].samples)) < DROP_RATIO * best]


def _scatters(samples: Sequence[float]) -> bool:
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return bool(high - low > SCATTER * middle)


def _any_undecided(lanes: Mapping[str, _Lane], names: Sequence[str]) -> bool:
    baseline, *others = (Timing(tuple(lanes[name].samples)) for name in names)
    return any(speedup(other, baseline).verdict == UNDECIDED for other in others)


def speedup(candidate: Timing, baseline: Timing, *, seed: int = 0) -> Speedup:
    """Ratio of medians with a bootstrap interval over rounds (Efron and Tibshirani 1993, chapter 13).

    A round in which either of the two has no positive, finite time does not count; without any the ratio is NaN.
    """
    pairs = np.array(list(zip(candidate.samples, baseline.samples, strict=False)), dtype=float).reshape(-1, 2)
    mine, base = pairs[(np.isfinite(pairs) & (pairs > 0)).all(axis=1)].T
    rounds = len(mine)
    if not rounds:
        return Speedup(math.nan, math.nan, math.nan, 0)
    # Rounds are drawn as pairs: what slows the machine slows both.
    picks = np.random.default_rng(seed).integers(rounds, size=(BOOTSTRAP, rounds))
    ratios = np.median(base[picks], axis=1) / np.median(mine[picks], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Speedup(float(np.median(base) / np.median(mine)), float(low), float(high), rounds)
