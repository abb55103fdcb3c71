"""A backend that goes wrong as each test likes, and timing that says what a test wants."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.speedup import Timing

STEADY = (4.0,) * 12
UNCLEAR = (0.003,) * 4 + (0.5,) * 4 + (3.0,) * 4  # a clock that stands still now and then


class Behaviour:
    """What the backend under test does; set by each test."""

    compile = None
    run = None
    refuses = False


@dataclass(frozen=True, slots=True)
class FaultyBackend:
    threads: int | None = None
    name: str = "faulty"

    def missing(self):
        return None

    def unsupported(self, program):
        return [Unsupported("fc1, model.py:12", "it is a Tuesday")] if Behaviour.refuses else []

    def compile(self, program):
        if Behaviour.compile is not None:
            Behaviour.compile()
        state = [program.state[item.name] for item in program.signature.state_inputs]
        forward = program.module().forward
        calls = []

        def run(inputs):
            calls.append(1)
            with torch.no_grad():
                right = list(forward(*inputs))
            return right if Behaviour.run is None else Behaviour.run(len(calls), inputs, right)

        return Executable(self.name, program.signature, run, state=state)


def row(found, name="faulty"):
    return next(row for row in found.rows if row.name == name)


def raising(error):
    def act(*args):
        raise error

    return act


def assert_goes_on(found):
    assert found.winner != "faulty"
    assert row(found, "eager + passes").status == "ok"
    assert row(found, "eager").timing is not None


def fast_timings(monkeypatch, wins="faulty"):
    """Makes `wins` twice as fast as the others, after calling each candidate often enough to wear it out."""

    def measured(calls, inputs, **_):
        for call in calls.values():
            for example in (item.renewed() for item in inputs * 10):
                call(*example.args, **example.kwargs)
        jitter = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0)
        return {n: Timing(tuple(j * (1 if n == wins else 2) for j in jitter)) for n in calls}

    monkeypatch.setattr(race_module, "measure", measured)


def timings(monkeypatch, **samples):
    """Replaces the timing by these samples, without calling any candidate."""
    seen = []

    def measured(calls, inputs, **options):
        seen.append(options)
        return {name: Timing(tuple(samples[name.partition(" ")[0]])) for name in calls}

    monkeypatch.setattr(race_module, "measure", measured)
    return seen
