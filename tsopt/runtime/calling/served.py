"""What has become of the calls of a hybrid: how many are compiled, why others are not, and what its user is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tsopt.compiler.capture.names import name_of
from tsopt.runtime.report import Report

# Why the model itself has served a call.
NOT_COMPILED = "the signature is not compiled"
NOT_FASTER = "no compiled form is faster"
COMPILING = "it is being compiled in the background"
ELSEWHERE = "another thread compiles it"
KEEPS_CHANGING = "its weights, hooks, attributes or globals change between calls"
DIFFERED = "audits find again and again that what was compiled differs from it"
COMPARED = "it is compared with the compiled form in service"
RENUMBERED = "torch's number of threads changes between calls"


class Told:
    """What the user of a hybrid is told, by warnings."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model, self._said = model, set[str]()

    def eager(self, reason: str, stacklevel: int = 8) -> None:
        """Why the model itself serves a call, once for each reason."""
        self.once(f" runs in eager mode: {reason}", stacklevel)

    def once(self, text: str, stacklevel: int) -> None:
        if text not in self._said:
            self._said.add(text)
            self.warn(text, stacklevel)

    def warn(self, text: str, stacklevel: int = 5) -> None:
        warnings.warn(f"tsopt: {name_of(self._model)}{text}", stacklevel=stacklevel)


@dataclass(frozen=True, slots=True)
class HybridReport:
    """A hybrid's calls so far.

    Attributes:
        model: its name.
        calls: how many there were.
        in_eager: how many of these the model itself has served, by reason.
        compile_seconds: what compiling has taken, for all signatures together.
        reports: of the compiled forms: one with its further signatures, or one for each signature that was compiled in
            the background, the newest last. Empty while nothing is compiled.
    """

    model: str
    calls: int
    in_eager: Mapping[str, int] = field(default_factory=dict)
    compile_seconds: float = 0.0
    reports: tuple[Report, ...] = ()

    def __str__(self) -> str:
        compiled = self.calls - sum(self.in_eager.values())
        lines = [f"{self.model}: {_calls(self.calls)}, {compiled} compiled"]
        lines += [f"  {_calls(count)} in eager mode: {reason}" for reason, count in self.in_eager.items()]
        if self.compile_seconds:
            lines.append(f"  compiling took {self.compile_seconds:.1f} s")
        for report in self.reports:
            lines.append(f"  {report.winner}: {report.why}")
            lines += [f"    {outcome}: {signature}" for signature, outcome in report.signatures]
        return "\n".join(lines)


def _calls(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"
