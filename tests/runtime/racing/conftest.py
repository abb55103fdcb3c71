"""A clock that only callables move; races with a backend that goes wrong as each test likes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tsopt
from tests.runtime.helpers import candidates
from tests.runtime.racing.helpers import Behaviour
from tsopt.compiler.calls.example import Example
from tsopt.runtime.backends.table import BACKENDS, BackendInfo
from tsopt.runtime.racing import cached_race, loops, timing, tournament
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.contenders import RaceSettings
from tsopt.runtime.racing.race import race
from tsopt.runtime.racing.row import MODEL
from tsopt.runtime.racing.speedup import Timing


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.spins_until = 0.0  # background threads use a core until then

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return min(self.now, self.spins_until)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def taking(self, seconds: float, log: list | None = None, name: str = ""):
        def call(*args, **kwargs):
            self.now += seconds
            if log is not None:
                log.append((name, args, kwargs))

        return call


SHIPPED = {
    (module, name): getattr(module, name)
    for module, name in ((timing, "LONGEST_REST"), (tournament, "SAMPLE"), (tournament, "IN_A_ROW"))
}


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    monkeypatch.setattr(timing, "THREADS", Path("no such directory"))
    monkeypatch.setattr(tournament, "time", made)
    for (module, name), shipped in SHIPPED.items():  # a clock that only jumps costs no time
        monkeypatch.setattr(module, name, shipped)
    return made


@pytest.fixture
def raced(monkeypatch):
    """A race of two engines, with what they take in the rounds, and in other loops as far as these are timed."""
    repeated = {"eager": 2.0, "ONNX Runtime": 1.0, "TorchScript": 1.5}
    others = {MODEL: 2.0, "onnxruntime": 1.0, "torchscript": 1.5}
    seen = []

    def measured(calls, inputs, *, out, **_):
        for name in calls:
            if repeated[name] > min(repeated.values()):
                out(name)
        return {name: Timing((repeated[name],) * 8) for name in calls}

    def timed(calls, inputs, *_):
        seen.append([len(getattr(item, "example", item).args[0]) for item in inputs])
        return {key: others[key] if isinstance(others[key], Timing) else Timing((others[key],) * 8) for key in calls}

    monkeypatch.setattr(race_module, "measure", measured)
    monkeypatch.setattr(loops, "time_at_new_sizes", timed)
    monkeypatch.setattr(loops, "time_between_ops", timed)

    def optimized(*sizes, **options):
        model = torch.nn.Linear(4, 2).eval()
        options = {"seconds": 0.05, "isolate": False, "cache": False, **options}
        given = [torch.randn(size, 4) for size in sizes]
        example = given if len(given) > 1 else given[0]
        return tsopt.optimize(model, example, backends=("onnxruntime", "torchscript"), **options)

    optimized.repeated, optimized.others, optimized.seen = repeated, others, seen
    return optimized


@pytest.fixture
def faulty_backend(monkeypatch):
    monkeypatch.setitem(BACKENDS, "faulty", BackendInfo("faulty", f"{Behaviour.__module__}:FaultyBackend", "faulty"))
    for name in ("compile", "run"):
        monkeypatch.setattr(Behaviour, name, None)
    monkeypatch.setattr(Behaviour, "refuses", False)


@pytest.fixture
def run_race(faulty_backend, mlp, mlp_input, mlp_program):
    def go(backends=("faulty", "eager"), sandbox=None, progress=None, **options):
        return race(
            mlp,
            mlp_program,
            {"fp32": mlp_program},
            Example((mlp_input,)),
            RaceSettings(candidates=candidates(*backends), seconds=1e-3, **options),
            sandbox=sandbox,
            progress=progress,
        )

    return go


@pytest.fixture
def races(monkeypatch):
    """The candidates of every race that is run."""
    seen = []

    def counted(*args, **options):
        seen.append(args[4].candidates)
        return real(*args, **options)

    real = cached_race.race
    monkeypatch.setattr(cached_race, "race", counted)
    return seen
