"""Accuracy criteria for candidates in lower precisions, on real data or by the user's metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tsopt.compiler.calls.calibration import called_on_data
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.graph.origin import user_frame
from tsopt.compiler.protect import InEvalMode, protected, training_flags
from tsopt.compiler.random_state import seed_torch
from tsopt.errors import SignatureError, UsageError
from tsopt.runtime.checking.agreement import Outputs, cosine, relative_error, scores_in, top1, unlike
from tsopt.runtime.checking.in_pieces import InPieces

Called = Callable[..., Any]

RELATIVE_ERROR = 4.4e-2  # of all outputs together, in L2 norms: a cosine of 0.999, an SQNR of 27 dB
ROUNDING = 1e-9  # of a drop: 0.98 - 0.97 is a little more than 0.01
MAX_DROP = 0.01  # of a metric
SQNR, COSINE, TOP1 = "sqnr", "cosine", "top1"
BUILT_IN = (SQNR, COSINE, TOP1)
MOST_BYTES = 1 << 29  # of eager's answers that are kept: fewer inputs judge where one answer is large
WIDER = 4.0  # times the largest relative error on the data: what an audit of a real call accepts
WIDEST = 1.0  # of these: at most an error as large as the output
STEADY = 0.1  # of `max_drop`: how far two values of a metric for the same model may be apart


@dataclass(frozen=True, slots=True)
class Judgement:
    """The loss of a candidate, and whether it is acceptable.

    loss: a relative error, or the drop of a metric; `limit`: how much is accepted.
    text: `relative error 6.2 % on 16 inputs, limit 4.4 %`.
    error: about the relative error of the outputs; None if the metric does not tell.
    """

    ok: bool
    loss: float
    limit: float
    text: str
    error: float | None = None


class Criterion(Protocol):
    """Decides whether a candidate in a lower precision is accurate enough.

    Attributes:
        is_cheap: whether it needs only the data, so that it can judge every candidate.
        key: what it asks for, as a text; empty for what no text tells.
        error_limit: about the largest relative error of the outputs that it accepts; None if that is not known.
    """

    is_cheap: bool
    key: str
    error_limit: float | None

    def judge(self, candidate: Called) -> Judgement:
        """The judgement on a candidate, which is called like the model."""

    def tolerance(self, candidate: Called) -> float:
        """The relative error that audits allow for a single call: a multiple of the largest one on the data."""

    def on_first(self, count: int) -> Criterion:
        """The same criterion on fewer inputs, for quick trials."""


class Likeness:
    """Compares outputs with eager's on held-out inputs.

    Args:
        metric: `sqnr`: the relative error of each output over all inputs; `cosine`: of each output with eager's, as
            vectors, the mean over the inputs; `top1`: the share of rows, along the last axis of the first output of
            floating-point numbers, whose largest value is where eager has it.
        max_drop: how far `cosine` or `top1` may be below 1.
        state: what calls write beside their inputs; each call starts from what is there now.

    A candidate with NaN or infinities where eager has none, or the reverse, is never accepted.

    Raises:
        UsageError: the model fails on an input, or `top1` would have to guess the axis of the classes.
    """

    is_cheap = True

    def __init__(
        self, model: Called, data: Sequence[Example], metric: str, max_drop: float, state: Sequence[torch.Tensor] = ()
    ) -> None:
        self._metric, self._max_drop, self._state = metric, max_drop, state
        self._wanted = answers_of(model, data, metric, state)
        self.key = f"{metric} {max_drop}"
        self.error_limit = {SQNR: RELATIVE_ERROR, COSINE: _error_of_cosine(1 - max_drop)}.get(metric)
        self._data = data[: len(self._wanted)]
        self._along = "" if metric != TOP1 or not self._wanted else _axis_of_classes(self._wanted[0])

    def on_first(self, count: int) -> Likeness:
        made = copy(self)
        made._wanted, made._data = self._wanted[:count], self._data[:count]
        return made

    @property
    def _inputs(self) -> str:
        return f"{len(self._data)} {'input' if len(self._data) == 1 else 'inputs'}"

    def judge(self, candidate: Called) -> Judgement:
        found = [outputs_of(candidate, call, self._state) for call in self._data]
        strange = unlike(found, self._wanted)
        if self._metric == SQNR:
            error = relative_error(found, self._wanted)
            text = f"relative error {error:.2%} on {self._inputs}, limit {RELATIVE_ERROR:.2%}"
            return Judgement(error <= RELATIVE_ERROR, error, RELATIVE_ERROR, strange or text, error)
        value = measured(self._metric, found, self._wanted)
        if strange:
            return Judgement(False, 1 - value, self._max_drop, strange)
        name = "cosine similarity to eager" if self._metric == COSINE else f"top-1 agreement with eager{self._along}"
        found_text, required = (f"{number:.6g}" for number in (value, 1 - self._max_drop))
        if found_text == required:  # to six digits
            found_text = f"{value:.12g}"
        text = f"{name} {found_text} on {self._inputs}, at least {required} is required"
        drop, known = 1 - value, _error_of_cosine(value) if self._metric == COSINE else None
        return Judgement(drop <= self._max_drop + ROUNDING, drop, self._max_drop, text, known)

    def tolerance(self, candidate: Called) -> float:
        errors = [
            relative_error([outputs_of(candidate, call, self._state)], [wanted])
            for call, wanted in zip(self._data, self._wanted, strict=True)
        ]
        return min(
            WIDEST, max(RELATIVE_ERROR, WIDER * max((error for error in errors if math.isfinite(error)), default=0.0))
        )


class Metric:
    """The user's own metric; higher is better.

    Args:
        model: what the drop is measured from.
        metric: called with what is called like the model; returns a number.
        max_drop: how far the metric may be below that of the model.
        signature: of the candidates: larger batches are cut into the sizes that it has.
        data: inputs that say how far single calls are from eager.

    Raises:
        UsageError: the metric raises, returns something other than a finite number, or differs from call to call.
    """

    is_cheap = False
    key = ""
    error_limit: float | None = None

    def __init__(
        self,
        model: Called,
        metric: Callable[[Any], Any],
        max_drop: float,
        signature: Signature,
        data: Sequence[Example],
        state: Sequence[torch.Tensor] = (),
    ) -> None:
        self._metric, self._max_drop, self._signature = metric, max_drop, signature
        self.tolerance = Likeness(model, data, SQNR, 0.0, state).tolerance
        self._model, self._of_model = model, value_of(metric, model)
        again = value_of(metric, model)
        if abs(again - self._of_model) > STEADY * max_drop:
            raise UsageError(
                "the metric differs from call to call",
                why=f"it returned {self._of_model:g} and {again:g} for the same model, and max_drop is {max_drop:g}",
                fix="make it deterministic: fix the seed and the data that it uses",
            )

    def on_first(self, count: int) -> Metric:
        return self  # it has data of its own

    def judge(self, candidate: Called) -> Judgement:
        called = InPieces(candidate, self._signature, self._model)
        try:
            value = _value(self._metric, called)
        except UsageError as error:
            if not called.has_nan:
                raise
            return self._undefined(f"{error.what}: outputs contain NaN")
        if not math.isfinite(value):
            return self._undefined(f"the metric returns {value:g}")
        drop = self._of_model - value
        text = f"metric {value:g}, eager {self._of_model:g}: a drop of {max(drop, 0):.4g}, limit {self._max_drop:g}"
        return Judgement(drop <= self._max_drop + ROUNDING, drop, self._max_drop, text)

    def _undefined(self, text: str) -> Judgement:
        """The judgement on a candidate without a value, such as a correlation with outputs that are all the same."""
        return Judgement(False, math.inf, self._max_drop, f"{text}, eager {self._of_model:g}")


def criterion_of(
    model: Called,
    data: Sequence[Example],
    metric: Callable[[Any], Any] | str | None,
    max_drop: float | None,
    signature: Signature,
    state: Sequence[torch.Tensor] = (),
) -> Criterion:
    """The criterion that the options select.

    Without a metric, `max_drop` is of the top-1 agreement if the first output is rows of scores, and otherwise of the
    cosine. Without both, the relative error decides.
    """
    if callable(metric):
        return Metric(model, metric, MAX_DROP if max_drop is None else max_drop, signature, data, state)
    if metric is None:
        metric = SQNR if max_drop is None else _usual(model, data, state)
    return Likeness(model, data, metric, MAX_DROP if max_drop is None else max_drop, state)


def answers_of(
    model: Called, data: Sequence[Example], metric: str, state: Sequence[torch.Tensor], kept: Any = None
) -> list[Outputs]:
    """The model's outputs, which those of candidates are measured by; of the first inputs only where they are large.

    Args:
        kept: see `outputs_of`.

    Raises:
        UsageError: the model fails on an input, or `top1` would have to guess the axis of the classes.
    """
    found: list[Outputs] = []
    for call in data:
        if found and _bytes(found) + _bytes(found[:1]) > MOST_BYTES:
            break
        with called_on_data(Exception):  # whatever the model raises
            found.append(outputs_of(model, call, state, kept))
    if metric == TOP1 and found:
        _axis_of_classes(found[0])
    return found


def measured(metric: str, found: Sequence[Outputs], wanted: Sequence[Outputs]) -> float:
    """A built-in metric of outputs beside eager's; higher is better, and 1 is the most."""
    if metric == SQNR:
        return 1 - relative_error(found, wanted)
    return (cosine if metric == COSINE else top1)(found, wanted)


def value_of(metric: Callable[[Any], Any], called: Called) -> float:
    """The user's metric of what is called like the model.

    Raises:
        UsageError: the metric raises or returns something other than a finite number.
    """
    return _finite(_value(metric, called))


def _value(metric: Callable[[Any], Any], called: Called) -> float:
    """What a metric returns for what is called like the model. A module in eval mode is the module itself."""
    is_in_eval_mode = isinstance(called, InEvalMode)
    runs: Any = called.module if isinstance(called, InEvalMode) else called
    try:
        with torch.no_grad(), training_flags(runs, False) if is_in_eval_mode else nullcontext():
            return float(metric(runs))
    except SignatureError as error:
        raise UsageError(
            f"the metric calls the model in a way that candidates do not support: {error.what}",
            where=user_frame(error),
            why=error.why,
            fix=error.fix,
        ) from error
    except Exception as error:
        raise UsageError(
            f"the metric raises {type(error).__name__}",
            where=user_frame(error),
            why=str(error)[:300] or None,
            fix="pass a function that takes a model and returns a number; higher is better",
        ) from error


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise UsageError(f"the metric returns {number}", fix="return a finite number; higher is better")
    return number


def check_metric(metric: Any, max_drop: float | None) -> None:
    """Raises UsageError for an unknown metric or an invalid `max_drop`."""
    if metric is not None and not callable(metric) and metric not in BUILT_IN:
        raise UsageError(f"unknown metric {metric!r}", fix=f"use one of: {', '.join(BUILT_IN)}, or pass a function")
    is_number = isinstance(max_drop, (int, float)) and not isinstance(max_drop, bool)
    if max_drop is not None and not (is_number and 0 <= max_drop < math.inf):
        raise UsageError(
            f"max_drop must be 0 or more, got {max_drop!r}", fix="pass how much the metric may drop, e.g. 0.01"
        )
    if metric == SQNR and max_drop is not None:
        raise UsageError(
            "max_drop has no meaning for the metric 'sqnr'",
            why=f"its limit is a relative error of {RELATIVE_ERROR:.1%}",
            fix=f"use the metric {COSINE!r} or {TOP1!r}, or pass a function",
        )


def _usual(model: Called, data: Sequence[Example], state: Sequence[torch.Tensor]) -> str:
    answers = Likeness(model, data[:1], COSINE, 0.0, state)._wanted
    first = next((leaf for leaf in answers[0] if leaf.is_floating_point()), None)
    return TOP1 if first is not None and first.dim() == 2 and first.shape[1] > 1 else COSINE


def _axis_of_classes(outputs: Outputs) -> str:
    """Which axis `top1` takes for that of the classes, as a text; empty where there is no doubt.

    Raises:
        UsageError: it is probably another one.
    """
    position = scores_in(outputs)
    shape = [] if position is None else list(outputs[position].shape)
    if len(shape) > 3:
        raise UsageError(
            "the metric 'top1' needs rows of scores",
            why=f"the output is {shape}, and each of its axes may be that of the classes",
            fix="pass a function as the metric, which chooses the axis; or use 'cosine'",
        )
    return f" (along the last axis of {shape})" if len(shape) == 3 else ""


def outputs_of(called: Called, call: Example, state: Sequence[torch.Tensor], kept: Any = None) -> Outputs:
    """Copies of the outputs of a call. State that the call writes is restored.

    Args:
        kept: a model that is put back as it was, too.
    """
    given, structure = flatten((call.args, call.kwargs))
    args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in given])  # a model may write to its inputs
    with protected(kept, written=state), torch.no_grad():
        seed_torch(0)
        leaves, _ = flatten(called(*args, **kwargs))
        return [leaf.detach().clone() for leaf in leaves]  # here: one of them may be state itself


def _error_of_cosine(value: float) -> float:
    """The relative error of outputs with this cosine, if it has no preferred direction: a cosine is 1 - error^2 / 2."""
    return math.sqrt(2 * max(1 - value, 0.0))


def _bytes(answers: Sequence[Outputs]) -> int:
    return sum(leaf.nbytes for outputs in answers for leaf in outputs)
