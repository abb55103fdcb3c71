"""Calls with other signatures than the example's: what was compiled for them, for one size or for many, and when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import where_different
from tsopt.compiler.precision_names import FP32
from tsopt.compiler.sizes.dims import resized
from tsopt.compiler.turns import Turn
from tsopt.errors import CaptureError, TsoptError
from tsopt.runtime import forks
from tsopt.runtime.calling.audit import OUT_OF_MEMORY
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.specializations import (
    MAX_SPECIALIZATIONS,
    UNTOLD,
    CallKey,
    ForSizes,
    Seen,
    Specializations,
    call_key,
    form_of,
    loose,
    plain,
    sizes_of,
    types_of,
)
from tsopt.runtime.checking.held_out_sizes import widened

log = logging.getLogger("tsopt")
MAX_CAPTURES = 2 * MAX_SPECIALIZATIONS  # in total: each takes seconds
MAX_FAILURES = 2  # of captures for several sizes, for calls that differ only in their sizes
AFTER_A_CONDITION = 3  # times as many calls of a hybrid are served by the model where sizes decide what it does
STREAK, FIRST_PAUSE, LONGEST_PAUSE = 64, 16, 1024  # calls: see `NewSignatures.skips`
# Captures of a hybrid for one size: this many at first; then at most this share of the time, or signatures called this
# often. Likewise those for calls of the same kinds of tensors, which differ in constants.
FREE_CAPTURES, SHARE, OFTEN = 4, 0.02, 50
MAX_COUNTED = 256  # signatures whose calls are counted
MANY_FORMS = 8  # of calls with the same kinds of tensors: their constants differ from call to call


class NewSignatures:
    """Compiles what calls with new signatures need, and finds it again.

    Args:
        example: the call that the model was optimized for.
        aliasing: whether it matters which tensors of a call share memory.
        specialize: compiles for a call; for several calls, for all sizes in which they differ.
        first: what was compiled for the example; it serves more sizes if it was captured for many.
        warmup: how many calls of a form the model serves first.
        eager: the model itself.
        check: raises WeightsChangedError if the model no longer has the weights that were compiled.
        ready: prepares what was compiled for being called.
        note: records a signature and what became of it.

    Attributes:
        seconds: that captures have taken.
        refuse: raises CaptureError for a call that must stay the model's own, before it is captured.
        after_eager: told of each call that the model itself has served.
        skip: how many of the next calls are left to the model without looking for what serves them.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        example: Example,
        aliasing: bool,
        specialize: Callable[..., Executable],
        *,
        first: Executable | None,
        warmup: int,
        eager: Callable[..., Any],
        check: Callable[[], None],
        ready: Callable[[Executable], Executable],
        note: Callable[[str, str], None],
    ) -> None:
        self.model, self.example, self.aliasing = model, example, aliasing
        self._specialize, self._first, self._warmup = specialize, first, warmup
        self._eager, self._check, self._ready, self._note = eager, check, ready, note
        self.kept = Specializations()
        self.refuse: Callable[[Example], None] = lambda example: None
        self.after_eager: Callable[[tuple[Any, ...], dict[str, Any]], None] = lambda args, kwargs: None
        self._captures = 0
        self._counts: dict[CallKey, int] = {}
        # By the kinds of the tensors of a call: forms that were captured for one size, and how often a form was new.
        self._of_kinds: dict[Any, set[Any]] = {}
        self._firsts: dict[Any, int] = {}
        self.seconds, self._since = 0.0, time.monotonic()
        self.skip, self._streak, self._pause = 0, 0, FIRST_PAUSE
        self._own: CallKey | None = None  # of the example
        self._turn, self._compiling = Turn(), False
        forks.tell(self)

    def accepting(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Executable, Sequence[Any]] | None:
        """An executable that was used lately and serves this call, and the call's tensors. Takes microseconds."""
        return self.kept.accepting(args, kwargs)

    def serving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """What serves a call, compiled now if need be."""
        try:
            key = call_key(args, kwargs, aliasing=self.aliasing)
            found = self._found(key, args, kwargs)
        except UNTOLD:  # it cannot be recognized again
            return self._eager
        if found is None:
            found = self._made(key, args, kwargs)
        if isinstance(found, Executable):
            self.kept.used(found, args, kwargs)
            self._streak, self._pause = 0, FIRST_PAUSE
        elif not self._may_soon_capture(found, key):
            self._streak += 1
            if self._streak >= STREAK:
                self.skip, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return found

    def _may_soon_capture(self, found: Callable[..., Any], key: CallKey) -> bool:
        """Whether a call that the model serves comes again, and may then be captured; what is kept for it stays."""
        return found is self._eager and self._captures < MAX_CAPTURES and self._counts.get(loose(key), 0) > 1

    def _made(self, key: CallKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        with self._turn.taken() as mine:
            if not mine or self._compiling:  # in this very thread: the model calls itself
                return self._eager
            self._compiling = True
            try:
                return self._found(key, args, kwargs) or self._add(key, Example(args, kwargs))
            finally:
                self._compiling = False

    def forked(self) -> None:
        """No thread is there that may have held the lock."""
        self._turn, self._compiling = Turn(), False

    def skips(self) -> bool:
        """Whether to leave a call to the model without looking for what serves it.

        Looking takes a tenth of a millisecond. Where nothing has been found for many calls in a row, only some look.
        """
        if self.skip <= 0:
            return False
        self.skip -= 1
        return True

    def are_left(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call differs from the example only in its sizes. What was compiled for others is forgotten then."""
        try:
            form = form_of(call_key(args, kwargs, aliasing=self.aliasing))
        except UNTOLD:
            return False
        if form != form_of(call_key(self.example.args, self.example.kwargs, aliasing=self.aliasing)):
            return False
        self.kept.leave(form)
        return True

    def found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What serves a call, if there already is something. Raises TypeError if that cannot be told."""
        return self._found(call_key(args, kwargs, aliasing=self.aliasing), args, kwargs)

    def _found(self, key: CallKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        self._seen(key)
        return self.kept.serving(key, args, kwargs)

    def _seen(self, key: CallKey) -> Seen:
        """What is known of calls that differ from this one only in their sizes; the example is one of them."""
        if self._own is None:
            self._own = call_key(self.example.args, self.example.kwargs, aliasing=self.aliasing)
            seen = self.kept.seen(self._own)
            if self._first is not None and self._first.limits:
                seen.several = [ForSizes(self._ready(self._first), (self._own,))]
            else:
                seen.offer(self._own)
        return self.kept.seen(key)

    def _add(self, key: CallKey, example: Example) -> Callable[..., Any]:
        seen = self._seen(key)
        for several in seen.several:
            if several.refuses(key) or (several.is_full and not self._affords()):
                continue
            wider = self._wider(several.executable, example)
            if wider is not None:
                several.executable = wider
                return wider
            several.refuse(key)
        narrow = next((several for several in seen.several if several.has_fixed(key)), None)
        partner = seen.partner_for(key) if narrow is None else narrow.partner_for(key)
        waits = partner is None and seen.waits_for_another(key)
        seen.key = key
        signature, kinds = ", ".join(map(str, types_of(key))), form_of(key)[1]
        if seen.calls < self._calls_before(seen, narrow):
            seen.calls += 1
            seen.offer(key)
            self._firsts[kinds] = self._firsts.get(kinds, 0) + 1
            if self._firsts[kinds] == MANY_FORMS:
                self._note_others(key, signature)
            return self._eager
        if self._captures >= MAX_CAPTURES:
            self._note(
                "any further one",
                f"runs in eager mode: {MAX_CAPTURES} were captured; dynamic= captures one program for many sizes",
            )
            return self._eager
        self._check()
        tried = partner is not None and seen.failures < MAX_FAILURES and sizes_of(partner) != sizes_of(key)
        if partner is not None and tried:
            self._captures += 1
            made = self._for_several_sizes(seen, partner, example, signature)
            if made is not None:
                seen.several = [several for several in seen.several if several is not narrow] + [
                    ForSizes(made, (key, partner))
                ]
                seen.calls, seen.failures, seen.partner, seen.met = 0, 0, None, []
                return made
            waits = True
        seen.offer(key)
        if waits and self._warmup and seen.failures < MAX_FAILURES:
            seen.calls = 0
            return self._eager
        # A name or a temperature may differ in each call: such calls run in eager mode, unless they are repeated.
        forms = self._of_kinds.setdefault(kinds, set())
        is_one_of_many = len(forms - {form_of(key)}) >= FREE_CAPTURES
        if (self._warmup or is_one_of_many) and not self._pays(key, seen):
            if is_one_of_many:
                self._note_others(key, signature)
            return self._eager
        self._captures += not tried
        forms.add(form_of(key))
        one, by_layout = self._for_one_size(example, signature)
        self.kept.keep(key, one, by_layout=by_layout and not plain(key))
        return one

    def _note_others(self, key: CallKey, signature: str) -> None:
        """Notes that calls with other constants run in eager mode, and which argument differs."""
        path, mine, _ = where_different(key[0], (self._own or key)[0])
        place = path.partition(".")[2]  # in the arguments, or in those with names
        place = f"argument {place}" if place[:1].isdigit() else repr(place)
        told = f"run in eager mode until one has come {OFTEN} times"
        if mine.kind == "const" and mine.cls is not None:
            told += f"; in each, {place} is another {mine.cls.__name__}"
        self._note(f"{signature}, further ones", told)

    def _calls_before(self, seen: Seen, narrow: ForSizes | None) -> int:
        """How many calls the model serves before they are captured.

        A loop whose sizes go past a condition of the model goes past another one soon, if there is one.
        """
        past = narrow is None and (seen.several or seen.failures)
        return self._warmup * (AFTER_A_CONDITION if past else 1)

    def _pays(self, key: CallKey, seen: Seen) -> bool:
        """Whether a capture for one size may pay: few were made, they took little time, or the call is frequent."""
        # A loop passes the sizes between two programs once each time.
        free = self._captures < FREE_CAPTURES and not seen.several
        if free or self._affords():
            return True
        key = loose(key)
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count  # the latest is the last
        if len(self._counts) > MAX_COUNTED:
            del self._counts[next(iter(self._counts))]
        return count >= OFTEN

    def _affords(self) -> bool:
        """Whether captures have taken little of the time so far."""
        return self.seconds < SHARE * (time.monotonic() - self._since)

    def _timed(self, *calls: Example) -> Executable:
        start = time.monotonic()
        try:
            self.refuse(calls[0])
            return self._specialize(*calls)
        finally:
            self.seconds += time.monotonic() - start

    def _wider(self, executable: Executable, example: Example) -> Executable | None:
        start = time.monotonic()
        try:
            return widened(self.model, executable, example)
        except Exception as error:  # a bug in tsopt costs this call its speed
            self._internal(error)
            return None
        finally:
            self.seconds += time.monotonic() - start

    def _internal(self, error: Exception) -> None:
        log.warning("internal error in tsopt at a call with a new signature", exc_info=error)

    def _for_several_sizes(self, seen: Seen, partner: CallKey, example: Example, signature: str) -> Executable | None:
        """Compiles for the sizes of this call and of an earlier one; None if that is impossible."""
        try:
            other = resized(example, sizes_of(partner), partner[0], share=self.aliasing)
            executable = self._timed(example, other)
        except Exception as error:
            if isinstance(error, CaptureError) and error.admits is not None:
                seen.classes.append(error.admits)
            seen.failures += not isinstance(error, OUT_OF_MEMORY)  # there may be more another time
            if not isinstance(error, TsoptError):
                self._internal(error)
            log.info("calls like %s are not captured for several sizes: %s", signature, error)
            return None
        self._note(signature, _captured_for(executable))
        return self._ready(executable)

    def _for_one_size(self, example: Example, signature: str) -> tuple[Callable[..., Any], bool]:
        """What serves a call, and whether it may serve only calls whose tensors have the same strides."""
        try:
            executable = self._timed(example)
        except Exception as error:
            if not isinstance(error, TsoptError):
                self._internal(error)
            what = error.what if isinstance(error, TsoptError) else f"internal error in tsopt ({type(error).__name__})"
            outcome = f"runs in eager mode: {what}"

            def eager(*args: Any, **kwargs: Any) -> Any:
                result = self._eager(*args, **kwargs)
                self._note(signature, outcome)  # of a call that the model itself takes; others raise what eager raises
                return result

            return eager, isinstance(error, CaptureError)  # as a view that these strides do not allow
        self._note(signature, _captured_for(executable))
        return self._ready(executable), False


def _captured_for(executable: Executable) -> str:
    """`captured for openvino, batch: 1..8; not chosen: OpenVINO, precision int8-weights: relative error ...`"""
    precision = "" if executable.precision == FP32 else f" in {executable.precision}"
    sizes = [str(dim) for dim in executable.signature.dims]
    made = ", ".join([f"captured for {executable.backend}{precision}", *sizes])
    return "; not chosen: ".join([made, *executable.passed_over])
