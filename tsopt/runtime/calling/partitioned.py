"""Partitioned models: TorchDynamo splits a model at graph breaks, and each graph is optimized at its first call.

For models that cannot be captured as one graph. The Python code between graphs is kept, so the result can be run but
not saved.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx, nn

from tsopt.compiler.calls.example import Example, example
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.protect import InEvalMode, modules_of, protected
from tsopt.compiler.quiet import silent
from tsopt.errors import BackendError, BundleError, CaptureError, NotReady, TsoptError
from tsopt.runtime.calling.ambient import Unserved, objection_to
from tsopt.runtime.calling.audit import LOOK_AT, Audits, difference
from tsopt.runtime.calling.model_changes import Weights
from tsopt.runtime.calling.optimized import CHANGED, Optimized
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.racing.contenders import Progress, device_wait
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.race import with_timing
from tsopt.runtime.racing.timing import ColdStart, first_calls
from tsopt.runtime.racing.tournament import measure
from tsopt.runtime.report import EAGER, MODEL, Report, Row

log = logging.getLogger("tsopt")
PARTS = "partitioned"
SCRIPT = "TorchScript, frozen"  # for TorchScript, which TorchDynamo does not trace
KEYS = {PARTS: "parts", SCRIPT: "torchscript"}
# Options of `optimize` for a part, of which a model may have many. In a graph that TorchDynamo has generalized over
# sizes, a capture for each size would cost more than it gains.
PART: dict[str, Any] = {"seconds": 2.0, "on_new_signature": "eager"}
Optimize = Callable[[Callable[..., Any], Example], Optimized]  # a graph and an example of its inputs


class Partitioned:
    """A drop-in for a model with graph breaks: each graph is optimized, the Python code between them is kept.

    Attributes:
        report: the race, the parts, and why the model is not one graph.
        backend: `parts`; `torchscript` for a TorchScript model; `eager` if the model itself is the fastest.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        run: Callable[..., Any],
        report: Report,
        audits: Audits | None = None,
        on_gradients: str = "eager",
    ) -> None:
        self.model, self.report = model, report
        self._unserved = Unserved(model, report.model, on_gradients)
        self._audits = Audits(0) if audits is None or report.winner_key == MODEL else audits
        self._flags = [module.training for module in modules_of(model)]
        eager_wins = report.winner_key == MODEL
        self.backend = "eager" if eager_wins else report.winner_key
        self._run = model if eager_wins else run
        # The Python code between parts reads the current weights, and parts detect new ones; a script keeps its own.
        self._weights = Weights(model) if self.backend == "torchscript" and self._audits.share else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = objection_to(args, kwargs)
        if reason:
            return self._unserved(reason, args, kwargs)
        self._audits.left -= 1
        if self._audits.left < 0:
            return self._looked_at(args, kwargs)
        with torch.no_grad():
            return self._run(*args, **kwargs)

    def _looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is timed, and audited where that is affordable."""
        with self._audits.turn() as audited:
            found = self.difference(args, kwargs) if audited else ""
        if found:
            self._audits.end()
            text = f"{CHANGED.format(self.report.model)}: calls keep using the old ones"
            if self._weights is None or not self._weights.changed():
                self._run, self.backend = self.model, "eager"
                text = (
                    f"{self.report.model} runs in eager mode from now on: "
                    f"an audit found a difference ({found}); {LOOK_AT}"
                )
            self.report = self.report.with_audit(text)
            warnings.warn(f"tsopt: {text}", stacklevel=3)
        return self._audits.timed(lambda: self(*args, **kwargs))

    def difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """How it differs from the model on a call, as `audit.difference` says it."""
        if [module.training for module in modules_of(self.model)] != self._flags:
            return None  # in training mode the model is no reference
        with torch.no_grad():
            return difference(self._run, self.model, Example(args, kwargs), runs_python=True)

    def unwatched(self) -> None:
        """Turns off audits, for a caller that audits it and watches the weights itself."""
        self._audits.end()

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
    optimize: Optimize,
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
        script: the model as TorchScript, to use instead of it.
        because: why it is not one graph, if that was tried.
        on_gradients: what to do for calls that only the model itself can serve.

    Raises:
        CaptureError: TorchDynamo fails on the model as well.
        AccuracyError: the model fails on its example, or nothing about it can be verified.
    """
    graphs: list[Graph] = []
    known: dict[Any, Graph] = {}

    def backend(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        progress(f"part {len(graphs) + 1}")
        graphs.append(Graph(graph, optimize, known))
        return graphs[-1]

    state = [tensor for module in modules_of(model) for tensor in module._buffers.values() if tensor is not None]
    with protected(model), silent("torch._dynamo", "torch._dynamo.convert_frame"):
        title, run = _compiled(model if script is None else script, backend)
        progress(EAGER)
        oracle = Oracle(model, example_input, None, seed=seed, state=state)
        inputs = [expected.call() for expected in oracle.expected[:3]]
        try:
            with torch.no_grad(), protected(model):
                cold = ColdStart.of(first_calls(run, inputs, device_wait(example_input)))
            verdict = oracle.judge(run)
        except Exception as error:  # from TorchDynamo, or from the model under it
            said = (str(error).splitlines() or [""])[0][:200]
            raise CaptureError("TorchDynamo cannot run the model", why=f"{type(error).__name__}: {said}") from error
        rows = [Row(EAGER), Row(title, accuracy=verdict, cold=cold, key=KEYS[title])]
        if not verdict.ok:
            rows[1] = replace(rows[1], status="wrong", reason=verdict.reason)
        else:
            with torch.no_grad():  # as it is called: in inference mode dynamo would trace again
                timings = measure({EAGER: model, title: run}, inputs, seconds=seconds, wait=device_wait(example_input))
            rows = [with_timing(row, timings[row.name], timings[EAGER]) for row in rows]
            # Fresh inputs: what the race measured must not be all that is right.
            verdict = Oracle(model, example_input, None, seed=seed + 1, state=state).judge(run)
            if not verdict.ok:
                rows[1] = replace(rows[1], status="wrong", reason=f"after timing: {verdict.reason}")
    return Partitioned(model, run, _report(model, rows, graphs, because), audits, on_gradients)


def _compiled(model: Any, backend: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """How the model is compiled, and the result. Leaves a mark on the model, which the caller takes away."""
    if isinstance(model, torch.jit.ScriptFunction):
        return SCRIPT, model
    if isinstance(model, torch.jit.ScriptModule) and model.training:
        raise NotReady(
            "the TorchScript model is in training mode", fix="call model.eval() first, or pass eval_mode=True (--eval)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        # Of a copy: what is frozen shares the weights that nothing folds with what it was frozen from.
        return SCRIPT, torch.jit.optimize_for_inference(torch.jit.freeze(copy.deepcopy(model)))
    if isinstance(model, InEvalMode):
        return PARTS, InEvalMode(cast(nn.Module, torch.compile(model.module, backend=backend, dynamic=False)))
    return PARTS, torch.compile(model, backend=backend, dynamic=False)


def _report(model: Any, rows: list[Row], graphs: Sequence[Graph], because: CaptureError | None) -> Report:
    gain, title = rows[1].speedup, rows[1].name
    wins = rows[1].status == "ok" and gain is not None and gain.verdict == "faster"
    distinct = list({id(item.fast or item): item for item in graphs}.values())
    parts = tuple(
        f"part {number}: "
        + (f"{item.fast.report.nodes[1]} op nodes, {item.fast.report.winner} wins" if item.fast else item.refused)
        for number, item in enumerate(distinct, 1)
    )
    count = sum(item.fast is not None for item in distinct)
    rows[1] = replace(rows[1], notes=parts)
    nodes = [item.fast.report.nodes for item in distinct if item.fast]
    why = (
        "capture as one graph was not tried"
        if because is None
        else "; ".join(filter(None, (because.what, because.where)))
    )
    return Report(
        model=getattr(model, "__name__", type(model).__name__),
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


class Graph:
    """One graph of TorchDynamo: optimized at its first call without gradients, otherwise run unchanged.

    Parameters and buffers, which TorchDynamo passes in each call, are treated as constants for as long as they are the
    same tensors and have not been written to.

    Attributes:
        fast: the optimized graph; None before the first call, or if it could not be optimized.
        refused: why it could not be optimized.
    """

    def __init__(self, graph: fx.GraphModule, optimize: Optimize, known: dict[Any, Graph] | None = None) -> None:
        self.graph, self.optimize = graph, optimize
        self._as_it_is = graph.forward  # not the module, which prints what it raises
        self.known = {} if known is None else known  # by what decides about them
        self.fast: Optimized | None = None
        self.refused = ""
        self._places: frozenset[int] = frozenset()  # of parameters and buffers among the arguments
        self._weights: dict[int, tuple[torch.Tensor, int]] = {}
        self._tried = False
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self._as_it_is(*args)
        if not self._tried:
            with self._lock:
                if not self._tried:
                    self._optimize(args)
                    self._tried = True
        if self.fast is None or not self._same_weights(args):
            return self._as_it_is(*args)
        return self.fast(*[value for i, value in enumerate(args) if i not in self._places])

    def _optimize(self, args: Sequence[Any]) -> None:
        weights = {i: value for i, value in enumerate(args) if _is_static(value)}
        values = [value for i, value in enumerate(args) if i not in weights]
        training = any(module.training for module in self.graph.modules() if module is not self.graph)
        if training or not any(isinstance(value, torch.Tensor) for value in values):
            self.refused = "it is in training mode" if training else "nothing to compute"
            return
        key = self._key(values, weights)
        twin = self.known.get(key)
        if twin is not None and twin._same_weights(args):
            self.fast, self._places, self._weights = twin.fast, twin._places, twin._weights
            return
        try:
            found: Any = torch._dynamo.disable(self.optimize)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                self.fast = fast = found(_Bound(self.graph, weights), example(*values))
            fast.unwatched()  # changed weights are detected here, and the graph is run unchanged
        except TsoptError as error:
            log.info("a graph of torch.compile is not optimized: %s", error)
            self.refused = error.what
            return
        written = {id(value) for value in fast.program.state.values()}  # by the graph itself, in each call
        self._places = frozenset(weights)
        self._weights = {i: (value, value._version) for i, value in weights.items() if id(value) not in written}
        self.known[key] = self

    def _key(self, values: Sequence[Any], weights: Mapping[int, torch.Tensor]) -> Any:
        """What decides about a graph: dynamo traces the same one again, for a counter in Python, say."""
        types = [TensorType.of(value) if isinstance(value, torch.Tensor) else repr(value) for value in values]
        own = [(name, id(value)) for name, value in self.graph.state_dict(keep_vars=True).items()]
        return self.graph.code, *types, *own, *((i, id(value)) for i, value in weights.items())

    def _same_weights(self, args: Sequence[Any]) -> bool:
        return all(args[i] is value and value._version == version for i, (value, version) in self._weights.items())


class _Bound(nn.Module):
    """The graph with its weights, called with the rest."""

    def __init__(self, graph: fx.GraphModule, weights: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        graph.training = False  # dynamo's own flag; what the modules of the model did is in the graph
        self.graph = graph
        self.places = tuple(weights)
        for i, value in weights.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(f"weight_{i}", value)
            else:
                self.register_buffer(f"weight_{i}", value)
        self.training = False

    def forward(self, *values: Any) -> Any:
        rest = iter(values)
        count = len(self.places) + len(values)
        return self.graph.forward(
            *[getattr(self, f"weight_{i}") if i in self.places else next(rest) for i in range(count)]
        )


def _is_static(value: Any) -> bool:
    """Whether dynamo passes this tensor because a module owns it."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return False
    return isinstance(value, nn.Parameter) or hasattr(value, "_dynamo_static_input_type")
