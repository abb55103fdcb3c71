"""What is behind a hybrid: the compiled form of its model, for as long as the model does not change."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tsopt.api import optimize
from tsopt.background.in_background import InBackground
from tsopt.compiler.calls.calibration_again import read_ahead, readable_again
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.snapshot import iterator_in
from tsopt.compiler.capture.names import name_of
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.protect import training_of
from tsopt.compiler.turns import Turn
from tsopt.errors import CaptureError, NotReady, TsoptError, UsageError
from tsopt.hybrid_choice import Choice
from tsopt.runtime import forks
from tsopt.runtime.calling.ambient import untraced
from tsopt.runtime.calling.audit import LOOK_AT, NEAR, SHARE, Audits, executable_difference
from tsopt.runtime.calling.call_effects import call_effects, effects_of, not_changed, why_eager
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.fallback import InEager
from tsopt.runtime.calling.holdings import Holdings
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.calling.own_work import LARGER, UNSEEN, size_of
from tsopt.runtime.calling.partitioned import Partitioned
from tsopt.runtime.calling.put_aside import Form, PutAside
from tsopt.runtime.calling.refused import Pauses, Refused
from tsopt.runtime.calling.served import DIFFERED, ELSEWHERE, KEEPS_CHANGING, NOT_FASTER, RENUMBERED
from tsopt.runtime.racing.rehearsal import StandIn, stand_in

log = logging.getLogger("tsopt")
# Defaults: the first call blocks the caller, changes of the weights are detected here, and who calls a hybrid may be a
# library that makes many calls once.
OPTIONS: dict[str, Any] = {"seconds": 2.0, "share_weights": True, "warmup": 1}
CHANGES = 3  # times, of each kind, that a compiled form may be given up; but for threads, it is eager's then
FILLS = 256  # of dicts in calls of the model itself, for each of which the compiled form is compared with it


class Compiled(Choice):
    """The compiled form of a model, for as long as the model does not change.

    Attributes:
        why_eager: why eager runs for good.
    """

    def __init__(self, model: Callable[..., Any], background: bool, options: dict[str, Any]) -> None:
        super().__init__(model, OPTIONS | options)
        self.background = background
        if "calibration" in options:  # the model may be optimized more than once
            self.options["calibration"] = readable_again(options["calibration"])
            if background:
                read_ahead(self.options["calibration"])
        self.why_eager = ""
        self._refused, self._changes, self._fills, self._optimizes = Refused(), Counter[str](), 0, False
        self._back: Form | None = None  # what was taken back, until it has served a call
        forks.tell(self)

    @untraced
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]) -> Any:
        self._calls += 1
        unseen = self._unseen
        if unseen:
            if not self._paused_for or self._pauses.hold(args, kwargs):
                self._unseen = unseen - 1
                return eager(*args, **kwargs)
            self._look_again()
        audits = self._audits
        audits.left = left = audits.left - 1
        if left < 0:
            return self._looked_at(args, kwargs, eager)
        fast = self.fast
        # Another thread may give it up between two of these questions.
        watch = self._watch
        unsure = fast is None or watch is None or self._reason(args, kwargs, watch) or watch.changed()
        served: Callable[..., Any] | None = fast
        if unsure or self.fast is not fast:
            served = self._ready(args, kwargs, eager)
        return eager(*args, **kwargs) if served is None else served(*args, **kwargs)

    def forked(self) -> None:
        """No thread is there that may have held the lock."""
        self._turn, self._optimizes = Turn(), False

    def _looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]) -> Any:
        """A call that is timed, and audited where that is affordable."""
        if self._stepped_back:
            return self._by_the_model(args, kwargs, eager)
        self._calls -= 1  # it comes to `__call__` once more
        fast = self.fast
        served = fast is not None and not self._reason(args, kwargs, self._watch) and not self._changed()
        if not served:
            self._audits.left = NEAR
            return self(args, kwargs, eager)
        if self._is_compared(fast, args, kwargs):
            self._calls += 1
            result = self._compared(fast, args, kwargs, eager)
            self._after_eager(args, kwargs)
            return result
        with self._audits.turn() as audited:
            found = self._audit(fast, args, kwargs) if audited else ""
        if found:
            self._differs(found)
        return self._audits.timed(lambda: self(args, kwargs, eager))

    def _by_the_model(self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]) -> Any:
        """A call that the model itself serves, unless its inputs are so much larger that another race may pay."""
        if self._races_again(args, kwargs):
            self._calls -= 1  # it comes to `__call__` once more
            return self(args, kwargs, eager)
        self._unseen, self._paused_for = UNSEEN, ""
        return eager(*args, **kwargs)

    def _races_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether inputs are so much larger than those of the last race that there will be another one."""
        if size_of(args, kwargs) < LARGER * self._size:
            return False
        with self._turn.taken() as mine:
            if mine and self._stepped_back and size_of(args, kwargs) >= LARGER * self._size:  # no other was faster
                self._calls -= 1  # this one is not among those that have been served
                self._drop()
                self._calls += 1
        return mine

    def _audit(self, fast: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if isinstance(fast, Partitioned):
            return fast.difference(args, kwargs)
        executable = fast.serving(args, kwargs)
        return None if executable is None else executable_difference(executable, self.model, Example(args, kwargs))

    def _after_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Dicts that the model has filled in a call of its own do not count if the example is computed as before."""
        fast, watch = self.fast, self._watch
        if not isinstance(fast, Optimized) or not isinstance(watch, Watch) or not watch.changed():
            return
        with self._turn.taken(at_once=True) as mine:
            if mine and self.fast is fast and self._fills < FILLS and watch.has_filled():
                self._fills, call = self._fills + 1, fast.example
                if fast.new_signatures.are_left(args, kwargs) and self._audit(fast, call.args, call.kwargs) == "":
                    watch.take_filled()

    def _differs(self, found: str) -> None:
        """After a difference in an audit: the model is optimized again in its current state."""
        with self._turn.taken():
            self._drop(DIFFERED)
        self._warn(f": an audit found a difference ({found}); the model is optimized again; {LOOK_AT}")

    def _drop(self, change: str = "") -> None:
        """Gives the compiled form up, because of such a change."""
        self._settle()
        self.fast, self._watch, self._unseen, self._aside = None, None, 0, PutAside()
        if change:
            self._changes[change] += 1
        if self._stepped_back:
            self._stepped_back, self._audits = "", Audits(0)

    def _put_aside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives the compiled form up for as long as the model is in another state; one for this state is used again."""
        fast, watch, aside, known = self.fast, self._watch, self._aside, self._aside.take()
        if isinstance(fast, Optimized | Partitioned) and isinstance(watch, Watch):
            self._service.stop()
            aside.put(Form(fast, watch, self._audits, self._service, self._own.settings))
        self._drop(KEEPS_CHANGING)
        self._aside = aside
        self._take_back(known, args, kwargs)

    def _take_back(self, form: Form | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Uses a form again, if there is one for the state that the model has come back to.

        This call is audited, if that is affordable: nobody has looked at the form meanwhile.
        """
        if form is None:
            return
        self._optimizes = True  # the model may call itself
        try:
            found = form.audited(lambda: self._audit(form.fast, args, kwargs))
        finally:
            self._optimizes = False
        if found:
            self._differs(found)
            return
        if isinstance(form.fast, Optimized):  # which counts these itself
            self._in_eager.subtract(form.fast.in_eager)
            self._seconds -= form.fast.new_signatures.seconds
        self._changes[KEEPS_CHANGING] -= 1
        self._own.renew(form.settings)
        self._pauses, self._back = Pauses(), form
        self._audits, self._service, self._watch, self.fast = form.audits, form.service, form.watch, form.fast

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]
    ) -> Callable[..., Any] | None:
        """What serves a call, compiled now if need be; None where it is the model itself."""
        if self.fast is not None and self._changes[RENUMBERED] < CHANGES and self._own.were_renumbered():
            with self._turn.taken() as mine:
                if mine and self.fast is not None:
                    self._drop(RENUMBERED)
                    log.info("torch's number of threads has changed: %s is optimized again", name_of(self.model))
        uncompiled = self.fast is None and not self._optimizes
        reason = self.why_eager or self._reason(args, kwargs, self._watch, uncompiled=uncompiled)
        if reason:
            self._declined(reason)
            return None
        if self._aside and uncompiled:  # what another state is refused for says nothing of one that was compiled
            with self._turn.taken() as mine:
                if mine and self.fast is None:
                    self._take_back(self._aside.take(), args, kwargs)
        reason = self._refused.reason(args, kwargs) if self.fast is None else ""
        if reason:
            self._declined(reason)
            return self._refused.timed(eager, 1 + self._pause(reason, args, kwargs))
        with self._turn.taken() as mine:
            if not mine:  # this thread optimizes another model, and that one may be what the other thread waits for
                self._in_eager[ELSEWHERE] += 1
                return None
            if self._optimizes:  # in this very thread: the model calls itself
                return None
            if self.fast is not None:
                # Asked again: another thread may have compiled it meanwhile, in settings of its own.
                changed = self._changed()
                watch = None if changed else self._watch
                reason = (self._own.trains(self._watch) if changed else "") or self._reason(args, kwargs, watch)
                if reason:
                    self._declined(reason)
                    return None
                if changed:
                    self._put_aside(args, kwargs)
                    what = (
                        "it is optimized again" if self.fast is None else "the form for its present state is used again"
                    )
                    log.info("%s has changed: %s", name_of(self.model), what)
            self.why_eager = next((change for change, times in self._changes.items() if times > CHANGES), "")
            if self.why_eager:
                self._aside = PutAside()
                self._declined(self.why_eager)
                return None
            if self.fast is None:
                # Asked again: what was asked before may have been the model as it was compiled.
                reason = self._reason(args, kwargs, None, uncompiled=True) or self._refused.reason(args, kwargs)
                reason = reason or self._make(Example(args, kwargs))
                if reason:
                    self._declined(reason)
                    return self._refused.served_by(eager)
            back, self._back = self._back, None
            return None if self._stepped_back else back.timed if back and back.fast is self.fast else self.fast

    def _make(self, example: Example) -> str:
        """Compiles the model, or begins to. Returns why it is not compiled for such a call; empty if it is."""
        self._optimizes, self._pauses = True, Pauses()
        try:
            return self._begin() if self.background else self._optimize(example)
        finally:
            self._optimizes = False

    def _optimize(self, example: Example) -> str:
        self._own.renew()
        audits = Audits(self.options.get("audit", SHARE))
        start = time.perf_counter()
        # Soon told, but by calls of the model itself, which read iterators and write what others read.
        may_call = iterator_in(example.args, example.kwargs) is None and not others_run()
        if self._refused.written is not None and may_call:
            outside, _, watch = effects_of(self.model, example, self._refused.written)
            if outside:
                took, why = time.perf_counter() - start, why_eager(outside)
                return self._refused.add(example, why, watch, took, settles=True, effects=True)
        before = Watch(self.model)
        held, why, not_ready = Holdings(before.modules), "", False
        fast: Optimized | Partitioned | InEager | None = None
        log.info("%s is being optimized", name_of(self.model))
        try:
            fast = optimize(self.model, example, **self.options | {"audit": 0})
        except UsageError:
            raise
        except TsoptError as error:
            why, not_ready = "; ".join(filter(None, (error.what, error.where))), isinstance(error, NotReady)
        finally:
            spent = time.perf_counter() - start
            self._seconds += spent
            outcome = "failed" if fast is None else f"{fast.report.winner} wins"
            log.info("%s: optimization took %.1f s: %s", name_of(self.model), spent, outcome)
        if fast is None or isinstance(fast, InEager):
            why = why if fast is None else fast.report.why
            # What makes a model ready may be its own call, as that of a lazy module.
            return self._refused.add(example, why, Watch(self.model), spent, settles=not not_ready)
        fast.unwatched()
        is_one = isinstance(fast, Optimized)
        if isinstance(fast, Optimized):
            fast.new_signatures.refuse, fast.new_signatures.after_eager = self._refuse_effects, self._after_eager
        watch = Watch(self.model, fast.program.state.values() if isinstance(fast, Optimized) else ())
        before.leave_out(watch.written)
        if is_one and (before.was_overwritten() or held.replaced(watch.written)):
            return self._overwritten()
        # A part of a model in parts is the model's own code, whose state nobody knows.
        apart = stand_in(self.model, watch.written, example) if is_one else None
        outside, inside = call_effects(self.model, watch, example, apart, knows_state=is_one)
        if outside and not fast.report.is_eager:
            return self._refused.add(example, why_eager(outside), watch, spent, settles=True, effects=True)
        if is_one and (watch.changed() or held.replaced(watch.written)):
            return self._overwritten()
        self._may_compare &= not inside
        if inside and is_one and not fast.report.is_eager:  # the code between parts is the model's own
            self._say_once(f": {not_changed(inside)}", stacklevel=8)
        self._own.ask(watch.asks)
        reason = NOT_FASTER if fast.report.is_eager else self._loss(fast, watch, example, apart)
        # The form is last: what ends this before, an interrupt for one, leaves none that serves calls unaudited.
        if not self._steps_back(reason, size_of(example.args, example.kwargs)):
            self._audits = audits.warm(lambda: self._audit(fast, example.args, example.kwargs))
        self._watch, self.fast = watch, fast
        return ""

    def _refuse_effects(self, example: Example) -> None:
        """Raises CaptureError for a call of another form that changes what is outside of the model: eager serves it."""
        outside, inside, _ = effects_of(self.model, example, getattr(self._watch, "written", ()))
        if outside:
            reason = why_eager(outside)
            self._say(reason, stacklevel=16)
            raise CaptureError(reason)
        if inside:
            self._may_compare = False
            self._say_once(f": {not_changed(inside)}", stacklevel=15)

    def _overwritten(self) -> str:
        """Drops what was compiled while another thread changed the weights. Returns no reason to refuse later calls."""
        self._in_eager["its weights were changed while it was compiled"] += 1
        self._drop(KEEPS_CHANGING)
        return ""

    def _begin(self) -> str:
        self._own.renew()
        audits = Audits(self.options.get("audit", SHARE))
        made = InBackground(self.model, self.options | {"audit": 0}, self._say, self._why_not, self._pause)
        self._own.ask(made.asks)
        self._audits, self.fast, self._watch = audits, made, made
        return ""

    def _why_not(
        self, made: Executable | None, watch: Watch, example: Example, apart: StandIn | None
    ) -> tuple[str, bool]:
        """Why what another process has compiled, None if eager won, serves no calls; and whether of no size either."""
        fast = self.fast
        if made is None:
            reason = NOT_FASTER
        else:
            outside, inside = call_effects(self.model, watch, example, apart)
            if outside:
                reason = why_eager(outside)
                self._say(reason)
                return reason, True
            if inside:
                self._may_compare = False
                self._say_once(f": {not_changed(inside)}", stacklevel=10)
            reason = self._loss(made, watch, example, apart)
        if not isinstance(fast, InBackground) or fast.has_made_any:
            return reason, False
        if self._steps_back(reason, size_of(example.args, example.kwargs)):
            return reason, False
        # Where a policy keeps it from stepping back, what was made serves although it is slower.
        return "" if made is not None else reason, False

    def _doubt(self) -> None:
        """Before a call of the model itself: in training mode, any module may write statistics that no look notices."""
        watch = self._watch
        if watch is not None and any(training_of(watch.modules)):
            watch.doubt()

    def _declined(self, reason: str) -> None:
        """A call that the model itself serves."""
        self._doubt()
        self._in_eager[reason] += 1
        self._say(reason)
