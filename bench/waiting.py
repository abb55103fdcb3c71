"""How long does one wait for `optimize`, without and with its cache, and for the first call of `hybridize`?

Usage: python -m bench.waiting [MODEL ...]; writes bench/results/waiting.{json,md}. Each wait is one of a fresh process
that has imported torch and made the model, as a user's own would have, with default settings. z3 is hidden from it and
from its helpers: torch's tracer imports it where it is installed (0.3 s), and here it is installed for the tests.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tsopt
from bench.models import MODELS
from bench.process import Rows, in_own_process, measure_each
from tsopt.compiler.calls.example import Example
from tsopt.runtime.racing.cache_directory import PLACE
from tsopt.runtime.racing.environment import Environment

RESULTS = Path(__file__).parent / "results"
RUNS = 5
KINDS = ("optimize", "from the cache", "hybridize", "torch.export")
NAMES = ("mlp", "resnet18", "resnet50", "bert_base", "gpt2")


def main() -> None:
    measure_each("bench.waiting:one", NAMES, RESULTS / "waiting.json", line, page)


def one(name: str) -> dict[str, list[float]]:
    """Seconds of each run, by kind."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as place, without_z3():
            os.environ[PLACE] = place
            found["optimize"].append(in_own_process("bench.waiting:optimize", name))
            if any(Path(place).iterdir()):  # noise decides whether a race is kept
                found["from the cache"].append(in_own_process("bench.waiting:optimize", name))
            found["hybridize"].append(in_own_process("bench.waiting:hybridize", name))
            found["torch.export"].append(in_own_process("bench.waiting:exported", name))
    return found


@contextlib.contextmanager
def without_z3() -> Iterator[None]:
    """A block in which processes that are started cannot import z3."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "z3.py").write_text("raise ImportError\n")
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (place, before)))
        yield
        os.environ["PYTHONPATH"] = before


def optimize(name: str) -> float:
    return _seconds(name, lambda model, example: tsopt.optimize(model, example))


def hybridize(name: str) -> float:
    def first_call(model: Any, example: Example) -> None:
        fast = tsopt.hybridize(model, cache=False)
        with torch.no_grad():
            fast(*example.args, **example.kwargs)

    return _seconds(name, first_call)


def exported(name: str) -> float:
    """What capture takes by itself: torch imports its tracer at the first export."""
    return _seconds(name, lambda model, example: torch.export.export(model, example.args, example.kwargs, strict=False))


def _seconds(name: str, work: Callable[[Any, Example], Any]) -> float:
    model, example = MODELS[name].load()
    start = time.perf_counter()
    work(model, example)
    return time.perf_counter() - start


def line(name: str, row: dict[str, list[float]]) -> str:
    return f"| {name} | {' | '.join(_cell(row.get(kind, [])) for kind in KINDS)} |"


def _cell(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    return f"{np.median(seconds):.1f} [{min(seconds):.1f}, {max(seconds):.1f}]"


def page(environment: Environment, rows: Rows) -> Iterator[str]:
    yield f"Seconds until there is a result, default settings: median, lowest and highest of {RUNS} fresh processes"
    yield "without z3, which torch imports where it is installed."
    yield ""
    yield "| model | `optimize` | from the cache | first call of `hybridize` | only `torch.export.export` |"
    yield "|---|---|---|---|---|"
    yield from (line(name, row) for name, row in rows.items())


if __name__ == "__main__":
    main()
