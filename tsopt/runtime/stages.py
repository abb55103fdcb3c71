"""The stages of `optimize`, as it names them while it runs, and how long each took. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

# How what `progress` is called with begins -> the stage that it belongs to.
STAGES = {
    "capture": "capture",
    "check other sizes": "other sizes",
    "pass ": "passes",
    "quantize: ": "quantize",
    "part ": "parts",
    "eager": "eager",
    "compile ": "compile",
    "first calls": "first calls",
    "check ": "check",
    "time: ": "timing",
    "verify ": "verify",
}


def stage_of(text: str) -> str:
    """The stage of a step, behind the setting of a sweep that it may begin with; the text itself if there is none."""
    found = next((stage for start, stage in STAGES.items() if text.startswith(start)), None)
    if found is not None:
        return found
    setting, colon, step = text.partition(": ")
    return f"{setting}: {stage_of(step)}" if colon else text


def step_of(text: str) -> str:
    """What is being done in the stage of a step: `ONNX Runtime (3 of 6)` of `compile ONNX Runtime (3 of 6)`."""
    found = next((start for start in STAGES if text.startswith(start)), None)
    if found is not None:
        return text.removeprefix(found).strip()
    _, colon, step = text.partition(": ")
    return step_of(step) if colon else ""


class Stages:
    """Seconds for each stage, from the first step that it is told of."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stage, self._since = "", 0.0

    def step(self, text: str) -> None:
        """A step begins; the one before has ended."""
        now = time.perf_counter()
        if self._stage:
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage_of(text), now

    def spent(self) -> tuple[tuple[str, float], ...]:
        """What each stage has taken until now, in the order in which they began."""
        self.step(self._stage)
        return tuple((stage, seconds) for stage, seconds in self._seconds.items() if stage)


class ReportedProgress:
    """The caller's `progress`. What it raises belongs to the caller and is not a failure of the model.

    Attributes:
        error: the last exception that it raised.
        stages: how long each stage took.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.progress = progress
        self.error: Exception | None = None
        self.stages = Stages()

    def __call__(self, text: str) -> None:
        self.stages.step(text)
        try:
            self.progress(text)
        except Exception as error:
            self.error = error
            raise
