"""What the race found out about one candidate, and whether that is faster than eager."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tsopt.runtime.checking.verdict import Verdict
from tsopt.runtime.racing.speedup import UNDECIDED, Speedup, Timing
from tsopt.runtime.racing.timing import ColdStart

MODEL = "model"  # the key of the model itself, as eager runs it
EAGER = "eager"  # the title of its row
# What loops other than the rounds' are like.
NEW_SIZES, BETWEEN_OPS = "each call has new sizes", "torch computes between calls"
LOOPS = (NEW_SIZES, BETWEEN_OPS)
IN_PARTS = "parts"  # the key of a model that is optimized in parts; the notes of its row are about each of them


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls in a loop that does not repeat the same calls at once, as the rounds do.

    when: what it is like, one of LOOPS.
    speedup: over eager in such a loop.
    """

    when: str
    timing: Timing
    speedup: Speedup


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate.

    status: ok, wrong, failed, not checked, not timed, missing, unsupported, no gain, or for reasons of this machine
    crashed, exited, timed out, out of memory, system error. reason says why it is not ok, or what is
    undecided about it.
    cold: its first calls; eager has none, for it was called before.
    loops: what was measured in other loops than that of the rounds, which `timing` and `speedup` are about.
    key: what it is known by, `Candidate.key`; the model itself has MODEL.
    """

    name: str
    status: str = "ok"
    reason: str = ""
    timing: Timing | None = None
    speedup: Speedup | None = None
    accuracy: Verdict | None = None
    compile_seconds: float = 0.0
    cold: ColdStart | None = None
    notes: tuple[str, ...] = ()
    key: str = MODEL
    loops: tuple[Loop, ...] = ()

    @property
    def verdict(self) -> str:
        if self.status != "ok":
            return self.status
        return self.speedup.verdict if self.speedup is not None else "baseline"

    @property
    def is_in_parts(self) -> bool:
        return self.key == IN_PARTS

    @property
    def gain(self) -> float:
        """How many times as fast as eager: the geometric mean over the rounds and decided loops; 0 if not timed."""
        if self.speedup is None:
            return 0.0
        decided = (loop.speedup.ratio for loop in self.loops if loop.speedup.verdict != UNDECIDED)
        return geometric_mean([self.speedup.ratio, *decided])

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than eager by all that was timed, and nowhere slower."""
        if self.verdict != "same" or self.speedup is None:
            return self.verdict == "faster"
        faster = [loop.speedup.low for loop in self.loops if loop.speedup.verdict == "faster"]
        return bool(faster) and self.speedup.low * max(faster) > 1  # on the whole

    def record(self) -> dict[str, Any]:
        """The row for machines, flat: numbers as numbers, None where there is none."""
        time, gain, accuracy = self.timing, self.speedup, self.accuracy
        return {
            "candidate": self.name,
            "key": self.key,
            "verdict": self.verdict,
            "p50_ms": None if time is None else time.p50,
            "p90_ms": None if time is None else time.p90,
            "speedup": None if gain is None else _number(gain.ratio),
            "speedup_low": None if gain is None else _number(gain.low),
            "speedup_high": None if gain is None else _number(gain.high),
            "max_difference": None if accuracy is None else accuracy.max_difference,
            "compile_seconds": self.compile_seconds or None,
            "first_call_ms": None if self.cold is None else self.cold.first,
            "slow_calls": None if self.cold is None else self.cold.slow_calls,
            "reason": self.reason,
        }

    def to_json(self) -> dict[str, Any]:
        """The row with all that was measured; what there is none of is left out."""
        out: dict[str, Any] = {"name": self.name, "status": self.status, "verdict": self.verdict, "reason": self.reason}
        if self.timing is not None:
            out |= {
                "p5_ms": self.timing.percentile(5),
                "p50_ms": self.timing.p50,
                "p90_ms": self.timing.p90,
                "p99_ms": self.timing.percentile(99),
                "std_percent": self.timing.std_percent,
                "rounds": len(self.timing.samples),
            }
        if self.speedup is not None:
            out["speedup"] = _speedup_json(self.speedup)
        if self.loops:
            out["loops"] = [{"when": loop.when, "speedup": _speedup_json(loop.speedup)} for loop in self.loops]
        if self.accuracy is not None:
            out["accuracy"] = {
                "ok": self.accuracy.ok,
                "test": self.accuracy.test,
                "max_difference": self.accuracy.max_difference,
                "inputs": list(self.accuracy.inputs),
                "differences": list(self.accuracy.differences),
                "sizes": list(self.accuracy.sizes),
                "skipped": list(self.accuracy.skipped),
            }
        if self.cold is not None:
            out["cold_start"] = {"first_call_ms": self.cold.first, "slow_calls": self.cold.slow_calls}
        return out | {"compile_seconds": self.compile_seconds, "notes": list(self.notes)}


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.prod(ratios) ** (1 / len(ratios))


def _speedup_json(gain: Speedup) -> dict[str, Any]:
    return {"ratio": _number(gain.ratio), "low": _number(gain.low), "high": _number(gain.high)}


def _number(value: float) -> float | None:
    """A number for JSON, which has neither NaN nor infinity."""
    return value if math.isfinite(value) else None
