"""The accuracy of a callable in place of the model: a metric; higher is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.protect import protected
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.checking.criterion import COSINE, SQNR, value_of
from tsopt.runtime.checking.eager_answers import EagerAnswers
from tsopt.runtime.checking.in_pieces import InPieces
from tsopt.runtime.checking.inputs import OF_THE_SAME_SIZE

AGREEMENT = "agreement"  # the metric that needs no name


def name_of_metric(metric: Callable[[Any], Any] | str | None) -> str:
    named = metric or AGREEMENT
    return named if isinstance(named, str) else getattr(named, "__name__", "metric")


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
        if isinstance(self._metric, str):  # inputs that the model accepts
            answers = EagerAnswers(model, example, None, seed=seed, state=self._state, few=False, only="")
            kinds = ("example", *OF_THE_SAME_SIZE)
            sets = [item.inputs for item in answers.expected]
            self._data = [item.example for item in sets if item.kind.startswith(kinds)]

    def of(self, called: Callable[..., Any]) -> float:
        """The score of the model itself, of something optimized, of a bundle, or of a callable of the user's own.

        Raises:
            UsageError: the metric raises, or returns something other than a finite number.
        """
        runs: Any = called
        if isinstance(called, Optimized):
            runs = called.executable or called.model
        written = [*self._state]
        if isinstance(runs, Executable):
            written += [value for value in runs.state if isinstance(value, torch.Tensor)]
            runs = InPieces(runs, runs.signature, self._model)
        if callable(self._metric):
            with protected(self._model, written=written):
                return value_of(self._metric, self._model, runs, self._data)
        outputs = self._outputs_of(runs, written)
        if self._metric != AGREEMENT:
            return self._value(self._metric, outputs, self._data)
        return fmean(self._agreement(outputs, call) for call in self._data) if self._data else 1.0

    def _agreement(self, outputs: Callable[..., Any], call: Example) -> float:
        """The cosine cannot tell three times the outputs; a relative error can, but says little of integers."""
        cosine, error = self._value(COSINE, outputs, [call]), 1 - self._value(SQNR, outputs, [call])
        # What the cosine is where the error has no preferred direction.
        return cosine if math.isinf(error) else min(cosine, max(1 - error**2 / 2, -1.0))

    def _value(self, metric: str, outputs: Callable[..., Any], data: Sequence[Example]) -> float:
        return value_of(metric, self._outputs_of(self._model, self._state), outputs, data)

    def _outputs_of(self, called: Callable[..., Any], written: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """What calls return, each as the first one: no call sees what another has left."""

        def outputs(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            with protected(self._model, written=written):
                leaves, _ = flatten(called(*args, **kwargs))
                return [leaf.clone() for leaf in leaves]

        return outputs
