"""Which of the two serves the calls of a hybrid: its compiled form, or the model itself where that is faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tsopt.background.in_background import InBackground
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.snapshot import iterator_in
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.outside import kept_outside
from tsopt.compiler.protect import protected
from tsopt.compiler.turns import Turn
from tsopt.hybrid_counts import Counts
from tsopt.runtime.calling.audit import NEVER, Audits, may_draw
from tsopt.runtime.calling.eager_calls import EagerCalls
from tsopt.runtime.calling.in_service import InService
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.own_work import loss, size_of
from tsopt.runtime.calling.partitioned import Partitioned
from tsopt.runtime.calling.put_aside import PutAside
from tsopt.runtime.calling.served import COMPARED
from tsopt.runtime.checking.accuracy import LIMITS
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.racing.rehearsal import StandIn


class Choice(Counts):
    """Lets the model itself serve the calls where it is faster, as measured when it is compiled, and in service.

    A base class of what compiles the model: both ask for the same form, and for its audits, in each call.
    """

    def __init__(self, model: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(model)
        self.options = options
        self._audits = Audits(0)
        self._service = InService(self._audits)
        self._watch: Watch | InBackground | None = None
        self._own = EagerCalls(model, follows_threads=options.get("threads") is None)
        self._reason = self._own.reason  # asked on every call
        self._turn, self._aside, self._size = Turn(), PutAside(), 0
        self._may_compare = True  # whether calls of the model itself change nothing of it

    def _changed(self) -> bool:
        watch = self._watch  # read once: another thread may drop it
        return watch is not None and watch.changed()

    def _is_compared(self, fast: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is one of those that each form serves in its turn, to compare them."""
        if self._service.audits is not self._audits:
            self._service = InService(self._audits)
        service = self._service
        if not service.is_on and not service.begins(lambda: _gain(fast)):
            return False
        may = self._may_compare and self._may_step_back and not others_run() and iterator_in(args, kwargs) is None
        if may and self._is_comparable(fast, args, kwargs):
            return True
        service.stop()
        return False

    def _is_comparable(self, fast: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the compiled form serves a call, and the model may serve it instead. On a GPU calls end too early."""
        if isinstance(fast, Partitioned):
            held = self._watch.tensors if isinstance(self._watch, Watch) else ()
            return fast.in_full_precision and fast.leaves_no_trace and not is_on_gpu(Example((args, held), kwargs))
        executable = fast.serving(args, kwargs)
        if executable is None or executable.tolerance is not None or executable.precision in LIMITS:
            return False
        return not may_draw(executable) and all(item.type.device == "cpu" for item in executable.signature.inputs)

    def _compared(self, fast: Any, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]) -> Any:
        """Serves a call of a round, and lets eager serve the next ones if the round has settled that."""
        service, audits, size = self._service, self._audits, size_of(args, kwargs)
        is_eagers = service.is_eagers_turn
        try:
            audits.left = NEVER  # the model may call itself
            if is_eagers:
                self._in_eager[COMPARED] += 1
            result = service.serve(lambda: (eager if is_eagers else fast)(*args, **kwargs), size)
        finally:
            audits.resume()
            audits.left = 0  # the next call is looked at
        if is_eagers:
            self._may_compare &= not self._changed()  # else each round would have something compiled again
        if not service.is_on and service.loss:
            with self._turn.taken(at_once=True) as mine:
                if mine and self.fast is fast:
                    self._settle()
                    self._steps_back(service.loss, service.largest)
                    self._say(self._stepped_back)
        return result

    @property
    def _may_step_back(self) -> bool:
        """Whether no policy refuses calls that the model itself would serve."""
        return "error" not in (self.options.get("on_new_signature"), self.options.get("on_gradients"))

    def _steps_back(self, reason: str, size: int) -> bool:
        """If there is a reason, lets the model itself serve the calls, with next to no work around them.

        Args:
            size: the number of elements of the inputs that it is known for.
        """
        if not reason or not self._may_step_back:
            return False
        self._stepped_back, self._size = reason, max(1, size)
        self._aside = PutAside()  # nobody asks any more which state the model is in
        self._audits = Audits(0)
        self._audits.left = -1  # each call that is not left to the model unseen is looked at
        return True

    def _loss(self, fast: Callable[..., Any], watch: Watch, example: Example, apart: StandIn | None) -> str:
        """Why the model itself is faster than the compiled form with what is done around a call; empty if it is not."""

        def served(*args: Any, **kwargs: Any) -> Any:
            return None if self._reason(args, kwargs, watch) or watch.changed() else fast(*args, **kwargs)

        eager, touched = (self.model, self.model) if apart is None else (apart.called, None)
        among_threads = not isinstance(fast, Partitioned) and others_run()
        with kept_outside(self.model), protected(touched, written=watch.written, among_threads=among_threads):
            return loss(eager, served, InputSet("example", example).clone())


def _gain(fast: Any) -> float:
    """How many times as fast as eager a compiled form was in its race; the most of several, which limits the cost."""
    reports = fast.reports if isinstance(fast, InBackground) else [fast.report]
    return max((report.winning.gain for report in reports), default=math.inf)
