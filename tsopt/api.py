"""The one call. Wires capture, passes and the race together; owns no machinery."""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.export import ExportedProgram

from tsopt.compiler.calls.example import Example, as_examples
from tsopt.compiler.capture import frontends
from tsopt.compiler.capture.capture import capture_apart, name_of
from tsopt.compiler.capture.explain import failure_of_the_model
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.graph.liveness import peak_bytes
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.precisions import FP32
from tsopt.compiler.protect import InEvalMode, training_flags
from tsopt.compiler.rewriting.pipeline import Limits, Pass, PassRecord, Repeat, run
from tsopt.compiler.rewriting.rewrite import Rule
from tsopt.compiler.sizes.generalize import NotGeneral, through
from tsopt.compiler.sizes.specialize import at
from tsopt.errors import AccuracyError, CaptureError, NoGain, NotOneGraph, NotReady, TsoptError, UsageError
from tsopt.passes import STANDARD
from tsopt.passes.precision import in_precision
from tsopt.runtime.backends.backend import Backend, get_backend
from tsopt.runtime.backends.backend import compile as compile_by
from tsopt.runtime.backends.candidate import AUTO, Candidate, candidates_for
from tsopt.runtime.backends.table import PLAIN
from tsopt.runtime.calling.ambient import POLICIES as ON_GRADIENTS
from tsopt.runtime.calling.audit import SHARE, Audits, check_share, executable_difference
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.fallback import InEager, reason_of
from tsopt.runtime.calling.optimized import POLICIES, Optimized
from tsopt.runtime.calling.parts import PART, InParts, optimize_in_parts
from tsopt.runtime.calling.watch import Weights
from tsopt.runtime.checking.debug import Debugged
from tsopt.runtime.checking.debug import debug as run_debug
from tsopt.runtime.checking.held_out import Sized, settled, sizes_in
from tsopt.runtime.racing.endings import warn
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.isolation import Workshop, is_on_cpu
from tsopt.runtime.racing.race import race
from tsopt.runtime.racing.recall import race_or_recall
from tsopt.runtime.racing.rehearsal import Rehearsal, rehearsal_of
from tsopt.runtime.report import Report

log = logging.getLogger("tsopt")
FRONTENDS = ("auto", "one-graph", *frontends.READERS, "parts")
NEVER_IN_PARTS = ("one-graph", "export", "strict", "fx")
LEVELS = {0: None, 1: Numerics.EXACT, 2: Numerics.ROUNDING, 3: Numerics.LOSSY}
ONE_BY_ONE = "none is dynamic: dynamo traces a model in parts again for each size"
SHORT_RACE = 1.0  # seconds of timing for a form that turns up later


def optimize(
    model: Callable[..., Any],
    example_input: Any,
    *,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    level: int = 2,
    backends: Sequence[str] | Literal["all"] | None = None,
    precision: str | None = None,
    frontend: str = "auto",
    passes: Iterable[Pass | Repeat] = STANDARD,
    without: Iterable[str] = (),
    threads: int | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    eval_mode: bool = False,
    allow_nan: bool = False,
    on_new_signature: str = "capture",
    on_gradients: str = "eager",
    isolate: bool = True,
    budget: float | None = None,
    cache: bool = True,
    check_indices: bool = False,
    strict_specials: bool = False,
    share_weights: bool = False,
    audit: float = SHARE,
    progress: Callable[[str], None] | None = None,
) -> Optimized | InParts | InEager:
    """Makes the fastest verified form of a model that this machine can run.

    Args:
        model: an nn.Module, a function of tensors or an ExportedProgram. Left as it was.
        example_input: a tensor; a tuple = positional arguments; a dict = keyword arguments; or
            `tsopt.example(*args, **kwargs)`. A list of several: the sizes in which they differ are dynamic, from 1 to
            twice the largest, and the first is the one that is timed.
        dynamic: sizes that differ from call to call: `{"x": {0: "batch"}}`, `{"x": {0: "batch[1..32]"}}`. What was made
            is run at the ends of the ranges and between them; the report says at which sizes. Calls of sizes beyond
            are calls of another form.
        level: 0 no passes, 1 those that keep every bit, 2 also those that round elsewhere, 3 also lossy ones: as 2 with
            `precision="auto"`.
        backends: who races; eager itself always does. None: the engines that are installed and compile in seconds.
            `all`: every engine, also Inductor, which takes minutes; one that is not installed is a row in the table,
            where one that was asked for by name is an error.
        precision: what products of float32 matrices may be computed in beside `fp32`: `bf16`, `fp16`, on a GPU `tf32`,
            or `auto` for all of them. Candidates in that precision race beside those in `fp32`; their outputs are
            compared by how far they are away as a whole, 3 % for `bf16` and 1 % for the others.
        frontend: who reads the model. `export`, `strict`, `fx`, `torchscript`: see `capture`; what is not a single
            graph for TorchScript either runs as a script, with TorchScript's own optimizations. `parts`: dynamo, in
            graphs with the Python between them; the result runs and cannot be saved. `auto`: torch.export; TorchScript,
            where values decide; parts; eager. The report says which, and why not one before it. `one-graph`: the same
            without parts and eager.
        passes: the pipeline; extend `tsopt.STANDARD` with a longer tuple.
        without: names of rules and passes to leave out.
        threads: intra-op threads for the candidates; None takes torch's own number.
        seconds: about how long to time.
        seed: for the inputs that the verdicts are made on.
        eval_mode: capture a model that is in training mode as if it were in eval mode.
        allow_nan: take weights that hold NaN.
        on_new_signature: what a call of another form does: `capture` it once, go `eager`, or `error`.
        on_gradients: what a call does that only the model itself can serve, because gradients are wanted for an input,
            a transform of torch.func or torch.jit.trace goes through it, or autocast is on: run `eager` and say so
            once, or `error`.
        isolate: give each candidate a process of its own, so that one that crashes or hangs is only a row in the table;
            without, all of them run in this process, which saves a few seconds.
        budget: seconds for all candidates together, to compile, to check and to time; None for no limit.
        cache: take over what an earlier race of the same program on this machine has found, after its winner has been
            verified and timed against eager again; and keep what this one finds. Where: `tsopt cache show`.
        check_indices: engines that accept indices which do not exist have each call's indices checked, whatever that
            costs, and raise what eager raises. Otherwise those are checked where it costs less than 1 % of a call, and
            the report names the others.
        strict_specials: a candidate that differs from eager on NaN, infinities or denormals is out. Otherwise the
            report says where it differs.
        share_weights: let the winner read the model's weights where they are, which saves a copy of them. Calls then
            raise WeightsChangedError once torch has written to one of them; without, the winner keeps those of now.
        audit: the share of the time served that audits may take: real calls that eager makes as well, on copies of
            the inputs. The first is within 100 calls. A difference is a warning, and eager from then on. 0: none.
        progress: told the name of each step.

    A model that cannot be captured, in parts neither, or of which nothing can be verified, comes back as it is: an
    `InEager`, whose report says why for each way that was tried. By name, a front end raises.

    Raises:
        CaptureError: the model itself fails on its example. NotReady, one of them: it has no weights, weights that are
            NaN, or is in training mode and its answer depends on it.
        UsageError: an option is not what it must be.
    """
    examples = as_examples(example_input)
    _check_options(on_new_signature, on_gradients, backends, threads, seconds, budget, frontend)
    check_share(audit)
    racing = who_races(examples[0], backends, precision, level)
    tell = Telling(progress or (lambda text: None))
    request = _Request(
        *(model, level, racing, tuple(passes), tuple(without), threads, seconds, seed, eval_mode, allow_nan),
        *(on_new_signature, on_gradients, isolate, budget, cache, tell, frontend, audit, share_weights, dynamic),
        *(check_indices, strict_specials),
    )
    because: NotOneGraph | None = None
    if frontend != "parts":
        try:
            return request.as_one_graph(*examples)
        except NotOneGraph as error:
            if frontend in NEVER_IN_PARTS:
                raise
            because = error
        except Exception as error:
            return request.for_one_size(error, *examples) or request.in_eager(examples[0], error)
    try:
        return request.in_parts(because, *examples)
    except Exception as error:
        return request.in_eager(examples[0], *filter(None, (because, error)))


def who_races(
    example: Example, backends: Sequence[str] | Literal["all"] | None, precision: str | None, level: int
) -> tuple[Candidate, ...]:
    """The candidates that `optimize` is asked for; see there. Raises UsageError."""
    asked = precision or (AUTO if LEVELS.get(level) == Numerics.LOSSY else FP32)
    return candidates_for(backends, asked, on_gpu=is_on_gpu(example))


class Telling:
    """The caller's `progress`; what it raises is the caller's own, and not to be taken for a failure of the model.

    Attributes:
        error: what it has raised last.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.progress = progress
        self.error: Exception | None = None

    def __call__(self, text: str) -> None:
        try:
            self.progress(text)
        except Exception as error:
            self.error = error
            raise


@dataclass(frozen=True, slots=True)
class _Request:
    """What `optimize` was asked for, for whatever has to be made of it: the model, a form of call, a part."""

    model: Callable[..., Any]
    level: int
    candidates: tuple[Candidate, ...]
    passes: tuple[Pass | Repeat, ...]
    without: tuple[str, ...]
    threads: int | None
    seconds: float
    seed: int
    eval_mode: bool
    allow_nan: bool
    policy: str
    on_gradients: str
    isolate: bool
    budget: float | None
    cache: bool
    tell: Telling
    frontend: str
    audit: float
    share_weights: bool
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    check_indices: bool = False
    strict_specials: bool = False

    def as_one_graph(self, *examples: Example) -> Optimized:
        example = examples[0]
        with Workshop() if self.isolate and is_on_cpu(example) else nullcontext() as workshop:
            self.tell("capture")
            start = time.perf_counter()
            given = list(examples) if len(examples) > 1 else example
            captured, rehearsal = self.captured(given, allow_nan=self.allow_nan, dynamic=self.dynamic)
            capture_seconds = time.perf_counter() - start
            if not captured.signature.aliasing:
                examples = tuple(item.apart() for item in examples)
                example = examples[0]
            captured = rehearsal.program(captured)
            sized = Sized(captured)
            if captured.signature.dims:
                self.tell("other sizes")
                sized = settled(rehearsal.model, captured, *examples, seed=self.seed)
                captured = at(captured, sizes_in(captured.signature, example))
            reference = sized.program
            start = time.perf_counter()
            optimized, records, sized = self._transformed(sized)
            pass_seconds = time.perf_counter() - start
            run_race = race_or_recall if self.cache else race
            outcome = run_race(
                rehearsal.model,
                captured,
                variants(optimized, self.candidates),
                example,
                candidates=self.candidates,
                threads=self.threads,
                seconds=self.seconds,
                seed=self.seed,
                workshop=workshop,
                budget=self.budget,
                progress=self.tell,
                elsewhere=sized.elsewhere,
                check_indices=self.check_indices,
                strict_specials=self.strict_specials,
                share_weights=self.share_weights,
            )
        is_lossy = outcome.candidate is not None and outcome.candidate.precision != FP32
        report = Report(
            captured.name,
            outcome.rows,
            outcome.row.name,
            outcome.why,
            tuple(records),
            (captured.node_count, optimized.node_count),
            capture_seconds,
            environment(),
            Numerics.LOSSY.name if is_lossy else optimized.numerics.name,
            peak_bytes=(peak_bytes(captured), peak_bytes(optimized)),
            pass_seconds=pass_seconds,
            frontend=captured.frontend,
            together=outcome.together,
            cached=outcome.cached,
            sizes="; ".join(filter(None, (sized.checked, *sized.notes))),
        )
        called = as_eval(self.model, self.eval_mode)
        form = partial(self.form, outcome.candidate or Candidate(PLAIN.name))
        program, made = rehearsal.program(optimized), rehearsal.ended(outcome.executable)
        reference, written = rehearsal.program(reference), program.state.values()
        exact, audits = made is not None and not self.share_weights, Audits(self.audit)
        if made is not None:
            made.reference = reference
            if not isinstance(called, InEvalMode):  # whose call sets flags that other threads would see
                with torch.no_grad():
                    audits.warm(partial(executable_difference, made, called, example))
        return Optimized(
            *(called, program, made, report, example, form, self.policy, self.on_gradients),
            audits=audits,
            weights=Weights(called, reference.weights.values(), written, exact=exact),
            share_weights=self.share_weights,
        )

    def in_parts(self, because: NotOneGraph | None, *examples: Example) -> InParts:
        """The model in parts, because it is not a single graph, or because that is asked for."""
        script = None
        if self.frontend == "torchscript":
            with training_flags(self.model if self.eval_mode else None, False):
                script = frontends.by_torchscript(self.model)
        made = optimize_in_parts(
            as_eval(self.model, self.eval_mode),
            examples[0],
            self.part,
            script=script,
            because=because,
            seconds=self.seconds,
            seed=self.seed,
            audits=Audits(self.audit),
            progress=self.tell,
            on_gradients=self.on_gradients,
        )
        if self.dynamic is not None or len(examples) > 1:
            made.report = replace(made.report, sizes=ONE_BY_ONE)
        return made

    def for_one_size(self, error: Exception, *examples: Example) -> Optimized | None:
        """The model for the sizes of the first example, where that was not possible for many; None where it is not.

        Args:
            error: why not for many.
        """
        many = self.dynamic is not None or len(examples) > 1
        if not many or type(error) is not CaptureError or self.frontend != "auto":
            return None
        try:
            made = replace(self, dynamic=None).as_one_graph(examples[0])
        except Exception:  # whatever that is, the first reason is the one to be told
            return None
        made.report = replace(made.report, sizes=f"none is dynamic, because: {reason_of(error)}")
        return made

    def in_eager(self, example: Example, *errors: Exception) -> InEager:
        """The model as it is, where tsopt cannot make anything of it.

        Raises:
            Exception: the last of `errors`, where it is not about what tsopt cannot do: an option, a model that is not
                ready or fails by itself, the caller's `progress`; or where a front end was asked for by name.
        """
        error = errors[-1]
        if isinstance(error, (UsageError, NotReady)) or error is self.tell.error or self.frontend != "auto":
            raise error
        called = as_eval(self.model, self.eval_mode)
        own = failure_of_the_model(called, example, error)
        if own is not None:
            raise own from error
        if not isinstance(error, TsoptError):  # a mistake of tsopt's own costs the model its speed, not its answers
            log.warning("tsopt itself fails on %s, which runs as it is", name_of(self.model), exc_info=error)
        return InEager(called, name_of(self.model), errors, self.on_gradients)

    def captured(self, given: Any, **options: Any) -> tuple[Program, Rehearsal]:
        """The program, and what is to be called in the model's place when something is compared with it."""
        frontend = "auto" if self.frontend == "one-graph" else self.frontend
        program, apart = capture_apart(self.model, given, frontend=frontend, eval_mode=self.eval_mode, **options)
        called = as_eval(self.model, self.eval_mode)
        rehearsed = apart and not isinstance(self.model, ExportedProgram)
        return program, rehearsal_of(called, program) if rehearsed else Rehearsal(called)

    def _transformed(self, sized: Sized) -> tuple[Program, list[PassRecord], Sized]:
        """What the passes make of it; of a program for many sizes, what is right at all that were tried."""
        change = partial(
            transform_with_records, passes=self.passes, level=self.level, progress=self.tell, keep_going=True
        )
        reasons = []
        by_size = [item.name for item in _flat(self.passes) if item.size_dependent]
        for left_out in (self.without, (*self.without, *by_size)) if sized.elsewhere else (self.without,):
            try:
                optimized, records = change(sized.program, without=left_out)
                for record in filter(lambda record: record.failed, records):
                    warn(
                        f"tsopt: {sized.program.name}: the pass {record.name} was left out: {record.failed}",
                        UserWarning,
                    )
                return optimized, records, sized.checked_with(optimized)
            except NotGeneral as error:
                reasons.append("; ".join(filter(None, (error.what, error.where, error.why))))
        return sized.program, [], replace(sized, notes=(*sized.notes, f"no passes: {reasons[-1]}"))

    def form(self, candidate: Candidate, example: Example) -> Executable:
        """The winner's backend for another form of call, verified and raced against eager for a moment."""
        captured, rehearsal = self.captured(example, allow_nan=True)
        captured = rehearsal.program(captured)
        optimized, _ = transform_with_records(
            captured, self.passes, level=self.level, without=self.without, keep_going=True
        )
        outcome = race(
            rehearsal.model,
            captured,
            variants(optimized, (candidate,)),
            example,
            candidates=(candidate,),
            threads=self.threads,
            seconds=SHORT_RACE,
            seed=self.seed,
            check_indices=self.check_indices,
            strict_specials=self.strict_specials,
            share_weights=self.share_weights,
        )
        executable = rehearsal.ended(outcome.executable)
        if executable is None:
            reason = next((row.reason for row in outcome.rows if row.reason), outcome.why)
            raise AccuracyError(f"{candidate.title} does not win for this form: {reason}")
        executable.reference = rehearsal.program(captured)
        return executable

    def part(self, graph: Callable[..., Any], inputs: Example) -> Optimized:
        """A graph between pieces of Python, optimized as the whole would have been."""
        own = replace(self, model=graph, seconds=PART["seconds"], policy=PART["on_new_signature"], eval_mode=False)
        # Whoever calls the whole model audits it, and knows its weights.
        own = replace(own, frontend="export", audit=0.0, tell=Telling(lambda text: None))
        try:
            return own.as_one_graph(inputs)
        except TsoptError:
            raise
        except Exception as error:  # a mistake of tsopt's own costs this part its speed
            raise CaptureError("tsopt itself fails on a part", why=f"{type(error).__name__}: {error}") from error


def transform(
    program: Program,
    passes: Iterable[Pass | Repeat] = STANDARD,
    *,
    level: int = 2,
    without: Iterable[str] = (),
    fuel: int | None = None,
    debug: Any = None,
) -> Program:
    """Runs passes over a copy of a program, every invariant checked after each.

    Args:
        level: 0 none, 1 EXACT, 2 EXACT and ROUNDING, 3 LOSSY as well, where `passes` holds such.
        without: names of rules and passes to leave out.
        fuel: how many rewrites to make; bisect it to find the one that breaks a model.
        debug: an example input; every rewrite is compared on it, which takes many times as long.

    A program for many sizes is changed to one for the same sizes.

    Raises:
        PassError: what the passes make of a program for many sizes depends on the sizes.
        AccuracyError: under `debug`, naming the first rewrite that changes values, and its place.
    """
    if debug is None:
        return transform_with_records(program, passes, level=level, without=without, fuel=fuel)[0]
    found = debug_passes(program, debug, passes, level=level, without=without, fuel=fuel)
    if found.findings:
        raise found.error()
    return found.program


def transform_with_records(
    program: Program,
    passes: Iterable[Pass | Repeat] = STANDARD,
    *,
    level: int = 2,
    without: Iterable[str] = (),
    fuel: int | None = None,
    keep_text: bool = False,
    progress: Callable[[str], None] | None = None,
    keep_going: bool = False,
) -> tuple[Program, list[PassRecord]]:
    """`transform`, with the record of each pass; under `keep_going` without the passes that fail."""
    passes, limits = _run_of(passes, level, without, fuel)
    if not passes:
        return program, []
    records: list[PassRecord] = []

    def change(program: Program) -> Program:
        changed, records[:] = run(
            program,
            passes,
            replace(limits),
            keep_text=keep_text,
            progress=_naming_passes(progress),
            keep_going=keep_going,
        )
        return changed

    return through(program, change), records


def debug_passes(
    program: Program,
    example_input: Any,
    passes: Iterable[Pass | Repeat] = STANDARD,
    *,
    level: int = 2,
    without: Iterable[str] = (),
    fuel: int | None = None,
    keep_text: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Debugged:
    """`transform` with every rewrite compared on the example; what was found wrong is a value, not an error."""
    if program.signature.dims:
        raise UsageError("passes are looked at for one size", fix="capture the model with one example")
    passes, limits = _run_of(passes, level, without, fuel)
    tell = _naming_passes(progress)
    return run_debug(program, example_input, passes, limits, keep_text=keep_text, seed=seed, progress=tell)


def _run_of(
    passes: Iterable[Pass | Repeat], level: int, without: Iterable[str], fuel: int | None
) -> tuple[tuple[Pass | Repeat, ...], Limits]:
    """The passes of a level and what they may do; options checked."""
    if level not in LEVELS:
        raise UsageError(f"unknown optimization level {level}", fix=f"one of {', '.join(f'-O{n}' for n in LEVELS)}")
    passes, left_out = tuple(passes), frozenset(without)
    for name in sorted(left_out):
        check_name(name, names_of(passes))
    numerics = LEVELS[level]
    return ((), Limits()) if numerics is None else (passes, Limits(numerics, fuel, left_out))


def _naming_passes(progress: Callable[[str], None] | None) -> Callable[[str], None] | None:
    return None if progress is None else lambda name: progress(f"pass {name}")


def names_of(passes: Iterable[Pass | Repeat]) -> list[str]:
    """Names of all passes and rules of a pipeline."""
    return [part.name for item in _flat(passes) for part in (item, *item.rules)]


def rules_of(passes: Iterable[Pass | Repeat]) -> dict[str, tuple[str, Rule]]:
    """The rules of a pipeline by name, each with the name of its pass."""
    return {rule.name: (item.name, cast(Rule, rule)) for item in _flat(passes) for rule in item.rules}


def _flat(passes: Iterable[Pass | Repeat]) -> list[Pass]:
    """The passes of a pipeline, those inside a Repeat included."""
    found: list[Pass] = []
    todo = list(passes)[::-1]
    while todo:
        item = todo.pop()
        if isinstance(item, Repeat):
            todo += item.passes[::-1]
        else:
            found.append(item)
    return found


def check_name(name: str, known: Sequence[str]) -> None:
    """Raises UsageError for a name that no rule or pass has, with those that are near it."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
        raise UsageError(f"no rule or pass is called {name!r}", fix=f"one of: {', '.join(near)}")


def variants(program: Program, candidates: Iterable[Candidate]) -> dict[str, Program | NoGain]:
    """The program, and what candidates run in its place; NoGain for what would not be faster."""
    found: dict[str, Program | NoGain] = {FP32: program}
    for name in {candidate.variant for candidate in candidates} - {FP32}:
        try:
            found[name] = in_precision(program, name)
        except NoGain as error:
            found[name] = error
    return found


def compile(
    program: Program, backend: str | Backend = "onnxruntime", *, share_weights: bool = False, **options: Any
) -> Executable:
    """Compiles a program with one backend.

    Args:
        backend: a name (`eager`, `torchscript`, `onnxruntime?threads=1`, `eager?precision=bf16`, ...), or
            `package.module:Class` for one of your own, or a Backend.
        share_weights: let the engine read the program's weights where they are, which saves a copy. What writes to
            them later, such as training the model that they belong to, then changes some of what it computes.
        options: the backend's own, such as `threads=2`.

    Raises:
        BackendError: the backend cannot take the program; the message names the op and its place.
        NoGain, a BackendError: the program has no product that a lower precision would make faster.
    """
    if not isinstance(backend, str):
        return compile_by(program, backend, share_weights=share_weights, **options)
    candidate = Candidate.parse(backend)
    lowered = in_precision(program, candidate.variant)
    return compile_by(lowered, candidate, share_weights=share_weights, **options)


def _check_options(
    policy: str,
    on_gradients: str,
    backends: Sequence[str] | None,
    threads: int | None,
    seconds: float,
    budget: float | None,
    frontend: str,
) -> None:
    if policy not in POLICIES:
        raise UsageError(f"on_new_signature={policy!r}", fix=f"one of: {', '.join(POLICIES)}")
    if on_gradients not in ON_GRADIENTS:
        raise UsageError(f"on_gradients={on_gradients!r}", fix=f"one of: {', '.join(ON_GRADIENTS)}")
    if frontend not in FRONTENDS:
        raise UsageError(f"frontend={frontend!r}", fix=f"one of: {', '.join(FRONTENDS)}")
    if isinstance(backends, str) and backends != "all":
        raise UsageError("backends is a string", fix=f"pass a tuple: backends=({backends!r},)")
    if threads is not None and threads < 1:
        raise UsageError(f"threads={threads}", fix="a number of at least 1")
    if seconds <= 0:
        raise UsageError(f"seconds={seconds}", fix="a time above 0")
    if budget is not None and not budget > 0:
        raise UsageError(f"budget={budget}", fix="a number of seconds above 0, or None for no limit")
    for name in () if backends is None or backends == "all" else backends:
        get_backend(name)


def as_eval(model: Callable[..., Any], eval_mode: bool) -> Callable[..., Any]:
    """The model as it is called: an exported program as a module; under `eval_mode` with the flags set in the call."""
    if isinstance(model, ExportedProgram):
        return model.module(check_guards=False)
    if not eval_mode or not isinstance(model, nn.Module) or not any(m.training for m in model.modules()):
        return model
    return InEvalMode(model)
