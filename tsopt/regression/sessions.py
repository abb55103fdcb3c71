"""Sessions: each recompiles the optimized model and times it alternately with eager and with the baseline's bundle."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tsopt.api import compile
from tsopt.compiler.calls.example import Example
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.protect import protected
from tsopt.errors import BackendError
from tsopt.regression.machine_state import QUICKEST, FixedLayers, Meeting, SmallLayers
from tsopt.runtime.backends.backend import compile as compile_by
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.racing.contenders import device_wait
from tsopt.runtime.racing.row import EAGER
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.racing.timing import rest
from tsopt.runtime.racing.tournament import measure
from tsopt.runtime.sandbox.processes import give_back_memory

LEAST = 3  # whatever time is left: fewer do not tell how much they scatter
FEWEST, MOST = 5, 20  # until the slowdown may be called decided, and at most
SECONDS = 2.0  # of timing, in each
# Calls that take fewer milliseconds are short. In the first half of a second after compiling, their speed-ups over
# eager scatter by 6 % between sessions, and by 2 % afterwards, however long: more and shorter sessions tell more.
SHORT = 0.1
WARM_UP, SECONDS_IF_SHORT = 0.5, 1.0
COPIES = 3  # of the example, in turn: what remembers its last answer gains nothing
NOW, BEFORE, SMALL = "the optimized model", "the baseline", "small layers"


class Sessions:
    """What was measured in each session so far.

    Attributes:
        speedups: of what is checked, over eager.
        are_short: calls take so little time that they are compared with small layers, and not with large ones.
        over_layers: how many times as fast as such layers it is; empty if their time is not known.
        before: of the baseline's bundle, over eager; empty without one.
        ratios: how many times as long calls take as in that bundle.
        eager_ms: milliseconds of an undisturbed call in eager mode.
        meetings: microseconds that threads take to meet, if that is known.
        longest: seconds that a session took.

    Args:
        model: what eager calls.
        fast: what is checked. What `optimize` returns is recompiled for each session; anything else is called as it
            is.
        bundle: opens the earlier model.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        example: Example,
        fast: Callable[..., Any],
        bundle: Callable[[], Callable[..., Any]] | None = None,
        seed: int = 0,
    ) -> None:
        self._model, self._example, self._fast, self._bundle, self._seed = model, example, fast, bundle, seed
        self.speedups: list[float] = []
        self.over_layers: list[float] = []
        self.before: list[float] = []
        self.ratios: list[float] = []
        self.eager_ms: list[float] = []
        self.meetings: list[float] = []
        # A bundle is timed in the same moments: nothing needs to tell how the machine was then.
        is_needed = bundle is None and not is_on_gpu(example)
        self._meeting = Meeting() if is_needed else None
        self._layers: FixedLayers | SmallLayers | None = FixedLayers() if is_needed else None
        self.are_short = False
        self.longest = 0.0

    def __len__(self) -> int:
        return len(self.speedups)

    def add(self) -> None:
        """Runs one more session.

        Raises:
            BackendError: what is checked, or the bundle, fails on the example.
        """
        start = time.monotonic()
        calls = {NOW: _recompiled(self._fast)} | ({} if self._bundle is None else {BEFORE: self._bundle()})
        found = self._timed(calls)
        if self._layers is not None and not self.speedups and _milliseconds(found, NOW) < SHORT:
            self.are_short, self._layers = True, SmallLayers()
            found = self._timed(calls)
        eager, now = _milliseconds(found, EAGER), _milliseconds(found, NOW)
        self.speedups.append(eager / now)
        self.eager_ms.append(eager)
        if self._bundle is not None:
            before = _milliseconds(found, BEFORE)
            self.before.append(eager / before)
            self.ratios.append(now / before)
        calls.clear()
        rest()
        meeting = None if self._meeting is None else self._meeting.microseconds()
        if meeting is not None:
            self.meetings.append(meeting)
        layers = self._milliseconds_of_layers(found)
        if layers is None:  # nor are they a yardstick for the other sessions
            self._layers = None
            self.over_layers.clear()
        else:
            self.over_layers.append(layers / now)
        gc.collect()  # engines are in cycles, each with a copy of the weights
        give_back_memory()
        self.longest = max(self.longest, time.monotonic() - start)

    def _timed(self, calls: Mapping[str, Callable[..., Any]]) -> dict[str, Timing]:
        """Calls on the example alone: with other values a model may do less, and the quickest calls would be those."""
        written = list(self._model.parameters()) if isinstance(self._model, nn.Module) else []
        (asked,) = Oracle(self._model, self._example, None, seed=self._seed, state=written, only="example").expected
        inputs, wait = [asked.call() for _ in range(COPIES)], device_wait(self._example)
        named = {EAGER: self._model, **calls}
        with protected(self._model, written=written), torch.inference_mode():
            if not self.are_short:
                return measure(named, inputs, seconds=SECONDS, wait=wait)
            layers = self._layers.opened() if isinstance(self._layers, SmallLayers) else None
            named |= {} if layers is None else {SMALL: layers}
            measure(named, inputs, seconds=WARM_UP, extra=0.0, wait=wait)
            return measure(named, inputs, seconds=SECONDS_IF_SHORT, extra=0.0, wait=wait)

    def _milliseconds_of_layers(self, found: Mapping[str, Timing]) -> float | None:
        if isinstance(self._layers, FixedLayers):
            return self._layers.milliseconds()
        timing = found.get(SMALL)
        return None if timing is None or timing.error or not timing.is_sound else timing.percentile(QUICKEST)


def _recompiled(fast: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(fast, Optimized) or fast.executable is None:
        return fast
    key = fast.report.winner_key
    return compile(fast.program, key) if fast.quantized is None else compile_by(fast.quantized[1], Candidate.parse(key))


def _milliseconds(found: Mapping[str, Timing], name: str) -> float:
    """Milliseconds of an undisturbed call."""
    timing = found[name]
    if timing.error or not timing.is_sound:
        raise BackendError(f"{name} cannot be timed", why=timing.error or "the clock gave no times")
    return timing.percentile(QUICKEST)
