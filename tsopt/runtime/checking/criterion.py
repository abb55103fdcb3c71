"""Accuracy criteria for candidates in lower precisions, on real data or by the user's metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from tsopt.compiler.calls.calibration_again import counted
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.graph.origin import user_frame
from tsopt.compiler.protect import InEvalMode, training_flags
from tsopt.errors import SignatureError, UsageError
from tsopt.runtime.checking.agreement import (
    Outputs,
    cosine,
    relative_error,
    relative_errors,
    scores_in,
    top1,
    unlike,
)
from tsopt.runtime.checking.answers import Answers, Called, answers_of
from tsopt.runtime.checking.in_pieces import InPieces

RELATIVE_ERROR = 4.4e-2  # of all outputs together, in L2 norms: a cosine of 0.999, an SQNR of 27 dB
ROUNDING = 1e-9  # of a drop: 0.98 - 0.97 is a little more than 0.01
MAX_DROP = 0.01  # of a metric
SQNR, COSINE, TOP1 = "sqnr", "cosine", "top1"
BUILT_IN = (SQNR, COSINE, TOP1)
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
        count: of the inputs that it judges on: fewer where calls are slow; 0 where it has data of its own.
    """

    is_cheap: bool
    key: str
    error_limit: float | None

    @property
    def count(self) -> int: ...

    def judge(self, candidate: Called) -> Judgement:
        """The judgement on a candidate, which is called like the model."""

    def tolerance(self, candidate: Called) -> float:
        """The relative error that audits allow for a single call: a multiple of the largest one on the data."""

    def on(self, model: Called, data: Sequence[Example]) -> Criterion:
        """The same criterion on other inputs, for quick trials; itself where they are its own or say too little."""


class Likeness:
    """Compares outputs, and what calls write, with eager's on held-out inputs.

    Args:
        metric: `sqnr`: the relative error of each output over all inputs; `cosine`: of each output with eager's, as
            vectors, the mean over the inputs; `top1`: the share of rows, along the last axis of the first output of
            floating-point numbers, whose largest value is where eager has it, and the relative error of all other
            floating-point numbers.
        max_drop: how far `cosine` or `top1` may be below 1.
        state: what calls write beside their inputs; each call starts from what is there now.
        is_guess: nobody has said that the first output is scores: its cosine must be high enough, too.

    A candidate with NaN or infinities where eager has none, or the reverse, is never accepted.

    Raises:
        UsageError: the model fails on an input, or `top1` would have to guess the axis of the classes.
    """

    is_cheap = True

    def __init__(
        self,
        model: Called,
        data: Sequence[Example],
        metric: str,
        max_drop: float,
        state: Sequence[torch.Tensor] = (),
        *,
        is_guess: bool = False,
    ) -> None:
        self._metric, self._max_drop, self._state, self._is_guess = metric, max_drop, state, is_guess
        self._answers = answers_of(model, data, state)
        self.key = f"{metric} {max_drop}{' guess' * is_guess}"
        self.error_limit = {SQNR: RELATIVE_ERROR, COSINE: _error_of_cosine(1 - max_drop)}.get(metric)
        self._along = axis_of_classes(self._answers) if metric == TOP1 else ""

    def on(self, model: Called, data: Sequence[Example]) -> Likeness:
        made, first = copy(self), self._answers.first(len(data))
        is_known = all(mine is call for mine, call in zip(first.calls, data, strict=False))
        made._answers = first if is_known else answers_of(model, data, self._state)
        # Where a single row is more than may be lost, a few inputs would accept or refuse by chance.
        decides_by_one = self._metric == TOP1 and made._rows * self._max_drop < 1
        is_all = is_known and len(first.calls) == len(self._answers.calls)  # of large answers, a few are kept
        return self if decides_by_one or is_all else made

    @property
    def count(self) -> int:
        return len(self._answers.calls)

    @property
    def _rows(self) -> int:
        """How many rows of scores there are, or classes that have been chosen already."""
        position = _scores_in(self._answers)
        if position is None:
            return sum(outputs[0].numel() for outputs in self._answers.outputs)
        return sum(outputs[position].shape[:-1].numel() for outputs in self._answers.outputs)

    def judge(self, candidate: Called) -> Judgement:
        found, wanted = self._answers.beside(candidate, self._state)
        every = range(len(self._answers.names))
        if self._metric == SQNR:
            judged = [self._by_error(found, wanted, every)]
        elif self._metric == COSINE:
            judged = [self._by_drop("cosine similarity to eager", cosine(found, wanted), _error_of_cosine)]
        else:
            judged = self._by_scores(found, wanted)
        strange, judgement = unlike(found, wanted), together(judged)
        return replace(judgement, ok=False, text=strange) if strange else judgement

    def judge_writes(self, candidate: Called) -> Judgement | None:
        """The same of what calls write alone, by its relative error; None where they write nothing."""
        if not self._answers.written:
            return None
        found, wanted = self._answers.beside(candidate, self._state)
        count = len(self._answers.names)
        return self._by_error(found, wanted, range(count - len(self._answers.written), count))

    def _by_scores(self, found: Sequence[Outputs], wanted: Sequence[Outputs]) -> list[Judgement]:
        """The largest of the scores decides, or classes that have been chosen already; of all else, the error."""
        count = self._answers.returned
        mine, theirs = ([outputs[:count] for outputs in each] for each in (found, wanted))
        scores = _scores_in(self._answers)
        name = "" if scores is None or len(self._answers.names) == 1 else f" of {self._answers.names[scores]}"
        said = f"top-1 agreement with eager{name}{self._along}"
        judged = [self._by_drop(said, top1(mine, theirs))]
        if self._is_guess and scores is not None:
            rows = ([[outputs[scores]] for outputs in each] for each in (found, wanted))
            judged.append(self._by_drop(f"cosine similarity to eager{name}", cosine(*rows)))
        others = [i for i, value in enumerate(wanted[0]) if i != scores and (i >= count or not _is_whole(value))]
        return [*judged, self._by_error(found, wanted, others, "other outputs: ")] if others else judged

    def _by_error(
        self, found: Sequence[Outputs], wanted: Sequence[Outputs], chosen: Sequence[int], what: str = ""
    ) -> Judgement:
        """By the largest relative error of the chosen outputs, with the name of that one."""
        errors = relative_errors(found, wanted)
        worst = max(chosen, key=errors.__getitem__)
        error, name = errors[worst], self._answers.names[worst]
        said = f"{what}relative error {error:.2%}{f' ({name})' * bool(name)}"
        text = f"{said} on {self._inputs}, limit {RELATIVE_ERROR:.2%}"
        return Judgement(error <= RELATIVE_ERROR, error, RELATIVE_ERROR, text, error)

    def _by_drop(self, name: str, value: float, error_of: Callable[[float], float] | None = None) -> Judgement:
        found, required = (f"{number:.6g}" for number in (value, 1 - self._max_drop))
        if found == required:  # to six digits
            found = f"{value:.12g}"
        text = f"{name} {found} on {self._inputs}, at least {required} is required"
        drop = 1 - value
        known = None if error_of is None else error_of(value)
        return Judgement(drop <= self._max_drop + ROUNDING, drop, self._max_drop, text, known)

    @property
    def _inputs(self) -> str:
        return counted(self.count, "input")

    def tolerance(self, candidate: Called) -> float:
        found, wanted = self._answers.beside(candidate, self._state)
        errors = (relative_error([mine], [theirs]) for mine, theirs in zip(found, wanted, strict=True))
        return min(WIDEST, max(RELATIVE_ERROR, WIDER * max(filter(math.isfinite, errors), default=0.0)))


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
    count = 0

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
        self._likeness = Likeness(model, data, SQNR, 0.0, state)
        self.tolerance = self._likeness.tolerance
        self._model, self._of_model = model, value_of(metric, model)
        again = value_of(metric, model)
        if abs(again - self._of_model) > STEADY * max_drop:
            raise UsageError(
                "the metric differs from call to call",
                why=f"it returned {self._of_model:g} and {again:g} for the same model, and max_drop is {max_drop:g}",
                fix="make it deterministic: fix the seed and the data that it uses",
            )

    def on(self, model: Called, data: Sequence[Example]) -> Metric:
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
        judged = Judgement(drop <= self._max_drop + ROUNDING, drop, self._max_drop, text)
        writes = self._likeness.judge_writes(candidate)  # which a function hardly looks at
        return judged if writes is None else together([judged, replace(writes, text=f"what it writes: {writes.text}")])

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
    cosine. Rows of other numbers look the same, so it is of both there. Without both, the relative error decides.
    """
    if callable(metric):
        return Metric(model, metric, MAX_DROP if max_drop is None else max_drop, signature, data, state)
    is_guess = metric is None and max_drop is not None
    if metric is None:
        metric = SQNR if max_drop is None else _usual(model, data, state)
    return Likeness(model, data, metric, MAX_DROP if max_drop is None else max_drop, state, is_guess=is_guess)


def together(judged: Sequence[Judgement]) -> Judgement:
    """One judgement of several, which all have to be acceptable: that which is nearest to its limit, with all texts."""
    worst = max(judged, key=lambda item: item.loss / item.limit if item.limit else item.loss and math.inf)
    text = "; ".join(item.text for item in judged)
    return replace(worst, ok=all(item.ok for item in judged), text=text)


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
    (outputs,) = answers_of(model, data[:1], state).outputs
    first = next((leaf for leaf in outputs if leaf.is_floating_point()), None)
    return TOP1 if first is not None and first.dim() == 2 and first.shape[1] > 1 else COSINE


def axis_of_classes(answers: Answers) -> str:
    """Which axis `top1` takes for that of the classes, as a text; empty where there is no doubt.

    Raises:
        UsageError: it is probably another one.
    """
    position = _scores_in(answers)
    shape = [] if position is None else list(answers.outputs[0][position].shape)
    if len(shape) > 3:
        raise UsageError(
            "the metric 'top1' needs rows of scores",
            why=f"the output is {shape}, and each of its axes may be that of the classes",
            fix="pass a function as the metric, which chooses the axis; or use 'cosine'",
        )
    return f" (along the last axis of {shape})" if len(shape) == 3 else ""


def _scores_in(answers: Answers) -> int | None:
    """Which of the tensors that calls return holds scores."""
    return scores_in(answers.outputs[0][: answers.returned]) if answers.outputs else None


def _is_whole(value: torch.Tensor) -> bool:
    """Whether a tensor holds integers or booleans, such as classes that follow from the scores."""
    return not (value.is_floating_point() or value.is_complex())


def _error_of_cosine(value: float) -> float:
    """The relative error of outputs with this cosine, if it has no preferred direction: a cosine is 1 - error^2 / 2."""
    return math.sqrt(2 * max(1 - value, 0.0))
