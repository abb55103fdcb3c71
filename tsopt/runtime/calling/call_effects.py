"""Side effects of a call of the model, which compiled calls do not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.compiler.outside import Outside, kept_outside
from tsopt.compiler.protect import protected
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.checking.inputs import InputSet


def call_effects(model: Callable[..., Any], watch: Watch, example: Example) -> tuple[list[str], list[str]]:
    """What every call changes outside of the model, and which of its attributes. The watch ignores both from then on.

    Calls the model. If that changes something outside, or raises, the changes are undone: eager will serve the user's
    call.
    """
    outside, inside, complete = list[str](), list[str](), False
    before = Outside(model)
    with protected(model, written=watch.written), contextlib.suppress(Exception):
        outside, inside = watch.changes_of(partial(_call_once, model, example), partial(kept_outside, model))
        watch.leave_out_changes()
        complete = True
    if outside or not complete:
        before.put_back()
    watch.renew()
    return outside, inside


def why_eager(outside: list[str]) -> str:
    """Why the model itself serves all calls, where they change something outside of it."""
    return f"a call changes {', '.join(outside)} outside of the model, which compiled calls would not"


def not_changed(inside: list[str]) -> str:
    """What to tell of attributes that compiled calls leave as they are."""
    names = f"its attribute{'s' * (len(inside) > 1)} {', '.join(inside)}"
    return f"compiled calls do not change {names}, which each call of the model itself does"


def _call_once(model: Callable[..., Any], example: Example) -> None:
    call = InputSet("example", example).clone()
    model(*call.args, **call.kwargs)
