"""What the families about values share: a model compiled for an example, called with other values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import tsopt
from bench.hazards import BACKENDS, RIGHT, Case, Outcome
from tsopt.compiler.calls.structure import flatten
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.compare import compare
from tsopt.runtime.onnx.export import to_onnx

Model = Callable[..., Any]
Call = tuple[torch.Tensor, ...]


def case(name: str, model: Model, example: Call, *calls: Call, notes: str = "") -> Case:
    """A case: `calls` are made on what was compiled and raced for `example`.

    Args:
        notes: what a note about it speaks of; empty: none is enough.
    """
    return Case(name, partial(outcome, model, example, calls, notes), BACKENDS)


def outcome(model: Model, example: Call, calls: tuple[Call, ...], notes: str, backend: str) -> Outcome:
    """Compiled and judged as a race does it, without the timing; then called as its caller would."""
    captured = tsopt.capture(model, example)
    fast = tsopt.compile(tsopt.transform(captured), backend)
    verdict = Oracle(model, tsopt.example(*example), captured).judge(fast)
    if not verdict.ok:
        return Outcome("refused", f"it does not race: {verdict.reason}")
    said = [note for note in (*fast.notes, *getattr(verdict, "notes", ())) if notes and notes in note]
    for call in calls:
        why = _difference(model, fast, call)
        if why:
            return Outcome("noted", said[0]) if said else Outcome("wrong", why)
    return RIGHT


def _difference(model: Model, fast: Model, call: Call) -> str:
    wanted, found = _answer(model, call), _answer(fast, call)
    if isinstance(wanted, Exception) or isinstance(found, Exception):
        if isinstance(wanted, (IndexError, RuntimeError)) and isinstance(found, type(wanted)):
            return ""
        return f"{_said(found)}, eager {_said(wanted)}"
    for mine, theirs in zip(flatten(found)[0], flatten(wanted)[0], strict=True):
        result = compare(mine, theirs)
        if not result.ok:
            return f"{mine.flatten()[:4].tolist()}, eager {theirs.flatten()[:4].tolist()}"
    return ""


def _answer(called: Model, call: Call) -> Any:
    try:
        with torch.no_grad():
            return called(*[value.clone() for value in call])
    except Exception as error:  # what it raises is the answer
        return error


def _said(answer: Any) -> str:
    return f"{type(answer).__name__}: {str(answer)[:80]}" if isinstance(answer, Exception) else "an answer"


to_onnx(tsopt.capture(torch.relu, torch.ones(1)))  # loads what exporting needs before each case gets its own process
