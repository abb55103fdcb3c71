"""How long calls take: in a row after a warm-up, the first ones, and when the threads of a call are at rest."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from tsopt.compiler.calls.example import Example
from tsopt.errors import BackendError

THREADS = Path("/proc/self/task")
LOOK, LOOKS = 1e-3, 3  # seconds between looks at whether a candidate's threads are at rest; how many must agree
# Where the system does not tell which threads run: seconds, and cores in use at most when they are at rest. A thread
# that spins may be off its core for 10 ms of them, on a busy machine.
PAUSE, IDLE = 25e-3, 0.2
LONGEST_REST = 0.5  # seconds; a model with threads that never rest is timed all the same
MIN_COLD, MAX_COLD, COLD_SECONDS = 3, 8, 0.3  # calls, calls, seconds: how long the first calls are watched
WARM_RATIO = 1.3  # times the fastest call that follows: a call that takes no longer is as all others
LONG_CALL = 0.5  # seconds: whoever waits for calls that take longer notices each of them, and they need no warm caches
SHORT, SAMPLE = 2e-3, 2.5e-3  # seconds: a call that takes no longer is timed in a row with others, for so long
TURNS, FEW = 9, 3  # of short calls that are compared; if the slowest turn of one is faster than all turns of the others
CLEARLY = 1.2  # times faster
ELEMENTS = 2**17  # of an operation on all threads, such as the normalization of a picture
TRIES = 3  # for a sample, where the clock stands still or goes back


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The first calls after compiling: milliseconds of the very first, and how many were slower than the rest."""

    first: float
    slow_calls: int

    @classmethod
    def of(cls, spent: Sequence[float]) -> ColdStart:
        """Args: spent: seconds of each call, from the first one on."""
        steady = next((i for i, seconds in enumerate(spent) if seconds <= WARM_RATIO * min(spent[i:])), len(spent))
        return cls(spent[0] * 1e3, steady)


@runtime_checkable
class Remote(Protocol):
    """A callable that runs in another process, which times it: the way there and back must not count.

    It answers when its threads are at rest (`rest`).
    """

    def timed(self, how: str, inputs: Sequence[Example], **counts: int) -> list[float]:
        """What one of MEASUREMENTS finds there, given the callable and the inputs.

        Args:
            counts: its other arguments.
        """


def first_calls(
    call: Callable[..., Any], inputs: Sequence[Example], wait: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of the first calls of all, one by one: engines specialize, pack weights and allocate in them."""
    if isinstance(call, Remote):
        return call.timed("first_calls", inputs)
    spent = seconds_of_calls(call, inputs, 1, samples=2, wait=wait)
    if min(spent) > LONG_CALL and max(spent) <= WARM_RATIO * min(spent):  # both are warm
        return spent
    spent += seconds_of_calls(call, _turned(inputs, 2), 1, samples=MIN_COLD - 2, wait=wait)
    left = COLD_SECONDS - sum(spent)
    more = min(MAX_COLD - MIN_COLD, int(left / max(spent[-1], 1e-7))) if left > 0 else 0
    if more:
        spent += seconds_of_calls(call, _turned(inputs, MIN_COLD), 1, samples=more, wait=wait)
    while len(spent) < MAX_COLD and WARM_RATIO * spent[-1] <= min(spent[:-1]):  # it still gets faster
        spent += seconds_of_calls(call, _turned(inputs, len(spent)), 1, wait=wait)
    return spent


def _turned(inputs: Sequence[Example], turns: int) -> list[Example]:
    first = turns % len(inputs)
    return [*inputs[first:], *inputs[:first]]


def rest() -> None:
    """Sleeps until nothing of this process is running.

    Threads that are still spinning slow down the next candidate, on two cores by up to 1.5 times. With ONNX Runtime's
    default options, ResNet-50 takes 34 ms right after another session and 22 ms after a rest.
    """
    end = time.perf_counter() + LONGEST_REST
    looks, is_busy = (LOOKS, _any_runs) if THREADS.is_dir() else (1, _uses_a_core)
    idle = 0
    while idle < looks and time.perf_counter() < end:
        idle = 0 if is_busy() else idle + 1


def _any_runs() -> bool:
    """Whether another thread of this process runs, or waits for a core, in a moment."""
    time.sleep(LOOK)
    mine = str(threading.get_native_id())
    return any(_state(thread) == "R" for thread in THREADS.iterdir() if thread.name != mine)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(") ")[2][:1]
    except OSError:  # it has ended
        return ""


def _uses_a_core() -> bool:
    start, spent = time.perf_counter(), time.process_time()
    time.sleep(PAUSE)
    return time.process_time() - spent > IDLE * (time.perf_counter() - start)


def positive(timed: Callable[[], float]) -> float:
    """A time that can be one. Raises BackendError when there is none in a few tries."""
    for _ in range(TRIES):
        seconds = timed()
        if 0 < seconds < math.inf:
            return seconds
    raise BackendError("timing failed", why=f"the clock measured {seconds!r} seconds for the calls")


def seconds_of_calls(
    call: Callable[..., Any],
    inputs: Sequence[Example],
    times: int,
    untimed: int = 0,
    samples: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> list[float]:
    """How long `times` calls in a row take, so often in a row, right after `untimed` others; inputs in turn.

    No call sees what another has done to what it was given: with a cache that has grown it would be another call.
    """
    if isinstance(call, Remote):
        return call.timed("seconds_of_calls", inputs, times=times, untimed=untimed, samples=samples)
    if any(item.renewed() is not item for item in inputs):
        turns = (item.renewed() for item in itertools.cycle(inputs))
        for _ in range(untimed):
            _seconds_of_one(call, next(turns), wait)
        return [sum(_seconds_of_one(call, next(turns), wait) for _ in range(times)) for _ in range(samples)]
    arguments = itertools.cycle([(item.args, item.kwargs) for item in inputs])
    for args, kwargs in itertools.islice(arguments, untimed):
        call(*args, **kwargs)
    wait()
    found = []
    for _ in range(samples):
        timed = itertools.islice(arguments, times)
        start = time.perf_counter()
        for args, kwargs in timed:
            call(*args, **kwargs)
        wait()
        found.append(time.perf_counter() - start)
    return found


def _seconds_of_one(call: Callable[..., Any], item: Example, wait: Callable[[], None]) -> float:
    args, kwargs = item.args, item.kwargs
    start = time.perf_counter()
    call(*args, **kwargs)
    wait()
    return time.perf_counter() - start


def seconds_in_turns(calls: Sequence[Callable[..., Any]], example: Example) -> list[list[float]]:
    """Seconds of short calls, several in a row, several times in turns: noise that lasts strikes all of them.

    It ends early where one of them is clearly the fastest.
    """
    times = max(1, int(SAMPLE / 10 / max(seconds_of(calls[0], [example]), 1e-7)))
    found: list[list[float]] = [[] for _ in calls]
    for number in range(TURNS):
        for turn in sorted(range(len(calls)), reverse=bool(number % 2)):
            rest()
            found[turn].append(seconds_of_calls(calls[turn], [example], times, min(times, 10))[0] / times)
        fastest, *others = sorted(found, key=max)
        if others and number + 1 >= FEW and all(min(other) > CLEARLY * max(fastest) for other in others):
            break
    return found


def once_warm(
    spent: Sequence[float],
    call: Callable[..., Any],
    inputs: Sequence[Example],
    wait: Callable[[], None] = lambda: None,
) -> float:
    """About how long a call takes, whose first calls took so many seconds: short ones are slow until many were made."""
    return min(spent) if min(spent) > SHORT else min(*spent, seconds_of(call, inputs, wait))


def seconds_of(call: Callable[..., Any], inputs: Sequence[Example], wait: Callable[[], None] = lambda: None) -> float:
    """About how long a call takes, for decisions that need no interval."""
    if isinstance(call, Remote):
        return call.timed("seconds_of", inputs)[0]
    seconds, times = math.inf, 1
    (first,) = seconds_of_calls(call, inputs, 1, wait=wait)
    if first > LONG_CALL:
        return first
    others = _turned(inputs, 1)
    while True:
        found = seconds_of_calls(call, others, times, min(times, 1000) if times > 1 else 0, wait=wait)[0] / times
        if found > SHORT or found > seconds / 2:
            return min(found, seconds)
        # Short calls take longer by themselves than in a row, where caches and threads are warm.
        seconds, times = found, max(times + 1, min(1000, int(SAMPLE / max(found, 1e-7))))


def seconds_between_ops(
    call: Callable[..., Any],
    inputs: Sequence[Example],
    times: int,
    untimed: int,
    samples: int,
    wait: Callable[[], None] = lambda: None,
) -> list[float]:
    """`seconds_of_calls` with an operation of torch after each call, on all of its threads; both count."""
    if isinstance(call, Remote):
        return call.timed("seconds_between_ops", inputs, times=times, untimed=untimed, samples=samples)
    numbers = torch.ones(ELEMENTS, dtype=torch.float32, device="cpu")

    def call_and_op(*args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        numbers.mul_(1.0)

    return seconds_of_calls(call_and_op, inputs, times, untimed, samples, wait)


# By name, for another process.
MEASUREMENTS: Mapping[str, Callable[..., list[float]]] = {
    "first_calls": first_calls,
    "seconds_of_calls": seconds_of_calls,
    "seconds_between_ops": seconds_between_ops,
    "seconds_of": lambda call, inputs: [seconds_of(call, inputs)],
}
