"""One call of `optimize`: capture, passes and race; otherwise partitioned, or in eager."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram

from tsopt.compiler.analysis.liveness import peak_bytes
from tsopt.compiler.calls.example import Example
from tsopt.compiler.capture import frontends
from tsopt.compiler.capture.export_errors import failure_of_the_model
from tsopt.compiler.capture.names import name_of
from tsopt.compiler.capture.shadow import shadow_of
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.graph.drawing import drawing_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.outside import kept_outside
from tsopt.compiler.precision_names import FP32, INTEGER_VARIANTS
from tsopt.compiler.protect import InEvalMode, as_eval, training_flags
from tsopt.compiler.rewriting.pass_base import Pass, Repeat
from tsopt.errors import AccuracyError, CaptureError, GraphBreakError, NotReady, TsoptError, UsageError
from tsopt.importing import without_collector
from tsopt.prepared import Preparation, Prepared
from tsopt.quantization.quantize import Int8Options, Quantization, criterion_on_calls, quantize
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.audit import Audits, executable_difference
from tsopt.runtime.calling.call_effects import tell_of_effects
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.fallback import InEager, reason_of
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.calling.partitioned import PART, Partitioned, optimize_partitioned
from tsopt.runtime.calling.weights import Weights
from tsopt.runtime.layer_table import by_loss
from tsopt.runtime.racing import cache
from tsopt.runtime.racing.cached_race import cached_race
from tsopt.runtime.racing.choice import Race, faster_first
from tsopt.runtime.racing.contenders import LEAST_SECONDS, Progress, RaceSettings
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.outcomes import warn
from tsopt.runtime.racing.race import race
from tsopt.runtime.racing.rehearsal import Rehearsal, rehearsal_of
from tsopt.runtime.racing.speedup import UNDECIDED
from tsopt.runtime.report import Report
from tsopt.runtime.sandbox.sandbox import Sandbox, is_on_cpu
from tsopt.runtime.stages import ReportedProgress

log = logging.getLogger("tsopt")
ONE_BY_ONE = "none is dynamic: TorchDynamo retraces a partitioned model for each size"
ONLY_FP32_IN_PARTS = (
    "calibration, metric, max_drop and keep_float apply to a model that is one graph; "
    "this one is partitioned, and runs in full precision"
)
ON_A_GPU = "the model is on a GPU"
SHARE_OF_QUANTIZATION = 0.5  # of the budget: the rest is for the candidates
SHORT_RACE = 1.0  # seconds of timing for a signature that turns up later
COMPILED_TOGETHER = 5.0  # seconds, in which candidates for it are compiled at most, to race for many sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of one call of `optimize`, applied to the model, to a specialization or to a part.

    Attributes:
        race: how candidates are raced.
        int8: how layers are quantized, and what candidates in lower precisions are judged by.
        progress: called with the name of each step.
    """

    model: Callable[..., Any]
    level: int
    race: RaceSettings
    passes: tuple[Pass | Repeat, ...]
    without: tuple[str, ...]
    eval_mode: bool
    allow_nan: bool
    on_new_signature: str
    on_gradients: str
    warmup: int
    isolate: bool
    cache: bool
    progress: ReportedProgress
    frontend: str
    audit: float
    dynamic: Mapping[str, Mapping[int, str]] | None
    int8: Int8Options = field(default_factory=Int8Options)

    def as_one_graph(self, *examples: Example) -> Optimized:
        """The model as one program. Raises CaptureError if it cannot be captured as one."""
        example = examples[0]
        kind = cache.kind_of(self.model, example) if self.cache else ""
        # What a race needs is started early, unless this one is likely to be in the cache.
        apart = Sandbox(at_once=not kind or not cache.may_know(kind)) if self.isolate and is_on_cpu(example) else None
        with apart or nullcontext() as sandbox:
            self.progress("capture")
            start = time.perf_counter()
            given = list(examples) if len(examples) > 1 else example
            captured, rehearsal = self.captured(given, allow_nan=self.allow_nan, dynamic=self.dynamic)
            capture_seconds = time.perf_counter() - start
            if not captured.signature.aliasing:
                examples = tuple(item.apart() for item in examples)
                example = examples[0]
            made = self._prepared(rehearsal.program(captured), rehearsal, examples)
            start = time.perf_counter()
            quantized = self._quantized(rehearsal, made.optimized, example)
            left = self._budget_after(time.perf_counter() - start)
            outcome = (partial(cached_race, kind=kind, data=quantized.data) if self.cache else race)(
                rehearsal.model,
                made.captured,
                quantized.with_others(made.optimized, self.race.candidates, self.int8.keep_float),
                example,
                replace(self.race, held_out=made.ranges.held_out, criterion=quantized.criterion, budget=left),
                sandbox=sandbox,
                progress=self.progress,
            )
        is_lossy = outcome.candidate is not None and outcome.candidate.precision != FP32
        report = Report(
            model=captured.name,
            rows=outcome.rows,
            winner_key=outcome.winner,
            why=outcome.why,
            passes=made.records,
            nodes=(made.captured.node_count, made.optimized.node_count),
            capture_seconds=capture_seconds,
            environment=environment(),
            numerics=Numerics.LOSSY.name if is_lossy else made.optimized.numerics.name,
            peak_bytes=(peak_bytes(made.captured), peak_bytes(made.optimized)),
            pass_seconds=made.pass_seconds,
            stages=self.progress.stages.spent(),
            frontend=captured.frontend,
            not_isolated_because=outcome.not_isolated_because
            or (ON_A_GPU if self.isolate and is_on_gpu(example) else ""),
            cached=outcome.cached,
            sizes="; ".join(filter(None, (made.ranges.checked, *made.ranges.notes))),
            quantization=tuple(by_loss(quantized.layers_for(outcome.candidate, outcome.executable))),
            calibration=quantized.calibration,
            graphs=(made.drawing, drawing_of(quantized.program_of(outcome.candidate) or made.optimized)),
        )
        if outcome.executable is not None and self.audit:
            tell_of_effects(rehearsal, made.captured, example)
        return self._served(example, rehearsal, made, outcome, report, quantized)

    def _quantized(self, rehearsal: Rehearsal, program: Program, example: Example) -> Quantization:
        """The int8 variants for the candidates, and the accuracy criterion for lower precisions."""
        if all(candidate.precision == FP32 for candidate in self.race.candidates):
            return Quantization()
        wanted = {candidate.variant for candidate in self.race.candidates}
        return quantize(
            *(rehearsal.model, program, example, wanted, self.int8),
            seed=self.race.seed,
            seconds=math.inf if self.race.budget is None else SHARE_OF_QUANTIZATION * self.race.budget,
            cache=self.cache,
            progress=self.progress,
        )

    def _budget_after(self, spent: float) -> float | None:
        """What quantization has left of the budget for the candidates."""
        return None if self.race.budget is None else max(self.race.budget - spent, LEAST_SECONDS)

    def _prepared(self, captured: Program, rehearsal: Rehearsal, examples: Sequence[Example]) -> Prepared:
        prepare = Preparation(
            passes=self.passes,
            level=self.level,
            without=self.without,
            dynamic=self.dynamic,
            seed=self.race.seed,
            progress=self.progress,
        )
        return prepare(rehearsal.model, captured, examples)

    def _served(
        self,
        example: Example,
        rehearsal: Rehearsal,
        made: Prepared,
        outcome: Race,
        report: Report,
        quantized: Quantization,
    ) -> Optimized:
        """The winner of a race behind the model's interface, audited."""
        called, audits = as_eval(self.model, self.eval_mode), Audits(self.audit)
        if outcome.executable is not None:
            self._warm(audits, outcome.executable, rehearsal, made.reference, example)
        program, executable = rehearsal.program(made.optimized), rehearsal.ended(outcome.executable)
        reference, written = rehearsal.program(made.reference), program.state.values()
        shares, int8 = self.race.share_weights, quantized.program_of(outcome.candidate)
        if executable is not None:
            executable.reference, executable.limits = reference, made.ranges.limits
        ranked = self._ranked(outcome)
        specialize_call = partial(self.specialized, ranked, together=self._together(outcome, ranked))
        return Optimized(
            *(called, program, executable, report, example, specialize_call, self.on_new_signature, self.on_gradients),
            warmup=self.warmup,
            audits=audits,
            weights=Weights(called, reference.weights.values(), written, exact=executable is not None and not shares),
            share_weights=shares,
            quantized=(outcome.candidate.variant, rehearsal.program(int8)) if outcome.candidate and int8 else None,
            threads=self.race.threads,
        )

    @staticmethod
    def _warm(audits: Audits, winner: Executable, rehearsal: Rehearsal, reference: Program, example: Example) -> None:
        """Makes the first audit, which is slow, while the winner still writes what other threads do not see."""
        winner.reference = reference
        if rehearsal.shadow is not None or not isinstance(rehearsal.model, InEvalMode):  # whose call sets flags
            with torch.no_grad():
                audits.warm(partial(executable_difference, winner, rehearsal.model, example))

    def in_parts(self, because: GraphBreakError | None, *examples: Example) -> Partitioned:
        """The model split at graph breaks, because it is not one graph or because that was requested."""
        if self.int8.are_given:
            warn(f"tsopt: {name_of(self.model)}: {ONLY_FP32_IN_PARTS}", UserWarning)
        script = None
        if self.frontend == "torchscript":
            with training_flags(self.model if self.eval_mode else None, False):
                script = frontends.by_torchscript(self.model)
        made = optimize_partitioned(
            as_eval(self.model, self.eval_mode),
            examples[0],
            self.part,
            script=script,
            because=because,
            seconds=self.race.seconds,
            seed=self.race.seed,
            audits=Audits(self.audit),
            progress=self.progress,
            on_gradients=self.on_gradients,
        )
        if self.progress.error is not None:  # a part that fails runs as it is, whatever it fails with
            raise self.progress.error
        made.in_full_precision = all(item.precision == FP32 for item in self.race.candidates)
        if self.dynamic is not None or len(examples) > 1:
            made.report = replace(made.report, sizes=ONE_BY_ONE)
        return made

    def for_one_size(self, error: Exception, *examples: Example) -> Optimized | None:
        """The model for the sizes of the first example, if dynamic sizes failed; None if this fails too.

        Args:
            error: why dynamic sizes failed.
        """
        many = self.dynamic is not None or len(examples) > 1
        if not many or type(error) is not CaptureError or self.frontend != "auto":
            return None
        try:
            made = replace(self, dynamic=None).as_one_graph(examples[0])
        except Exception:  # whatever it is, the first reason is the one to report
            return None
        made.report = replace(made.report, sizes=f"none is dynamic: {reason_of(error)}")
        return made

    def in_eager(self, example: Example, *errors: Exception) -> InEager:
        """The model itself, if tsopt cannot optimize it.

        Raises:
            Exception: the last of `errors`, if it is not a limitation of tsopt: an invalid option, a model that is not
                ready or fails by itself, the caller's `progress`; or if a frontend was requested by name.
        """
        error = errors[-1]
        if self.progress.error is not None:  # TorchDynamo may have been between it and here
            raise self.progress.error
        if isinstance(error, (UsageError, NotReady)) or self.frontend != "auto":
            raise error
        called = as_eval(self.model, self.eval_mode)
        own = failure_of_the_model(called, example, error)
        if own is not None:
            raise own from error
        if not isinstance(error, TsoptError):  # a bug in tsopt costs the model its speed, not its results
            log.warning(
                "internal error in tsopt while optimizing %s, which runs in eager mode",
                name_of(self.model),
                exc_info=error,
            )
        return InEager(called, name_of(self.model), errors, self.on_gradients)

    def captured(self, given: Any, **options: Any) -> tuple[Program, Rehearsal]:
        """The program, and what to call instead of the model when a candidate is compared with it."""
        with without_collector():  # imports most of torch, for which the sandbox need not wait
            from tsopt.compiler.capture.capture import capture_apart

        frontend = "auto" if self.frontend == "one-graph" else self.frontend
        program, apart = capture_apart(self.model, given, frontend=frontend, eval_mode=self.eval_mode, **options)
        called = as_eval(self.model, self.eval_mode)
        rehearsed = apart and not isinstance(self.model, ExportedProgram)
        shadow = shadow_of(called, written=program.state.values()) if rehearsed else None
        return program, rehearsal_of(called, program.signature, shadow)

    def _ranked(self, outcome: Race) -> tuple[Candidate, ...]:
        """The candidates that are faster than eager: the winner, then the others, the fastest first."""
        found = {candidate.key: candidate for candidate in self.race.candidates}
        others = [found[row.key] for row in faster_first(outcome.rows) if row.key in found]
        return tuple(dict.fromkeys([outcome.candidate, *others] if outcome.candidate is not None else []))

    def _together(self, outcome: Race, ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Those that may be the fastest where sizes change, which a race of one size does not tell.

        Empty where to compile them takes long: calls wait for it.
        """
        found = {candidate.key: candidate for candidate in self.race.candidates}
        level = [row for row in outcome.rows if row.verdict in ("same", UNDECIDED) and row.key in found]
        candidates = tuple(dict.fromkeys([*ranked, *(found[row.key] for row in level)]))
        seconds = sum(row.compile_seconds for row in outcome.rows if found.get(row.key) in candidates)
        in_full = all(candidate.precision == FP32 for candidate in candidates)
        return candidates if ranked and in_full and seconds <= COMPILED_TOGETHER else ()

    def specialized(
        self, candidates: Sequence[Candidate], *examples: Example, together: Sequence[Candidate] = ()
    ) -> Executable:
        """The program for another signature, with the first backend that is right there and faster than eager.

        Args:
            candidates: in the order in which they are tried.
            examples: calls; the sizes in which they differ are dynamic. The first is the one that is raced.
            together: for a program of many sizes, these are tried in one race instead, if there are any.
        """
        in_full = [candidate.in_full_precision() for candidate in candidates]
        # Calibration and criterion belong to the first signature; without them, each precision is judged here again.
        lower = () if self.int8.are_given else candidates
        groups: list[tuple[Candidate, ...]] = [(candidate,) for candidate in dict.fromkeys([*lower, *in_full])]
        if len(examples) > 1 and together:
            groups = [tuple(together)]
        with kept_outside(self.model):
            return self._specialized(groups, lower, *examples)

    def _specialized(
        self, groups: Sequence[tuple[Candidate, ...]], lower: Sequence[Candidate], *examples: Example
    ) -> Executable:
        example = examples[0]
        captured, rehearsal = self.captured(list(examples) if len(examples) > 1 else example, allow_nan=True)
        if not captured.signature.aliasing:
            examples = tuple(item.apart() for item in examples)
            example = examples[0]
        made = self._prepared(rehearsal.program(captured), rehearsal, examples)
        quantized = self._quantized(rehearsal, made.optimized, example) if lower else Quantization()
        criterion = criterion_on_calls(rehearsal.model, made.optimized, examples) if quantized.variants else None
        reasons: list[str] = []
        settings = replace(self.race, seconds=SHORT_RACE, budget=None, held_out=made.ranges.held_out)
        for candidates in groups:
            judged_by = criterion if candidates[0].precision in INTEGER_VARIANTS else None
            outcome = race(
                rehearsal.model,
                made.captured,
                quantized.with_others(made.optimized, candidates),
                example,
                replace(settings, candidates=candidates, criterion=judged_by),
            )
            executable = rehearsal.ended(outcome.executable)
            if executable is not None:
                executable.reference, executable.limits = rehearsal.program(made.reference), made.ranges.limits
                others = [f"{row.name}: {row.reason}" for row in outcome.rows if row.reason and row.status != "ok"]
                executable.passed_over = (*reasons, *others)
                return executable
            told = {row.key: row.reason for row in outcome.rows}
            reasons += [f"{candidate.title}: {told.get(candidate.key) or outcome.why}" for candidate in candidates]
        raise AccuracyError(f"no candidate wins for this signature: {'; '.join(reasons)}")

    def part(
        self, graph: Callable[..., Any], inputs: Example, budget: float | None, progress: Progress = lambda text: None
    ) -> Optimized:
        """One graph of a partitioned model, optimized as the whole model would have been, in so many seconds."""
        known = [seconds for seconds in (budget, self.race.budget) if seconds is not None]
        own = replace(
            self,
            model=graph,
            race=replace(self.race, seconds=PART["seconds"], budget=min(known, default=None)),
            on_new_signature=PART["on_new_signature"],
            eval_mode=False,
        )
        if self.int8.are_given:  # no accuracy criterion exists for a part
            only = tuple(dict.fromkeys(candidate.in_full_precision() for candidate in self.race.candidates))
            own = replace(own, race=replace(own.race, candidates=only), int8=Int8Options())
        # The whole model is audited, and its weights are watched, by its caller.
        own = replace(own, frontend="export", audit=0.0, progress=ReportedProgress(progress))
        try:
            return own.as_one_graph(inputs)
        except TsoptError:
            raise
        except Exception as error:  # a bug in tsopt costs this part its speed
            if error is own.progress.error:
                raise
            raise CaptureError(
                "internal error in tsopt while optimizing a part", why=f"{type(error).__name__}: {error}"
            ) from error
