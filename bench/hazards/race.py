"""Races that decide nothing, or in which this machine stops the candidates: neither is a quiet "eager wins".

Where a case is about times, they are what the case says.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import tsopt
from bench.hazards import ANY, RIGHT, Case, Outcome
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.speedup import Speedup, Timing, speedup
from tsopt.runtime.racing.tournament import measure
from tsopt.runtime.sandbox.processes import descendants, kill
from tsopt.runtime.sandbox.sandbox import Sandbox

FAULTY = "tests.runtime.faulty:"
STEADY = (4.0,) * 12
UNCLEAR = (0.003,) * 4 + (0.5,) * 4 + (3.0,) * 4
X = torch.linspace(-1, 1, 8).reshape(2, 4)


def optimize(backends: Sequence[str], **options: Any) -> tuple[Any, list[str]]:
    """What `optimize` makes, and the warnings on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    given = {"seconds": 0.1, "cache": False, "isolate": False} | options
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fast = tsopt.optimize(model, X, backends=tuple(backends), **given)
    torch.testing.assert_close(fast(X), model(X).detach())
    return fast, [str(item.message) for item in seen if "tsopt" in str(item.message)]


def undecided(**samples: Sequence[float]) -> Callable[[str], Outcome]:
    """Whether nobody wins, and somebody is said to be undecided, with these samples."""

    def check(_: str) -> Outcome:
        def measured(calls: Any, inputs: Any, **__: Any) -> dict[str, Timing]:
            return {name: Timing(tuple(samples[name.split()[0]])) for name in calls}

        measured_before = race_module.measure
        race_module.measure = measured  # type: ignore[assignment]
        # `eager` is the baseline here, `torchscript` the candidate.
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, race_module, "measure", measured_before)
            fast, _ = optimize([name for name in ("torchscript", "onnxruntime") if _title(name) in samples])
        rows = fast.report.rows[1:]
        if fast.report.winner == "eager" and any(row.verdict == "undecided" for row in rows):
            return RIGHT
        return Outcome("wrong", "; ".join(f"{row.name} is {row.verdict}, {row.speedup}" for row in rows))

    return check


def _title(name: str) -> str:
    return {"torchscript": "TorchScript", "onnxruntime": "ONNX"}[name]


def not_kept(_: str) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        os.environ["TSOPT_CACHE_DIR"] = f"{place}/cache"
        samples = {"eager": (4.0,) * 12, "eager + passes": (2.0,) * 12, "TorchScript": UNCLEAR}
        race_module.measure = lambda calls, inputs, **_: {  # type: ignore[assignment]
            name: Timing(samples[name]) for name in calls
        }
        optimize(("eager", "torchscript"), cache=True)
        again, _ = optimize(("eager", "torchscript"), cache=True)
    return Outcome("wrong", f"kept: {again.report.cached}") if again.report.cached else RIGHT


def interval(ratio: float, low: float, high: float) -> Callable[[str], Outcome]:
    def check(_: str) -> Outcome:
        found = Speedup(ratio, low, high).verdict
        return RIGHT if found == "undecided" else Outcome("wrong", f"[{low:g}, {high:g}] is {found}")

    return check


def few(rounds: int) -> Callable[[str], Outcome]:
    def check(_: str) -> Outcome:
        found = speedup(Timing((1.0,) * rounds), Timing((2.0,) * rounds))
        return RIGHT if found.verdict == "undecided" else Outcome("wrong", f"{rounds} rounds are {found.verdict}")

    return check


class Liar:
    """Runs elsewhere, and says for each of its calls what the case says."""

    def __init__(self, seconds: float) -> None:
        self.answer = seconds

    def seconds(self, inputs: Any, times: int, untimed: int = 0) -> float:
        return self.answer


def clock_of_another(seconds: float) -> Callable[[str], Outcome]:
    """Whether times that are none are not taken for speed."""

    def check(_: str) -> Outcome:
        example = tsopt.example(X)
        found = measure({"eager": torch.sin, "liar": Liar(seconds)}, [example], seconds=0.01)  # type: ignore[dict-item]
        if found["liar"].error:
            return RIGHT
        gain = speedup(found["liar"], found["eager"])
        return RIGHT if gain.verdict == "undecided" else Outcome("wrong", f"{seconds} s a call is {gain.verdict}")

    return check


def warned(*backends: str, wanted: bool = True, **options: Any) -> Callable[[str], Outcome]:
    """Whether a warning says that nobody could be tried, or does not where somebody could."""

    def check(_: str) -> Outcome:
        fast, said = optimize(backends, **options)
        ends = ", ".join(f"{row.name} {row.status}" for row in fast.report.rows[1:])
        if bool(said) == wanted:
            return RIGHT
        return Outcome("wrong", f"{'a warning' if said else 'no warning'}, although: {ends}")

    return check


def helper_is_gone(_: str) -> Outcome:
    """The process that candidates are forked from is killed, as the system does when memory is short."""
    real = Sandbox.open

    def opened(self: Sandbox, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        for pid in descendants(os.getpid()):
            kill(pid)

    Sandbox.open = opened  # type: ignore[method-assign]
    return warned("eager", isolate=True)("")


def no_memory(_: str) -> Outcome:
    from tsopt.runtime.backends.torchscript import TorchScriptBackend

    def fail(self: Any, program: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99999999999 bytes")

    TorchScriptBackend.compile = fail  # type: ignore[method-assign]
    return warned("torchscript")("")


ISOLATED = {"isolate": True}
CASES = (
    Case("an interval of [2.51, 1171]", interval(40.0, 2.51, 1171.0), ANY),
    Case("an interval of [1.1, 30]", interval(2.0, 1.1, 30.0), ANY),
    Case("an interval of [0.2, 5]", interval(1.0, 0.2, 5.0), ANY),
    Case("an interval of [0.001, 0.9]", interval(0.3, 0.001, 0.9), ANY),
    Case("an interval without its ratio", interval(1.0, 1.1, 1.2), ANY),
    Case("an interval up to infinity", interval(2.0, 1.5, math.inf), ANY),
    Case("a clock that stands still now and then", undecided(eager=STEADY, TorchScript=UNCLEAR), ANY),
    Case("the same for two", undecided(eager=STEADY, TorchScript=UNCLEAR, ONNX=UNCLEAR), ANY),
    Case("the same for the baseline", undecided(eager=UNCLEAR, TorchScript=(0.001,) * 12), ANY),
    Case("one sample", undecided(eager=(4.0,), TorchScript=(2.0,)), ANY),
    Case("five rounds", few(5), ANY),
    Case("samples of 0", undecided(eager=STEADY, TorchScript=(0.0,) * 12), ANY),
    Case("samples below 0", undecided(eager=STEADY, TorchScript=(-1.0,) * 12), ANY),
    Case("samples of NaN", undecided(eager=STEADY, TorchScript=(math.nan,) * 12), ANY),
    Case("a baseline of infinity", undecided(eager=(math.inf,) * 12, TorchScript=STEADY), ANY),
    Case("another process whose clock says 0", clock_of_another(0.0), ANY),
    Case("another process whose clock goes back", clock_of_another(-1.0), ANY),
    Case("another process whose clock says NaN", clock_of_another(math.nan), ANY),
    Case("what is undecided is kept", not_kept, ANY),
    Case("all crash", warned(f"{FAULTY}Segfaults", f"{FAULTY}Aborts", **ISOLATED), ANY),
    Case("all exit", warned(f"{FAULTY}Exits", **ISOLATED), ANY),
    Case("all are late", warned(f"{FAULTY}Sleeps", budget=3.0, **ISOLATED), ANY),
    Case("all crash when they are timed", warned(f"{FAULTY}CrashesWhenTimed", **ISOLATED), ANY),
    Case("nobody has begun within the budget", warned("eager", budget=1e-6), ANY),
    Case("all want too much memory", no_memory, ANY),
    Case("the process that forks is gone", helper_is_gone, ANY),
    Case("one crashes and one is right", warned(f"{FAULTY}Segfaults", "eager", wanted=False, **ISOLATED), ANY),
    Case("all are wrong", warned(f"{FAULTY}WrongValue", wanted=False, **ISOLATED), ANY),
    Case("all refuse", warned(f"{FAULTY}Raises", wanted=False, **ISOLATED), ANY),
)
