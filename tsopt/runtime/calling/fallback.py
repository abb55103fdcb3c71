"""The end of the ladder: a model that nothing could be made of runs as it is, and the report says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tsopt.errors import BackendError, BundleError, TsoptError
from tsopt.runtime.calling.ambient import Unserved, objection_to
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.report import MODEL, Report, Row

EAGER = "eager"


class InEager:
    """A drop-in for a model that nothing could be made of: the model itself, called without gradients.

    Attributes:
        report: why, for every way that was tried.
        backend: `eager`.
        errors: what was raised on each way, in order.
    """

    def __init__(
        self, model: Callable[..., Any], name: str, errors: Sequence[Exception], on_gradients: str = "eager"
    ) -> None:
        self.model, self.errors, self.backend = model, tuple(errors), EAGER
        self._unserved = Unserved(model, name, on_gradients)
        reasons = list(dict.fromkeys(map(reason_of, errors)))
        self.report = Report(
            model=name,
            rows=(Row(EAGER),),
            winner_key=MODEL,
            why=f"nothing else could be made of it: {reasons[0]}",
            environment=environment(),
            frontend=f"not at all, the model runs as it is: {'; then: '.join(reasons)}",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = objection_to(args, kwargs)
        if reason:
            return self._unserved(reason, args, kwargs)
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def save(self, path: str | Path) -> Path:
        """Raises BundleError: there is no program to put into a file."""
        raise BundleError(
            "a model that runs as it is cannot be saved",
            where=str(path),
            why="; then: ".join(map(reason_of, self.errors)),
            fix=next((error.fix for error in self.errors if isinstance(error, TsoptError) and error.fix), None),
        )

    def verified(self, backend: str, **options: Any) -> Any:
        """Raises BackendError: there is no program for a backend to take."""
        raise BackendError(
            f"the model cannot be compiled for {backend}: it runs in eager mode",
            why="; then: ".join(map(reason_of, self.errors)),
        )

    def __repr__(self) -> str:
        return f"<tsopt.InEager {self.report.model}, {self.report.why}>"


def reason_of(error: Exception) -> str:
    """An error in a line: what, where and why."""
    if isinstance(error, TsoptError):
        return "; ".join(filter(None, (error.what, error.where, error.why)))
    said = (str(error).splitlines() or [""])[0][:200]
    return f"tsopt itself fails on the model, please report it: {type(error).__name__}: {said}"
