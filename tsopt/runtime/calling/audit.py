"""Audits: now and then a real call is repeated in eager and compared, to find what no check at the call can see.

The first audit is among the first FIRST calls. From then on there is another as soon as the total time of audits is at
most a given share of the serving time.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.narrow_floats import widened
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.capture.shadow import shadow_of
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.outside import kept_outside
from tsopt.compiler.protect import kept, modules_of
from tsopt.compiler.sizes.specialize import sizes_in, specialize
from tsopt.errors import TsoptError, UsageError
from tsopt.runtime import forks
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.accuracy import LIMITS, Oracle
from tsopt.runtime.checking.compare import compare
from tsopt.runtime.racing.rehearsal import rehearsal_of, stand_in

log = logging.getLogger("tsopt")
SHARE = 0.01  # of the time served
FIRST = 100  # calls, of which the first audit is one; not of the first half, which often only warm things up
NEAR, FAR = 8, 1 << 9  # calls between two that are timed, at least and at most
NEVER = float("inf")
AUDITED = "audited"
EAGER_RAISES = "eager raises "
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
LOOK_AT = (
    "the model may have changed since it was compiled (attributes, globals, hooks, weights written through numpy or "
    ".data); if not, the backend is wrong for these inputs"
)


class Audits:
    """Decides when calls are audited. The caller counts `left` down and takes a `turn` below zero.

    Args:
        share: of the time served that audits may take; 0 for none.
        clock: seconds.
        choose: an integer from 0 to below its argument; audits are at random calls, so that nothing hides between.

    Attributes:
        left: calls until one is looked at. Counted down without a lock: what threads lose in between does not matter.
        count: audits that were made.
        served, spent: seconds of calls, estimated from those that were timed; seconds of audits.
        took: seconds of the last call that was timed.
    """

    __slots__ = (
        *("_choose", "_clock", "_expected", "_lock", "_looked", "_since"),
        *("count", "left", "served", "share", "spent", "took", "__weakref__"),
    )

    def __init__(
        self,
        share: float = SHARE,
        *,
        clock: Callable[[], float] = time.perf_counter,
        choose: Callable[[int], int] | None = None,
    ) -> None:
        self.share = check_share(share)
        # A separate generator: the one of the process belongs to the user.
        self._clock, self._choose = clock, choose or random.Random().randrange
        self._lock, self._looked = threading.Lock(), self._clock()
        self.count, self.served, self.spent, self.took, self._expected, self._since = 0, 0.0, 0.0, 0.0, 0.0, 0
        self.left: float = NEVER
        if share:
            self._wait(FIRST // 2 + self._choose(FIRST // 2))
        forks.tell(self)

    def forked(self) -> None:
        """No thread is there that may have had a turn."""
        self._lock = threading.Lock()
        if self.share:
            self._wait(NEAR)

    def _wait(self, calls: int) -> None:
        self._since = calls + 1
        self.left = calls if self.share else NEVER

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Whether this call is to be audited. The block is the audit; nobody else has a turn meanwhile."""
        lock = self._lock  # a fork meanwhile gets another one
        if not lock.acquire(blocking=False):
            self.left = 1
            yield False
            return
        try:
            self.left = NEVER
            if self.count and self.spent + self._expected > self.share * self.served:
                yield False
                return
            start = self._clock()
            try:
                yield True
            finally:
                took = self._clock() - start
                self.count += 1
                self.spent += took
                self._expected = min(took, self._expected or took)  # the first one is cold
        finally:
            self.left = 1 if self.share else NEVER
            lock.release()

    def timed(self, call: Callable[[], Any]) -> Any:
        """Makes the call; its time stands for those since the last one that was timed."""
        lock = self._lock  # a fork meanwhile gets another one
        if not lock.acquire(blocking=False):
            return call()
        try:
            self.left = NEVER
            start = self._clock()
            result = call()
            end = self._clock()
            self.took = took = max(end - start, 1e-9)
            # No more than has passed: one call that had to wait for a core does not stand for hundreds.
            self.served += min(took * self._since, max(end - self._looked, took))
            self._looked = end
            missing = (self.spent + self._expected) / self.share - self.served if self.share else NEVER
            calls = int(min(max(missing / took / 2, NEAR), FAR))
            self._wait(self._choose(2 * calls))
            return result
        except BaseException:
            self._wait(NEAR)
            raise
        finally:
            lock.release()

    def resume(self) -> None:
        """Calls that something else has served meanwhile do not count."""
        self._since, self._looked = 1, self._clock()

    def warm(self, audit: Callable[[], object]) -> Audits:
        """Makes an audit that does not count: the first one is many times as slow as those to come."""
        if self.share:
            audit()
        return self

    def end(self) -> None:
        """No more audits."""
        self.share, self.left = 0.0, NEVER


def check_share(share: float) -> float:
    """Raises UsageError for what is not a share."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise UsageError(
            f"audit must be a number from 0 to 1, got {share!r}",
            fix="pass the share of call time that audits may take, for example 0.01; 0 turns them off",
        )
    return float(share)


def difference(
    candidate: Callable[..., Any],
    model: Callable[..., Any],
    call: Example,
    *,
    state: Sequence[torch.Tensor] = (),
    reference: Program | None = None,
    limit: float | None = None,
    runs_python: bool = False,
    draws: bool = True,
    traceless: bool = False,
) -> str | None:
    """How a candidate differs from the model on a call; "" if it does not, None if that cannot be decided.

    Both are called on copies of the inputs, from the same random state; what they change is restored.

    Args:
        state: the tensors that calls write besides their inputs.
        reference: the captured program, whose float64 values tell rounding from errors.
        limit: of the relative error of each output, for a candidate in a lower precision.
        runs_python: the candidate runs Python code of the model, which may change its modules.
        draws: calls may draw random numbers. If they do not, the generators are not restored while other threads run.
        traceless: this call changes nothing of the model. What other threads change meanwhile is left alone.

    Never raises an Exception: the caller has not asked for an audit.
    """
    try:
        leaves, structure = flatten((call.args, call.kwargs))
        if any(leaf.is_floating_point() and not bool(widened(leaf).isfinite().all()) for leaf in leaves):
            return None  # differences on NaN and infinities are only notes
        modules = [] if traceless else modules_of(model)
        buffers = [tensor for module in modules for tensor in module._buffers.values() if tensor is not None]
        written = list({id(tensor): tensor for tensor in (*buffers, *state)}.values())
        # A buffer that the program does not write may have been written by another thread, which must not be undone.
        among_threads = others_run()
        restored = state if among_threads else written

        def answer(called: Callable[..., Any], modules: Sequence[nn.Module]) -> _Answer:
            args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in leaves])
            with kept(modules, restored, among_threads=among_threads, draws=draws):
                return _Answer.of(called, args, kwargs, restored)

        versions = [*map(_version, buffers)] if among_threads else []
        theirs = answer(model, modules)
        own = {id(tensor) for tensor in state}
        for buffer, version in zip(buffers, versions, strict=False):
            if id(buffer) not in own and _version(buffer) != version:
                return "the model's state differs from eager after the call: a buffer is written that was not before"
        mine = answer(candidate, modules if runs_python else ())
        found = theirs.other_than(mine, limit)
        if found and not among_threads and others_run():
            return None  # a thread that has begun meanwhile may have written what differs
        if found and limit is None and reference is not None and not theirs.error and not mine.error:
            reference = specialize(reference, sizes_in(reference.signature, call))
            beside_others = among_threads and not draws
            verdict = Oracle(model, call, reference, only=AUDITED, beside_others=beside_others).judge(candidate)
            return "" if verdict.ok else verdict.reason.replace(f" on the {AUDITED} input", "")
        return found
    except Exception as error:  # whatever the inputs are that cannot be copied or compared
        log.info("a call could not be audited: %r", error)
        return None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a call returned and left behind, in copies; or that it raised."""

    leaves: tuple[torch.Tensor, ...] = ()
    form: Any = None  # of what it returned and has put into objects of the call
    paths: dict[int, str] = field(default_factory=dict)
    written: tuple[torch.Tensor, ...] = ()
    inputs: int = 0  # of those that are written, how many are inputs
    error: str = ""

    @classmethod
    def of(cls, called: Callable[..., Any], args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> _Answer:
        given, _ = flatten((args, kwargs))
        try:
            leaves, structure, effects = outcome_of(called, args, kwargs)
        except (TsoptError, *OUT_OF_MEMORY):
            raise  # it says nothing of the values
        except Exception as error:  # of the model, or of the engine
            return cls(error=f"{type(error).__name__}: {str(error)[:200]}")
        return cls(
            tuple(leaf.detach().clone() for leaf in leaves),
            (structure, effects),
            dict(structure.paths()),
            tuple(tensor.detach().clone() for tensor in (*given, *written)),
            len(given),
        )

    def other_than(self, mine: _Answer, limit: float | None) -> str:
        """How a candidate's answer to the same call differs from this one, which is eager's."""
        if self.error or mine.error:
            told = f"{EAGER_RAISES}{self.error}" if self.error else f"it raises {mine.error}, eager does not"
            return "" if self.error and mine.error else told
        if len(self.leaves) != len(mine.leaves) or self.form != mine.form:
            return "the structure of its outputs, or of objects that it changed, differs from eager"
        for position, (value, reference) in enumerate(zip(mine.leaves, self.leaves, strict=True)):
            found = compare(value, reference, limit=limit)
            if not found.ok:
                return f"{self.paths.get(position) or 'output'}: {found.reason}"
        for position, (value, reference) in enumerate(zip(mine.written, self.written, strict=True)):
            found = compare(value, reference, limit=limit)
            if not found.ok:
                what = "an input" if position < self.inputs else "the model's state"
                return f"{what} differs from eager after the call: {found.reason}"
        return ""


def executable_difference(executable: Executable, model: Callable[..., Any], call: Example) -> str | None:
    """`difference` for an executable.

    Other threads share the generators of random numbers, and what calls write. Beside them, calls that draw are not
    compared, and copies are written instead.
    """
    draws, beside_others = may_draw(executable), others_run()
    if not beside_others or not (draws or executable.state):
        return _difference(executable, model, call, draws)
    apart = None if draws else _apart(executable, model)
    found = None if apart is None else _difference(*apart, call, draws)
    # Code may reach the model past its copy: a difference between the two would be one as well. The model itself is not
    # called: what it writes would have to be put back, and with it what others have written meanwhile.
    is_sure = not found or stand_in(model, executable.state, call, draws=False) is not None
    return found if is_sure else None


def _difference(executable: Executable, model: Callable[..., Any], call: Example, draws: bool) -> str | None:
    limit = executable.tolerance or LIMITS.get(executable.precision)
    state, reference = executable.state, executable.reference
    with kept_outside(model):
        return difference(executable, model, call, state=state, reference=reference, limit=limit, draws=draws)


def may_draw(executable: Executable) -> bool:
    """Whether calls of its model may draw random numbers, as far as the captured program says."""
    if executable.draws is None and executable.reference is not None:
        executable.draws = any(map(ops.draws, executable.reference.calls()))
    return executable.draws is not False


def _apart(executable: Executable, model: Callable[..., Any]) -> tuple[Executable, Callable[..., Any]] | None:
    """An executable and a copy of its model that write copies of its state; None where these cannot be made."""
    rehearsal = rehearsal_of(model, executable.signature, shadow_of(model, written=executable.state))
    made = executable.called_as(executable.signature)
    made.state = [*map(rehearsal.twin, executable.state)]
    made.reference = executable.reference and rehearsal.program(executable.reference)
    shared = any(twin is tensor for twin, tensor in zip(made.state, executable.state, strict=True))
    return None if shared else (made, rehearsal.model)
