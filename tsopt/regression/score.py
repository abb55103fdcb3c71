"""The accuracy of what is called like the model: a metric, of which more is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.protect import protected
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.checking.criterion import COSINE, value_of
from tsopt.runtime.checking.eager_answers import EagerAnswers
from tsopt.runtime.checking.in_pieces import InPieces
from tsopt.runtime.checking.inputs import OF_THE_SAME_SIZE


class Score:
    """A metric.

    Args:
        metric: as in `optimize`; None for the cosine of the outputs with eager's.
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
        self._metric, self._model, self._state = metric or COSINE, model, tuple(state)
        self.name = self._metric if isinstance(self._metric, str) else getattr(self._metric, "__name__", "metric")
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
        if isinstance(runs, Executable):
            runs = InPieces(runs, runs.signature, self._model)
        with protected(self._model, written=self._state):
            return value_of(self._metric, self._model, runs, self._data)
