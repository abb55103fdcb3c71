"""What optimizers get wrong in silence, by family: what becomes of each case by each backend.

A family is a module here with a tuple `CASES`. `python -m bench.hazards` runs them and writes the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tsopt

BACKENDS = ("eager", "onednn", "torchscript", "onnxruntime", "openvino")
ANY = ("tsopt",)  # for what does not depend on a backend: hybridize, bundles

# Module below this package -> what its cases are about.
FAMILIES: dict[str, str] = {
    "aliases": "inputs that are one, or share memory",
    "results": "results that share memory",
    "questions": "what the model asks of its inputs",
    "ambient": "gradients, transforms, tracing, autocast",
    "refused": "models that eager runs",
    "threads": "calls in other threads meanwhile",
    "dtypes": "numbers at the ends of their dtypes",
    "epsilons": "constants close to 0 and 1",
    "indices": "indices that do not exist",
    "specials": "NaN and infinities",
    "weights": "weights changed in place after optimize",
    "stale": "a hybrid whose model changes between calls",
    "cache": "what is kept from run to run",
    "commands": "the command line",
    "race": "races that decide nothing",
    "bundles": "hostile and damaged bundles",
    "saves": "bundles that are written or replaced while they are read",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: `right`; `refused` by an error or a reason that names the cause; `noted`: other than eager, and the report
            says so; `wrong`: other than eager without a word, or a raw error, a crash, a hang.
    """

    kind: str
    why: str = ""


RIGHT = Outcome("right")


@dataclass(frozen=True, slots=True)
class Case:
    """One way to go wrong: a name, and what finds out what becomes of it by a backend."""

    name: str
    check: Callable[[str], Outcome]
    backends: tuple[str, ...] = BACKENDS

    def outcome(self, backend: str) -> Outcome:
        """What became of it; an error of tsopt's own is a refusal, any other error is wrong."""
        try:
            return self.check(backend)
        except tsopt.TsoptError as error:
            return Outcome("refused", error.what)
        except Exception as error:  # raw: whatever it is, nobody was told what to do
            return Outcome("wrong", f"{type(error).__name__}: {str(error)[:160]}")


def served_by(model: Any, example: Any, backend: str) -> list[Any]:
    """What `optimize` makes with a backend, and what that backend makes of its program: eager may have won the race."""
    fast = tsopt.optimize(model, example, backends=(backend,), isolate=False, cache=False, seconds=0.05)
    found: list[Any] = [fast]
    with contextlib.suppress(tsopt.TsoptError):
        found += [tsopt.compile(fast.program, backend)] if isinstance(fast, tsopt.Optimized) else []
    return found
