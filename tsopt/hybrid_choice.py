"""Which of the two serves the calls of a hybrid: its compiled form, or the model itself where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tsopt.background.in_background import InBackground
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.snapshot import iterator_in
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.outside import kept_outside
from tsopt.compiler.protect import protected
from tsopt.compiler.turns import Turn
from tsopt.hybrid_counts import Counts
from tsopt.runtime.calling.audit import Audits
from tsopt.runtime.calling.eager_calls import EagerCalls
from tsopt.runtime.calling.in_service import InService
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.own_work import LARGER, UNSEEN, loss, size_of
from tsopt.runtime.calling.partitioned import Partitioned
from tsopt.runtime.calling.put_aside import PutAside
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.racing.rehearsal import StandIn


class Choice(Counts):
    """Lets the model itself serve the calls where it is faster, as measured when it is compiled, and in service.

    A base class, because it is asked in calls.
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

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]) -> Any:
        raise NotImplementedError

    def _drop(self, change: str = "") -> None:
        raise NotImplementedError

    def _gives_way(self, fast: Any, call: Example) -> bool:
        """Whether the model itself serves the calls from now on, because real ones have taken less time there."""
        if self._service.audits is not self._audits:
            self._service = InService(self._audits)
        service, watch, iterator = self._service, self._watch, iterator_in(call.args, call.kwargs)
        if isinstance(fast, Partitioned) or not service.is_affordable or iterator is not None or others_run():
            return False
        executable = fast.serving(call.args, call.kwargs)
        if executable is None:
            return False
        with self._turn.taken(at_once=True) as mine:
            if mine and self.fast is fast:
                service.time(self.model, self._served_by(fast, watch), executable, call)
                if service.loss and self._may_step_back:
                    self._settle()
                    self._steps_back(service.loss, service.largest)
                    self._say(self._stepped_back)
        return bool(self._stepped_back)

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

    @property
    def _may_step_back(self) -> bool:
        """Whether no policy refuses calls that the model itself would serve."""
        return "error" not in (self.options.get("on_new_signature"), self.options.get("on_gradients"))

    def _steps_back(self, reason: str, size: int) -> bool:
        """If there is a reason, lets the model itself serve the calls, with next to no work around them.

        Args:
            size: of the inputs that it holds for.
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
        served = self._served_by(fast, watch)
        eager, touched = (self.model, self.model) if apart is None else (apart.called, None)
        among_threads = not isinstance(fast, Partitioned) and others_run()
        with kept_outside(self.model), protected(touched, written=watch.written, among_threads=among_threads):
            return loss(eager, served, InputSet("example", example).clone())

    def _served_by(self, fast: Any, watch: Any) -> Callable[..., Any]:
        """A call with all that is done around it."""

        def served(*args: Any, **kwargs: Any) -> Any:
            return None if self._reason(args, kwargs, watch) or watch.changed() else fast(*args, **kwargs)

        return served
