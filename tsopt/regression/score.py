"""The accuracy of a callable in place of the model: a metric; higher is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.capture.names import name_of
from tsopt.compiler.protect import protected
from tsopt.errors import UsageError
from tsopt.regression.baseline import Baseline
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.checking.agreement import Outputs, agreement
from tsopt.runtime.checking.answers import answers_of, outputs_of
from tsopt.runtime.checking.criterion import BUILT_IN, TOP1, axis_of_classes, measured, value_of
from tsopt.runtime.checking.eager_answers import EagerAnswers
from tsopt.runtime.checking.in_pieces import InPieces
from tsopt.runtime.checking.inputs import OF_THE_SAME_SIZE

AGREEMENT = "agreement"  # the metric that needs no name
NAMELESS = ("metric", "<lambda>")  # what a function without a name of its own is called


def name_of_metric(metric: Callable[[Any], Any] | str | None) -> str:
    """The name of a built-in metric, or of a function."""
    named = metric or AGREEMENT
    return named if isinstance(named, str) else name_of(named, NAMELESS[0])


def metric_for(asked: Callable[[Any], Any] | str | None, then: Baseline | None) -> Callable[[Any], Any] | str | None:
    """The metric to compare by: that of the baseline, where none was asked for.

    Raises:
        UsageError: the baseline has a score by another one.
    """
    name = name_of_metric(asked)
    if then is None or then.score is None or then.metric in ("", name) or (callable(asked) and then.metric in NAMELESS):
        return asked
    if asked is None and then.metric in BUILT_IN:
        return then.metric
    given = "none was given" if asked is None else f"this one is {name}"
    wanted = "leave out the metric" if then.metric == AGREEMENT else "pass that metric (--metric, metric=)"
    raise UsageError(
        "the accuracy cannot be compared with that of the baseline",
        why=f"its metric is {then.metric}, and {given}",
        fix=f"{wanted}, or measure a new baseline (--update, update=True)",
    )


def state_of(called: Callable[..., Any]) -> list[torch.Tensor]:
    """The tensors that calls of something optimized, or of a bundle, write beside their inputs."""
    runs = called.executable if isinstance(called, Optimized) else called
    values = runs.state if isinstance(runs, Executable) else ()
    return [value for value in values if isinstance(value, torch.Tensor)]


class Score:
    """A metric.

    Args:
        metric: as in `optimize`; None for the agreement of the outputs with eager's, which is their cosine, or less
            where they are larger or smaller than eager's.
        state: what calls write beside their inputs.

    Attributes:
        name: what the metric is called.
    """

    def __init__(
        self,
        metric: Callable[[Any], Any] | str | None,
        model: Callable[..., Any],
        example: Example,
        seed: int,
        state: Sequence[torch.Tensor] = (),
    ) -> None:
        self._metric, self._model, self._state = metric or AGREEMENT, model, tuple(state)
        self.name = name_of_metric(metric)
        self._data: list[Example] = []
        self._wanted: list[Outputs] = []
        if isinstance(self._metric, str):  # inputs that the model accepts
            answers = EagerAnswers(model, example, None, seed=seed, state=self._state, few=False, only="")
            kinds = ("example", *OF_THE_SAME_SIZE)
            sets = [item.inputs for item in answers.expected]
            data = [item.example for item in sets if item.kind.startswith(kinds)]
            known = answers_of(model, data, self._state, model)
            if self._metric == TOP1:
                axis_of_classes(known)
            self._wanted = [outputs[: known.returned] for outputs in known.outputs]
            self._data = list(known.calls)

    def of(self, called: Callable[..., Any]) -> float:
        """The score of the model itself, of something optimized, of a bundle, or of a callable of the user's own.

        Raises:
            UsageError: the metric raises, or returns something other than a finite number.
        """
        runs: Any = called
        if isinstance(called, Optimized):
            runs = called.executable or called.model
        written = [*self._state, *state_of(called)]
        if isinstance(runs, Executable):
            runs = InPieces(runs, runs.signature, self._model)
        if not isinstance(self._metric, str):
            with protected(self._model, written=written):
                return value_of(self._metric, runs)
        found = (outputs_of(runs, call, written, self._model) for call in self._data)
        if self._metric != AGREEMENT:
            return measured(self._metric, [*found], self._wanted)
        each = [agreement([mine], [theirs]) for mine, theirs in zip(found, self._wanted, strict=True)]
        return fmean(each) if each else 1.0
