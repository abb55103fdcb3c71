"""Partitioned models: TorchDynamo splits a model at graph breaks, and each graph is optimized at its first call.

For models that cannot be captured as one graph. The Python code between graphs is kept, so the result can be run but
not saved.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.snapshot import iterator_in
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.capture.names import name_of
from tsopt.compiler.capture.shadow import shadow_of
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.outside import kept_outside
from tsopt.compiler.protect import InEvalMode, is_untouched, modules_of, protected, training_of
from tsopt.compiler.quiet import silent
from tsopt.compiler.random_state import RandomState
from tsopt.compiler.script_state import attributes_written
from tsopt.errors import BackendError, BundleError, CaptureError, NotReady, summary_of
from tsopt.runtime.calling import dynamo_regions
from tsopt.runtime.calling.ambient import Unserved, objection_to
from tsopt.runtime.calling.audit import LOOK_AT, Audits, difference
from tsopt.runtime.calling.drop_in import DropIn
from tsopt.runtime.calling.graph_parts import Graph, as_lines
from tsopt.runtime.calling.optimized import CHANGED
from tsopt.runtime.calling.own_mode import OwnMode
from tsopt.runtime.calling.parts_in_turn import Lease, OptimizePart
from tsopt.runtime.calling.parts_judged import judged
from tsopt.runtime.calling.weights import Weights
from tsopt.runtime.calling.written_state import state_of
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.checking.judge import Judge
from tsopt.runtime.racing.contenders import Progress, device_wait
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.outcomes import warn
from tsopt.runtime.racing.race import with_timing
from tsopt.runtime.racing.row import EAGER, IN_PARTS, MODEL, Row
from tsopt.runtime.racing.timing import ColdStart, first_calls, once_warm, rest, seconds_of, seconds_of_calls
from tsopt.runtime.racing.tournament import measure
from tsopt.runtime.report import Report

log = logging.getLogger("tsopt")
PARTS = "partitioned"
SCRIPT = "TorchScript, frozen"  # for TorchScript, which TorchDynamo does not trace
KEYS = {PARTS: IN_PARTS, SCRIPT: "torchscript"}  # as options `frontend`, which lead there, too
# Options of `optimize` for a part, of which a model may have many. In a graph that TorchDynamo has generalized over
# sizes, a capture for each size would cost more than it gains.
PART: dict[str, Any] = {"seconds": 2.0, "on_new_signature": "eager"}

NO_GRAPHS = (
    "TorchDynamo compiles none of its code; if it has compiled many models of this class, in all of the process, "
    "torch._dynamo.reset() lets it start again"
)


class Partitioned(DropIn):
    """A drop-in for a model with graph breaks: each graph is optimized, the Python code between them is kept.

    Attributes:
        report: the race, the parts, and why the model is not one graph.
        backend: `parts`; `torchscript` for a TorchScript model; `eager` if the model itself is the fastest.
        leaves_no_trace: a call of the model on its example changes nothing of it and draws no random numbers.
        in_full_precision: no part may be in a lower precision.
    """

    in_full_precision = True

    def __init__(
        self,
        model: Callable[..., Any],
        run: Callable[..., Any],
        report: Report,
        audits: Audits | None = None,
        on_gradients: str = "eager",
        lease: Lease | None = None,
        *,
        leaves_no_trace: bool = False,
    ) -> None:
        self.model, self.report, self.leaves_no_trace = model, report, leaves_no_trace
        self._lease = None if report.winner_key == MODEL else lease
        self._unserved = Unserved(model, report.model, on_gradients)
        self._audits = Audits(0) if audits is None or report.winner_key == MODEL else audits
        self._mode, self._is_inside = OwnMode(model), False
        eager_wins = report.winner_key == MODEL
        self.backend = "eager" if eager_wins else report.winner_key
        self._run = model if eager_wins else run
        # The Python code between parts reads the current weights, and parts detect new ones; a script keeps its own.
        self._weights = Weights(model) if self.backend == "torchscript" and self._audits.share else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = objection_to(args, kwargs)
        if reason:
            return self._unserved(reason, args, kwargs)
        self._mode.look()
        if iterator_in(args, kwargs) is not None:  # TorchDynamo may read it while it traces
            with self._modes():
                return self._mode.as_optimized(self.model)(*args, **kwargs)
        self._audits.left -= 1
        if self._audits.left < 0:
            return self._looked_at(args, kwargs)
        versions = _versions(args, kwargs)
        try:
            with self._modes():
                return self._mode.as_optimized(self._run)(*args, **kwargs)
        except RuntimeError as error:
            may_call_again = self.leaves_no_trace and versions == _versions(args, kwargs)
            if not may_call_again or not _is_of_dynamo(error):
                raise
            refused = summary_of(error)
        with self._modes():  # it may raise as well, which then is an error of the model, and says more
            result = self._mode.as_optimized(self.model)(*args, **kwargs)
        self._retire(f"TorchDynamo fails on a call that the model serves ({refused})")
        return result

    def _modes(self) -> AbstractContextManager[Any]:
        """What a call runs in: the Python code between the parts may differentiate, as it does in eager mode."""
        return contextlib.nullcontext() if self._is_inside else torch.no_grad()

    def _looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is timed, and audited where that is affordable."""
        with self._audits.turn() as audited:
            found = self.difference(args, kwargs) if audited else ""
        if found:
            if self._weights is None or not self._weights.changed():
                self._retire(f"an audit found a difference ({found}); {LOOK_AT}")
            else:
                self._audits.end()
                self._say(f"{CHANGED.format(self.report.model)}: calls keep using the old ones")
        return self._audits.timed(lambda: self(*args, **kwargs))

    def _retire(self, why: str) -> None:
        self._audits.end()
        self._run, self.backend, self._lease = self.model, "eager", None
        self._say(f"{self.report.model} runs in eager mode from now on: {why}")

    def _say(self, text: str) -> None:
        self.report = self.report.with_audit(text)
        warn(f"tsopt: {text}", UserWarning)

    def difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """How it differs from the model on a call, as `audit.difference` says it."""
        if not self._mode.holds():
            return None  # in training mode the model is no reference
        if iterator_in(args, kwargs) is not None:
            return None  # the first of the two calls would consume it
        draws, call, beside_others = not self.leaves_no_trace, Example(args, kwargs), others_run()
        with torch.no_grad(), kept_outside(self.model):
            if beside_others and (draws or not _copy_leaves_no_trace(self.model, call)):
                return None  # nobody knows what to put back, and what is theirs
            known: dict[str, Any] = {"state": () if beside_others else state_of(self.model), "traceless": beside_others}
            return difference(self._run, self.model, call, runs_python=True, draws=draws, **known)

    def unwatched(self) -> None:
        """Turns off audits, for a caller that audits it and watches the weights itself. Calls run in its modes."""
        self._audits.end()
        self._is_inside = True

    def save(self, path: str | Path) -> Path:
        """Raises BundleError: the Python code between the parts cannot be saved."""
        raise BundleError(
            "a partitioned model cannot be saved",
            where=str(path),
            why=self.report.frontend,
            fix="remove the graph breaks, so that the model is one graph",
        )

    def profile(self) -> Any:
        """Raises BackendError: layers cannot be timed without a program."""
        raise BackendError("a partitioned model cannot be profiled", why=self.report.frontend)

    def verified(self, backend: str, **options: Any) -> Any:
        """Raises BackendError: there is no program to compile."""
        raise BackendError(f"a partitioned model cannot be compiled with {backend}", why=self.report.frontend)

    def __repr__(self) -> str:
        return f"<tsopt.Partitioned {self.report.model} on {self.backend}, {self.report.why}>"


def optimize_partitioned(
    model: Callable[..., Any],
    example_input: Example,
    optimize: OptimizePart,
    *,
    script: Any = None,
    because: CaptureError | None,
    seconds: float,
    seed: int,
    audits: Audits | None = None,
    progress: Progress,
    on_gradients: str = "eager",
) -> Partitioned:
    """Compiles a model with TorchDynamo, each graph with `optimize`, verifies it and races it against eager.

    A TorchScript model is optimized by TorchScript instead.

    Args:
        optimize: see OptimizePart.
        script: the model as TorchScript, to use instead of it.
        because: why it is not one graph, if that was tried.
        on_gradients: what to do for calls that only the model itself can serve.

    Raises:
        CaptureError: TorchDynamo fails on the model as well.
        AccuracyError: the model fails on its example, or nothing about it can be verified.
    """
    wait = device_wait(example_input)
    lease = Lease(optimize, progress, wait)
    parts = lease.parts
    state = state_of(model)
    with protected(model, written=state), silent("torch._dynamo", "torch._dynamo.convert_frame"):
        dynamo_regions.forget_the_ended()
        title, run = _compiled(model if script is None else script, parts.backend)
        parts.region = dynamo_regions.region_of(run)
        progress(EAGER)
        oracle = Oracle(model, example_input, None, seed=seed, state=state)
        inputs = Judge(oracle).inputs
        try:
            with torch.no_grad(), protected(model):
                (traced,) = seconds_of_calls(run, inputs[:1], 1, wait=wait)
                call_seconds = oracle.eager.call_seconds if oracle.eager.takes_long else None
                parts.weigh(lambda: seconds_of_calls(run, inputs[:1], 1, wait=wait)[0], call_seconds)
            verdict, spent = judged(title, run, inputs[0], parts, oracle, model, progress), [traced]
            leaves_no_trace = verdict.ok and _leaves_no_trace(model, inputs[0], state)
            known: dict[str, float] = {}
            if verdict.ok:  # otherwise nobody asks how long it takes
                progress("first calls")
                with torch.no_grad(), protected(model):
                    spent += first_calls(run, inputs, wait)
                # Both have been called several times: in a warm-up, each call of a detector takes seconds.
                with torch.no_grad():
                    known[EAGER] = call_seconds or seconds_of(model, inputs[:1], wait)
                    rest()
                    known[title] = once_warm(spent, run, inputs[:1], wait)
        except Exception as error:  # from TorchDynamo, or from the model under it
            raise CaptureError("TorchDynamo cannot run the model", why=summary_of(error)) from error
        rows = [Row(EAGER), Row(title, accuracy=verdict, cold=ColdStart.of(spent), key=KEYS[title])]
        if not verdict.ok:
            rows[1] = replace(rows[1], status="wrong", reason=verdict.reason)
        else:
            with torch.no_grad():  # as it is called: in inference mode dynamo would trace again
                timings = measure(
                    *({EAGER: model, title: run}, inputs),
                    seconds=seconds,
                    wait=wait,
                    known=known,
                    until_decided=True,
                    progress=lambda text: progress(f"time: {text}"),
                )
            rows = [with_timing(row, timings[row.name], timings[EAGER]) for row in rows]
            progress(f"verify {title}")  # on fresh inputs: what the race measured must not be all that is right
            known_before = oracle if leaves_no_trace else None
            verdict = Oracle(model, example_input, None, seed=seed + 1, state=state, known=known_before).judge(run)
            if not verdict.ok:
                rows[1] = replace(rows[1], status="wrong", reason=f"after timing: {verdict.reason}")
    report = _report(model, rows, parts.graphs, because)
    return Partitioned(model, run, report, audits, on_gradients, lease, leaves_no_trace=leaves_no_trace)


def _leaves_no_trace(model: Callable[..., Any], example: Example, state: Sequence[torch.Tensor] = ()) -> bool:
    """Whether a call changes no attribute, no buffer and none of these tensors, and draws no random numbers."""
    call, before = InputSet("example", example).clone(), RandomState.now()
    return is_untouched(model, lambda: model(*call.args, **call.kwargs), state) and before.is_current()


def _copy_leaves_no_trace(model: Callable[..., Any], example: Example) -> bool:
    """The same, of a call of a shadow copy: a call that takes another branch than the example may do more.

    Other threads do not call the copy. Of what cannot be copied, such as TorchScript, the example has to tell.
    """
    shadow = shadow_of(model)
    if shadow is None and modules_of(model):
        return True
    try:
        return _leaves_no_trace(model if shadow is None else shadow.called, example)
    except Exception as error:  # of the model: the call itself will raise it
        log.info("a call could not be audited: %r", error)
        return False


def _compiled(model: Any, backend: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """How the model is compiled, and the result. Leaves a mark on the model, which the caller takes away."""
    if isinstance(model, torch.jit.ScriptFunction):
        return SCRIPT, model
    if isinstance(model, torch.jit.ScriptModule) and attributes_written(model):
        raise CaptureError(
            "TorchScript's own optimizations cannot be applied",
            why="they run on a copy of the module, which would have attributes of its own: "
            f"{', '.join(map(str, attributes_written(model)))}",
        )
    if isinstance(model, torch.jit.ScriptModule) and any(training_of([model])):
        raise NotReady(
            "the TorchScript model is in training mode", fix="call model.eval() first, or pass eval_mode=True (--eval)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        # Of a copy: what is frozen shares the weights that nothing folds with what it was frozen from.
        return SCRIPT, torch.jit.optimize_for_inference(torch.jit.freeze(copy.deepcopy(model)))
    if isinstance(model, InEvalMode):
        return PARTS, InEvalMode(cast(nn.Module, _by_dynamo(model.module, backend)))
    return PARTS, _by_dynamo(model, backend)


def _by_dynamo(model: Any, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled apart from other models of its class, of which TorchDynamo would serve eight and no more."""
    apart: dict[str, Any] = (
        {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
    )
    return torch.compile(model, backend=backend, dynamic=False, **apart)


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """How often each tensor of a call has been written to."""
    leaves, _ = flatten((args, kwargs))
    return [leaf._version for leaf in leaves if not leaf.is_inference()]


def _is_of_dynamo(error: RuntimeError) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def _report(model: Any, rows: list[Row], graphs: Sequence[Graph], because: CaptureError | None) -> Report:
    gain, title = rows[1].speedup, rows[1].name
    wins = rows[1].status == "ok" and gain is not None and gain.verdict == "faster"
    distinct = list({id(item.fast or item): item for item in graphs}.values())
    count = sum(item.fast is not None for item in distinct)
    notes = as_lines(distinct) if distinct or title == SCRIPT else [NO_GRAPHS]
    rows[1] = replace(rows[1], notes=tuple(notes))
    nodes = [fast.report.nodes for item in distinct for fast in item.every_fast]
    said = () if because is None else (because.what, because.where)
    why = "; ".join(filter(None, said)) or "capture as one graph was not tried"
    return Report(
        model=name_of(model),
        rows=tuple(rows),
        winner_key=rows[1].key if wins else MODEL,
        why=f"{gain} as fast as eager" if wins else f"{title} is not significantly faster",
        nodes=(sum(n[0] for n in nodes), sum(n[1] for n in nodes)),
        environment=environment(),
        numerics="ROUNDING",
        frontend=(
            f"as TorchScript, with its own optimizations: {why}"
            if title == SCRIPT
            else f"partitioned, {count} of {len(distinct)} parts optimized, the Python code between them is kept: {why}"
        ),
    )
