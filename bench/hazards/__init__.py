"""What optimizers get wrong in silence, by family: what becomes of each case by each backend.

A family is a module here with a tuple `CASES`. `python -m bench.hazards` runs them and writes the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tsopt

BACKENDS = ("eager", "onednn", "torchscript", "onnxruntime", "openvino")
ANY = ("tsopt",)  # for what does not depend on a backend: hybridize, bundles

# Module below this package -> what its cases are about.
FAMILIES: dict[str, str] = {
    "bundles": "hostile and damaged bundles",
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
