"""Calls of a hybrid that could not be compiled: why, and when it is worth another attempt.

A refusal holds for calls of one form, and for the model as it is: another call, or a change of the model, may be all
that it takes.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.new_signatures import (
    FIRST_PAUSE,
    FREE_CAPTURES,
    LONGEST_PAUSE,
    MAX_CAPTURES,
    MAX_COUNTED,
    SHARE,
    STREAK,
)
from tsopt.runtime.calling.settings import Settings
from tsopt.runtime.calling.specializations import UNTOLD, call_key, form_of

FREE_SECONDS = 10.0  # for attempts, the first two of which are made whatever they take
UNTRIED = "other calls of it could not be compiled, and those like this one are not worth another attempt yet"


@dataclass(frozen=True, slots=True)
class _Latest:
    """A call that was refused, and that the model itself has not served yet."""

    form: Any
    key: Any
    settles: bool


class Refused:
    """Why calls are not compiled, while nothing else is.

    Attributes:
        written: if the latest call was refused for what it changes outside of the model, the tensors that calls write.
    """

    def __init__(self) -> None:
        self._reasons: dict[Any, str] = {}  # by the form of calls; by the key of those that the model fails on
        self._came: dict[Any, None] = {}  # forms that nobody has tried to compile
        self._watch: Watch | None = None  # the model that they are of
        self._settings = Settings(follows_threads=False)  # of the process then
        self._made: _Latest | None = None
        self._latest, self._is_called = "", False
        self.written: Sequence[torch.Tensor] | None = None
        self._attempts, self._seconds = 0, 0.0
        self._changes = 0  # of the model, each of which was worth an attempt: it may have been mended
        self._since, self._called_for = time.monotonic(), 0.0  # seconds that the model was called for

    def add(
        self, call: Example, reason: str, watch: Watch, seconds: float, *, settles: bool, effects: bool = False
    ) -> str:
        """Refuses calls like this one from now on. Returns the reason.

        Args:
            watch: the model as it is.
            seconds: that the attempt has taken.
            settles: what the model changes in calls is no reason for another attempt.
            effects: the reason is what the call changes outside of the model.
        """
        form, key = _form_and_key(call.args, call.kwargs)
        self._reasons, self._watch, self._latest = self._reasons | {form: reason}, watch, reason
        self._settings, self.written = Settings(follows_threads=False), watch.written if effects else None
        self._made = _Latest(form, key, settles)
        self._attempts, self._seconds = self._attempts + 1, self._seconds + seconds
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
            reason = reasons.pop(made.form, self._latest)
            self._reasons = reasons | {made.key: reason}
            raise
        finally:
            self._is_called = False

    def timed(self, eager: Callable[..., Any], calls: int) -> Callable[..., Any]:
        """The model itself, for a call whose time stands for that of so many."""
        return partial(self._timed, eager, calls)

    def _timed(self, eager: Callable[..., Any], calls: int, /, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return eager(*args, **kwargs)
        finally:
            self._called_for += (time.monotonic() - start) * calls

    def reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a call is not compiled; empty if that is worth an attempt."""
        watch = self._watch
        if watch is None:
            return ""
        if self._is_called:
            return self._latest
        form, key = _form_and_key(args, kwargs)
        found = self._reasons.get(form) or self._reasons.get(key) or ""
        is_free, is_paid = self._is_free(), self._is_paid()
        may_change = is_free or is_paid or self._changes < FREE_CAPTURES - 1
        if may_change and (watch.changed() or self._settings.differs()):
            self._watch, self._reasons, self.written = None, {}, None
            self._changes += 1
            return ""
        if not is_free and not is_paid:
            return found or UNTRIED
        if found or is_free or form in self._came:
            return found
        # Of forms that come once, as with another float in each call, no attempt is worth its time.
        self._came = dict.fromkeys([*self._came, form][-MAX_COUNTED:])
        return UNTRIED

    def _is_free(self) -> bool:
        """Whether few attempts were made, and took little time. A model that takes long is refused for long as well."""
        return self._attempts < (FREE_CAPTURES if self._seconds < FREE_SECONDS else 2)

    def _is_paid(self) -> bool:
        """Whether attempts have taken little of the time of calls, of which no more has passed than of all time."""
        called_for = min(self._called_for, time.monotonic() - self._since)
        return self._attempts < MAX_CAPTURES and self._seconds < SHARE * called_for


class Pauses:
    """How many calls are the model's own without a look, where calls were refused again and again.

    A look takes a tenth of a millisecond. How long a pause is is drawn at random: what is called in a loop would
    always be looked at in the same place of it. Calls with another number of arguments are looked at at once.

    Args:
        choose: an integer from 0 to below its argument.
    """

    def __init__(self, choose: Callable[[int], int] | None = None) -> None:
        # A separate generator: the one of the process belongs to the user.
        self._choose = choose or random.Random().randrange
        self._streak, self._pause = 0, FIRST_PAUSE
        self._refused: frozenset[tuple[int, int]] = frozenset()  # numbers of arguments

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """After a call that was refused: how many of the next ones are not looked at."""
        self._refused |= {(len(args), len(kwargs))}
        self._streak += 1
        if self._streak < STREAK:
            return 0
        found, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return found // 2 + self._choose(found)

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is none that has to be looked at."""
        return (len(args), len(kwargs)) in self._refused


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
