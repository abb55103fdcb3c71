"""Calls of a hybrid that could not be compiled: why, and when it is worth another attempt.

A refusal holds for calls of one form, and for the model as it is: another call, or a change of the model, may be all
that it takes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.new_signatures import FIRST_PAUSE, FREE_CAPTURES, LONGEST_PAUSE, SHARE, STREAK
from tsopt.runtime.calling.settings import Settings
from tsopt.runtime.calling.specializations import UNTOLD, call_key, form_of


@dataclass(frozen=True, slots=True)
class _Latest:
    """A call that was refused, and that the model itself has not served yet."""

    form: Any
    key: Any
    settles: bool


class Refused:
    """Why calls are not compiled, while nothing else is.

    Attributes:
        latest: the latest reason.
    """

    def __init__(self) -> None:
        self._reasons: dict[Any, str] = {}  # by the form of calls; by the key of those that the model fails on
        self._watch: Watch | None = None  # the model that they are of
        self._settings = Settings(follows_threads=False)  # of the process then
        self._made: _Latest | None = None
        self.latest, self._is_called = "", False
        self._attempts, self._seconds, self._since = 0, 0.0, time.monotonic()
        self._streak, self._pause = 0, FIRST_PAUSE

    def add(self, call: Example, reason: str, watch: Watch, seconds: float, *, settles: bool) -> str:
        """Refuses calls like this one from now on. Returns the reason.

        Args:
            watch: the model as it is.
            seconds: that the attempt has taken.
            settles: what the model changes in calls is no reason for another attempt.
        """
        form, key = _form_and_key(call.args, call.kwargs)
        self._reasons, self._watch, self.latest = self._reasons | {form: reason}, watch, reason
        self._settings = Settings(follows_threads=False)
        self._made = _Latest(form, key, settles)
        self._attempts, self._seconds = self._attempts + 1, self._seconds + seconds
        self._streak, self._pause = 0, FIRST_PAUSE
        return reason

    def served_by(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        """The model itself, for a call that may just have been refused."""
        made, self._made = self._made, None
        watch = self._watch
        return eager if made is None or watch is None else partial(self._called, made, watch, eager)

    def _called(self, made: _Latest, watch: Watch, eager: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._is_called = True
        try:
            return settled(watch, eager, args, kwargs) if made.settles else eager(*args, **kwargs)
        except Exception:  # it is this call that is wrong, which says nothing of others
            reasons = dict(self._reasons)
            reason = reasons.pop(made.form, self.latest)
            self._reasons = reasons | {made.key: reason}
            raise
        finally:
            self._is_called = False

    def reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a call is not compiled; empty if that is worth an attempt."""
        watch = self._watch
        if watch is None:
            return ""
        if self._is_called or not self._pays():
            return self.latest
        if watch.changed() or self._settings.differs():
            self._watch, self._reasons = None, {}
            return ""
        form, key = _form_and_key(args, kwargs)
        return self._reasons.get(form) or self._reasons.get(key) or ""

    def _pays(self) -> bool:
        """Whether there may be another attempt: few were made, or they have taken little of the time."""
        return self._attempts < FREE_CAPTURES or self._seconds < SHARE * (time.monotonic() - self._since)

    def pause(self) -> int:
        """After a call that was refused: how many of the next ones are the model's without a look.

        A look takes a tenth of a millisecond.
        """
        self._streak += 1
        if self._streak < STREAK:
            return 0
        found, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return found


def settled(watch: Watch, eager: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of the model. What that changes in it does not count for the watch from then on."""
    before = [(tensor, _version(tensor)) for tensor in watch.tensors]
    found = eager(*args, **kwargs)
    with contextlib.suppress(Exception):  # of an object of the user's: then it has changed, for all that is known
        watch.leave_out(tensor for tensor, version in before if _version(tensor) != version)
        watch.leave_out_changes()
        watch.renew()
    return found


def _form_and_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """What calls like this one have in common, and what only those have that are the same; None for what has no key."""
    try:
        key = call_key(args, kwargs)
        form = form_of(key)
        hash((form, key))
    except UNTOLD:
        return None, None
    return form, key


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else tensor._version
