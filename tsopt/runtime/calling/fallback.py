"""The last fallback: a model that cannot be optimized runs in eager mode, and the report says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tsopt.errors import BackendError, BundleError, TsoptError
from tsopt.runtime.calling.ambient import Unserved, objection_to
from tsopt.runtime.calling.drop_in import DropIn
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.row import MODEL, Row
from tsopt.runtime.report import Report

EAGER = "eager"


class InEager(DropIn):
    """A drop-in for a model that could not be optimized: it calls the model itself, without gradients.

    Attributes:
        report: the reason for each way that was tried.
        backend: `eager`.
        errors: what each of them raised, in order.
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
            why=f"the model could not be optimized: {reasons[0]}",
            environment=environment(),
            frontend=f"by no front end, so it runs in eager mode: {'; then: '.join(reasons)}",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = objection_to(args, kwargs)
        if reason:
            return self._unserved(reason, args, kwargs)
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def save(self, path: str | Path) -> Path:
        """Raises BundleError: there is no program to save."""
        raise BundleError(
            "a model that runs in eager mode cannot be saved",
            where=str(path),
            why="; then: ".join(map(reason_of, self.errors)),
            fix=next((error.fix for error in self.errors if isinstance(error, TsoptError) and error.fix), None),
        )

    def profile(self) -> Any:
        """Raises BackendError: layers cannot be timed without a program."""
        raise BackendError(
            "a model that runs in eager mode cannot be profiled", why="; then: ".join(map(reason_of, self.errors))
        )

    def verified(self, backend: str, **options: Any) -> Any:
        """Raises BackendError: there is no program to compile."""
        raise BackendError(
            f"the model cannot be compiled with {backend}: it runs in eager mode",
            why="; then: ".join(map(reason_of, self.errors)),
        )

    def __repr__(self) -> str:
        return f"<tsopt.InEager {self.report.model}, {self.report.why}>"


def reason_of(error: Exception) -> str:
    """An error in one line: what, where and why."""
    if isinstance(error, TsoptError):
        return "; ".join(filter(None, (error.what, error.where, error.why)))
    said = (str(error).splitlines() or [""])[0][:200]
    return f"internal error in tsopt, please report it: {type(error).__name__}: {said}"
