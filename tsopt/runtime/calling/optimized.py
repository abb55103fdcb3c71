"""Optimized: the result of `optimize`. Runs the winner; a new signature is captured once, or runs in eager mode."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.values import flat_inputs
from tsopt.compiler.precision_names import FP32
from tsopt.compiler.protect import modules_of, protected
from tsopt.compiler.sizes.dims import resized
from tsopt.errors import AccuracyError, SignatureError, TsoptError, WeightsChangedError
from tsopt.runtime.backends.backend import compile
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.backends.table import PLAIN, info_of
from tsopt.runtime.bundles import store
from tsopt.runtime.calling.ambient import Unserved, objection_to, untraced
from tsopt.runtime.calling.audit import LOOK_AT, NEVER, Audits, executable_difference
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.model_changes import Weights
from tsopt.runtime.calling.signature_guard import leaves_of
from tsopt.runtime.calling.specializations import (
    MAX_SPECIALIZATIONS,
    CallKey,
    Seen,
    Specializations,
    call_key,
    form_of,
    sizes_of,
)
from tsopt.runtime.checking.accuracy import verify
from tsopt.runtime.checking.held_out_sizes import widened
from tsopt.runtime.profiling.engines import profile
from tsopt.runtime.profiling.profile import Profile
from tsopt.runtime.report import Report

log = logging.getLogger("tsopt")
POLICIES = ("capture", "eager", "error")
CHANGED = "the weights of {} have changed since `optimize`"
NOW_AND_THEN = 16  # calls between checks of the weights, if eager won
ABSENT = object()  # where a call has no positional argument
MAX_CAPTURES = 2 * MAX_SPECIALIZATIONS  # in total: each takes seconds; more signatures than that need dynamic sizes


class Optimized:
    """A drop-in for a model: it takes the same calls and returns the same values, without gradients.

    Attributes:
        report: the race, and why the winner won.
        program: the optimized program.
        backend: name of the winner's backend; `eager` if the model itself is the fastest.
        executable: the winner; None if the model itself runs, also after an audit has found a difference.
        example: the call that it was optimized for.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        program: Program,
        executable: Executable | None,
        report: Report,
        example: Example,
        specialize: Callable[..., Executable],
        on_new_signature: str = "capture",
        on_gradients: str = "eager",
        *,
        warmup: int = 0,
        audits: Audits | None = None,
        weights: Weights | None = None,
        share_weights: bool = False,
        quantized: tuple[str, Program] | None = None,
    ) -> None:
        self.model, self.program, self.report, self.quantized = model, program, report, quantized
        self.backend = "eager" if executable is None else executable.backend
        self.executable, self.example = executable, example.renewed()  # what the user makes of theirs is their own
        self._specialize, self._policy, self._warmup = specialize, on_new_signature, warmup
        self._unserved = Unserved(model, report.model, on_gradients)
        self._leaves = leaves_of(program.signature) if executable is None else executable.accepts
        self._specializations = Specializations()
        self._captures = 0
        self._own: CallKey | None = None  # of the example
        self._lock = threading.Lock()
        self._audits = audits or Audits(0)
        self._weights, self._shares = weights, share_weights
        self._flags = [module.training for module in modules_of(model)]
        if executable is None:
            self._audits = Audits(0)  # there is nothing to compare; what is looked for is new weights
            self._audits.left = NOW_AND_THEN if weights is not None else NEVER
        else:
            self.executable = self._refusing(executable)

    @untraced
    def __call__(self, first: Any = ABSENT, /, *more: Any, **kwargs: Any) -> Any:
        # The first argument is separate: the most frequent call, of one tensor, then builds no tuple.
        audits = self._audits
        audits.left = left = audits.left - 1
        executable = self.executable
        if left >= 0 and executable is not None:
            quick = executable.quick
            if quick is not None and not more and not kwargs:
                result = quick(first)
                if result is not None:
                    return result
        args = more if first is ABSENT else (first, *more)
        if left < 0:
            return self._looked_at(args, kwargs)
        if executable is None:
            return self._by_the_model(args, kwargs)
        leaves = executable.accepts(args, kwargs)
        if leaves is not None:
            return executable.run_leaves(leaves, args, kwargs)
        found = self._specializations.accepting(args, kwargs)
        if found is not None:
            executable, leaves = found
            return executable.run_leaves(leaves, args, kwargs)
        return self._thorough(executable, args, kwargs)

    def _by_the_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._leaves(args, kwargs) is None:
            reason = objection_to(args, kwargs)
            if reason:
                return self._unserved(reason, args, kwargs)
            if self._policy == "error":  # whether a signature is refused must not depend on who won
                self.program.signature.bind(args, kwargs)
        return self._eager(*args, **kwargs)

    def _looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is timed, and audited where that is affordable."""
        if self.executable is None:
            return self._eager_looked_at(args, kwargs)
        with self._audits.turn() as audited:
            found = self._audit(args, kwargs) if audited else ""
        if found:
            self._retire(found)
        return self._audits.timed(lambda: self(*args, **kwargs))

    def _audit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        executable = None if objection_to(args, kwargs) else self.serving(args, kwargs)
        if executable is None or [module.training for module in modules_of(self.model)] != self._flags:
            return None  # in training mode the model is no reference
        if self._weights is not None and self._weights.touched() and self._weights.changed():
            self._outlived()
            return None
        with torch.no_grad():
            found = executable_difference(executable, self.model, Example(args, kwargs))
        if found and self._weights is not None and not self._shares and self._weights.changed():
            self._outlived()
            return None
        return found

    def _outlived(self) -> None:
        """The model's weights have changed and the winner keeps the old ones: there is nothing to compare it with."""
        if not self._shares:
            self._audits.end()
            self._say(f"{CHANGED.format(self.report.model)}: calls keep using the old ones")

    def _refusing(self, executable: Executable) -> Executable:
        """With shared weights, an executable that refuses to run once they have been written to."""
        if not self._shares or self._weights is None:
            return executable
        weights, name = self._weights, self.report.model

        def check() -> None:
            if weights.touched():
                raise WeightsChangedError(
                    CHANGED.format(name),
                    why="with share_weights=True, the compiled model uses some old and some new weights",
                    fix="optimize the model again, or leave out share_weights",
                )

        return executable.after(check)

    def unwatched(self) -> None:
        """Turns off watching the weights, for a caller that watches them itself."""
        self._weights = None
        self.executable = None if self.executable is None else self.executable.after(None)
        if self.executable is None:
            self._audits.end()

    def _check_weights(self, *, thoroughly: bool) -> None:
        """Raises WeightsChangedError if the model no longer has the weights that were compiled."""
        weights = self._weights
        if self.executable is None or weights is None or not (thoroughly or weights.touched()):
            return
        if weights.changed():
            raise WeightsChangedError(
                CHANGED.format(self.report.model),
                why="compiled signatures keep the old weights, but a new signature or export would use the new ones",
                fix="optimize the model again",
            )

    def _retire(self, found: str) -> None:
        """Falls back to eager for every signature: what is wrong with one may be wrong with all."""
        self.executable, self.backend = None, "eager"
        self._audits.end()
        self._say(
            f"{self.report.model} runs in eager mode from now on: an audit found a difference ({found}); {LOOK_AT}"
        )

    def _say(self, text: str) -> None:
        if text not in self.report.audits:
            self.report = self.report.with_audit(text)
            warnings.warn(f"tsopt: {text}", stacklevel=4)

    def serving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable | None:
        """The executable that would serve a call, if there already is one; None if the model itself would."""
        executable = self.executable
        if executable is None or executable.accepts(args, kwargs) is not None:
            return executable
        with contextlib.suppress(SignatureError):
            executable.bind(args, kwargs)
            return executable
        accepting = self._specializations.accepting(args, kwargs)
        if accepting is not None:
            return accepting[0]
        try:
            found = self._found(call_key(args, kwargs, aliasing=self.program.signature.aliasing), args, kwargs)
        except (TypeError, TsoptError):  # what cannot be told is not served by what was made
            return None
        return found if isinstance(found, Executable) else None

    def _eager_looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._audits.left = NOW_AND_THEN
        if self._weights is not None and self._weights.touched():
            self._audits.end()
            self._say(f"{CHANGED.format(self.report.model)}: eager calls use the new ones")
        return self(*args, **kwargs)

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def _thorough(self, executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reason = objection_to(args, kwargs)
        if reason:
            return self._unserved(reason, args, kwargs)
        try:
            leaves = executable.bind(args, kwargs)
        except SignatureError:
            if self._policy == "error":
                raise
            return self._by_specialization(args, kwargs)
        return executable.run_leaves(leaves, args, kwargs)

    def _by_specialization(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._specialization(args, kwargs)
        if not isinstance(found, Executable):
            return found(*args, **kwargs)
        try:
            leaves = found.bind(args, kwargs)
        except SignatureError as error:  # the model asks what no capture answers as this call does
            self._note("a guard fails", f"runs in eager mode: {error.what}")
            return self._eager(*args, **kwargs)
        self._specializations.used(found)
        return found.run_leaves(leaves, args, kwargs)

    def _specialization(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        found = self._specialization_found(args, kwargs)
        if not isinstance(found, Executable):
            self._check_weights(thoroughly=False)
        return found

    def _specialization_found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if self._policy == "eager":
            return self._eager
        key = call_key(args, kwargs, aliasing=self.program.signature.aliasing)
        try:
            found = self._found(key, args, kwargs)
        except TypeError:
            return self._eager
        if found is None:
            with self._lock:
                found = self._found(key, args, kwargs) or self._add(key, Example(args, kwargs))
        return found

    def _found(self, key: CallKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What was made for calls with this key, or for many sizes, among them those of this call."""
        found = self._specializations.get(key)
        if found is None:
            several = self._seen(key).several
            with contextlib.suppress(SignatureError):
                if several is not None:
                    several.bind(args, kwargs)
                    return several
        return found

    def _add(self, key: CallKey, example: Example) -> Callable[..., Any]:
        seen = self._seen(key)
        if seen.several is not None:
            wider = widened(self.model, seen.several, example)
            if wider is not None:
                seen.several = wider
                return wider
        seen.calls += 1
        if seen.calls <= self._warmup:
            return self._eager
        if self._captures >= MAX_CAPTURES:
            self._note(
                "any further one",
                f"runs in eager mode: {MAX_CAPTURES} were captured; dynamic= captures one program for many sizes",
            )
            return self._eager
        self._check_weights(thoroughly=True)
        self._captures += 1
        signature = ", ".join(str(kind) for kind in key[1] if isinstance(kind, TensorType))
        several = None if seen.fixed else self._capture_several(seen, key, example, signature)
        if several is not None:
            return several
        made = self._capture(example, signature)
        self._specializations.keep(key, made)
        return made

    def _seen(self, key: CallKey) -> Seen:
        """What is known of calls of the same form; the call that the model was optimized for is one of them."""
        if self._own is None:
            self._own = call_key(self.example.args, self.example.kwargs, aliasing=self.program.signature.aliasing)
        own = self._own
        return self._specializations.seen(own if form_of(own) == form_of(key) else key)

    def _capture_several(self, seen: Seen, key: CallKey, example: Example, signature: str) -> Executable | None:
        """What serves these sizes, those of another call, and the sizes between and around them; None: nothing does."""
        if sizes_of(seen.key) == sizes_of(key):
            return None
        try:
            executable = self._specialize(example, resized(example, sizes_of(seen.key)))
        except TsoptError as error:
            seen.fixed = True
            log.info("calls like %s are captured for one size each: %s", signature, error)
            return None
        self._note(signature, f"captured for {executable.backend}, {', '.join(map(str, executable.signature.dims))}")
        seen.several = self._refusing(executable)
        return seen.several

    def _capture(self, example: Example, signature: str) -> Callable[..., Any]:
        try:
            executable = self._specialize(example)
        except TsoptError as error:
            outcome = f"runs in eager mode: {error.what}"

            def eager(*args: Any, **kwargs: Any) -> Any:
                result = self._eager(*args, **kwargs)
                self._note(signature, outcome)  # of a call that the model itself takes; others raise what eager raises
                return result

            return eager
        self._note(signature, f"captured for {executable.backend}")
        return self._refusing(executable)

    def _note(self, signature: str, outcome: str) -> None:
        log.info("call with a new signature (%s): %s", signature, outcome)
        if (signature, outcome) not in self.report.signatures:
            self.report = self.report.with_signature(signature, outcome)

    def profile(self) -> Profile:
        """Times the layers of a call, on the example: op by op in torch, and in the engine that won.

        If the winner runs in int8, the same engine is timed in float32 as well, and `report.quantization` has both
        times from then on. Takes about as long as compiling the model once more for each of these.

        Returns:
            A row for each layer, in milliseconds for a call; printed, it is a table.

        Raises:
            UsageError: the model is not on the CPU.
            WeightsChangedError: the model's weights have changed since.
        """
        self._check_weights(thoroughly=True)
        winner = Candidate(PLAIN.name) if self.executable is None else Candidate.parse(self.report.winner_key)
        variant, int8 = self.quantized or (FP32, self.program)
        threads = None if self.executable is None else self.executable.options.get("threads")
        with protected(self.model, written=self.program.state.values()):
            inputs = [value.clone() for value in flat_inputs(self.program, self.example)]
            programs = {FP32: self.program, variant: int8}
            found = profile(self.report.model, programs, winner, inputs, threads)
        if self.quantized is not None and winner.title in found.engines:
            times = (found.by_place(candidate.title) for candidate in (winner.in_full_precision(), winner))
            self.report = self.report.with_layer_times(*times)
        return found

    def save(self, path: str | Path) -> Path:
        """Writes a bundle that `tsopt.load` reads. Atomic: the bundle is complete or not written at all.

        If eager won, the optimized program is verified and stored, to be run by torch.

        Raises:
            BundleError: the path cannot be written, or something else is there.
            AccuracyError: eager won, and the optimized program does not compute the same values.
            WeightsChangedError: eager won or weights are shared, and the model's weights have changed since.
        """
        executable = self.executable or self.verified("eager")
        # With other weights, the model is not the reference for the bundle.
        outlived = self._weights is not None and self._weights.changed()
        model = executable if self.executable is not None and outlived else self.model
        return store.save(executable, path, model, self.example, self.report)

    def verified(self, backend: str, **options: Any) -> Executable:
        """The optimized program compiled with another backend and verified against the model, for export.

        If the winner runs in int8 and the backend supports its variant, the exported program is in int8 too.

        Raises:
            BackendError: the backend does not support the program, or fails.
            AccuracyError: it does not compute the same values as the model.
            WeightsChangedError: the model's weights have changed since, and some of the old ones are gone.
        """
        self._check_weights(thoroughly=True)
        variant, program = self.quantized or (FP32, self.program)
        if variant not in info_of(backend).lowered:
            variant, program = FP32, self.program
        executable = compile(program, backend, **options)
        if variant != FP32 and self.executable is not None:
            executable.precision, executable.tolerance = variant, self.executable.tolerance
        try:
            verify(self.model, executable, self.example, program=self.program, precision=executable.precision)
        except AccuracyError as error:
            if self._weights is None or not self._weights.touched():
                raise
            raise WeightsChangedError(
                CHANGED.format(self.report.model),
                why="the program was compiled with the old weights and no longer matches the model",
                fix="optimize the model again",
            ) from error
        return executable

    def __repr__(self) -> str:
        return f"<tsopt.Optimized {self.report.model} on {self.backend}, {self.report.why}>"
