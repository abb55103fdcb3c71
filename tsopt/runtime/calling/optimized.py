"""Optimized: the result of `optimize`. Runs the winner; a new signature is captured once, or runs in eager mode."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.snapshot import iterator_in
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.values import flat_inputs
from tsopt.compiler.precision_names import FP32
from tsopt.compiler.protect import protected
from tsopt.errors import AccuracyError, SignatureError, TsoptError, WeightsChangedError
from tsopt.runtime.backends.backend import compile
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.backends.table import PLAIN, info_of
from tsopt.runtime.bundles import store
from tsopt.runtime.calling.ambient import Unserved, objection_to, untraced
from tsopt.runtime.calling.audit import LOOK_AT, Audits, executable_difference
from tsopt.runtime.calling.drop_in import DropIn
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.new_signatures import NewSignatures
from tsopt.runtime.calling.own_mode import OwnMode
from tsopt.runtime.calling.served import NOT_COMPILED, NOT_FASTER
from tsopt.runtime.calling.signature_guard import leaves_of
from tsopt.runtime.calling.specializations import UNTOLD
from tsopt.runtime.calling.weights import Weights
from tsopt.runtime.checking.accuracy import verify
from tsopt.runtime.profiling.engines import profile
from tsopt.runtime.profiling.profile import Profile
from tsopt.runtime.racing.outcomes import warn
from tsopt.runtime.report import Report

log = logging.getLogger("tsopt")
POLICIES = ("capture", "eager", "error")
CHANGED = "the weights of {} have changed since `optimize`"
NOW_AND_THEN = 16  # calls between checks of the weights, if eager won
EAGER_WON = "eager won, so calls run the model itself; what is timed here is the optimized program"
_gradients = torch.is_grad_enabled  # looked up faster than an attribute of torch
ABSENT = object()  # where a call has no positional argument


class Optimized(DropIn):
    """A drop-in for a model: it takes the same calls and returns the same values, without gradients.

    Attributes:
        report: the race, and why the winner won.
        program: the optimized program.
        backend: name of the winner's backend; `eager` if the model itself is the fastest.
        executable: the winner; None if the model itself runs, also after an audit has found a difference.
        example, new_signatures: the call that it was optimized for, and what serves others.
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
        threads: int | None = None,
    ) -> None:
        self.model, self.program, self.report, self.quantized = model, program, report, quantized
        self.backend = "eager" if executable is None else executable.backend
        self.executable, self._threads, self._policy = executable, threads, on_new_signature
        self.example = example.renewed()  # what the user makes of theirs is their own
        self._lenient = "error" not in (on_new_signature, on_gradients)  # the model itself may serve whatever is called
        self._unserved = Unserved(model, report.model, on_gradients)
        self._leaves = leaves_of(program.signature) if executable is None else executable.accepts
        self.new_signatures = NewSignatures(
            *(model, self.example, program.signature.aliasing, specialize),
            first=executable,
            warmup=warmup,
            eager=self._eager,
            check=lambda: self._check_weights(thoroughly=True),
            ready=self._refusing,
            note=self._note,
        )
        self._audits = Audits(0) if audits is None or executable is None else audits
        self._weights, self._shares, self._mode = weights, share_weights, OwnMode(model)
        self._is_inside, self._eager_calls = False, 0
        self._on_difference: Callable[[str], None] | None = None
        if executable is None:
            self._audits.left = NOW_AND_THEN  # there is nothing to audit; what is looked for is new weights and modes
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
            mode = self._mode  # looked at here: the model's own work may be no more than a microsecond
            if mode.root.training is mode.flag and not mode.is_other_inside and self._lenient and not _gradients():
                self._eager_calls += 1
                return self.model(*args, **kwargs)
            return self._by_the_model(args, kwargs)
        leaves = executable.accepts(args, kwargs)
        if leaves is not None:
            return executable.run_leaves(leaves, args, kwargs)
        found = self.new_signatures.accepting(args, kwargs)
        if found is not None:
            executable, leaves = found
            return executable.run_leaves(leaves, args, kwargs)
        if self._is_inside and self.new_signatures.skips():
            return self._eager(*args, **kwargs)
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
        if executable is None or not self._mode.holds():
            return None  # in training mode the model is no reference
        if self._weights is not None and self._weights.touched() and self._weights.changed():
            self._outlived()
            return None
        with torch.no_grad():
            found = executable_difference(executable, self.model, Example(args, kwargs))
        changes = self._weights.changes() if found and self._weights is not None and not self._shares else None
        if changes is not None and not changes.only_resized:
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

    def unwatched(self, on_difference: Callable[[str, bool], None] | None = None) -> None:
        """For a caller that watches the weights itself, and makes no call that only the model can serve. Calls of the
        model itself are made in its modes.

        If an audit finds a difference, `on_difference` gets it, and whether the weights were written unseen.
        """
        if on_difference is not None:
            weights = self._weights
            self._on_difference = lambda found: on_difference(found, weights is not None and weights.changed())
        self._weights, self._is_inside = None, True
        self.executable = None if self.executable is None else self.executable.after(None)
        if self.executable is None:
            self._audits.end()

    def _check_weights(self, *, thoroughly: bool) -> None:
        """Raises WeightsChangedError if the model no longer has the weights that were compiled."""
        weights = self._weights
        if self.executable is None or weights is None or not (thoroughly or weights.touched()):
            return
        changes = weights.changes()
        if changes is None:
            return
        if changes.only_resized and self._agrees_with_the_model():
            weights.adopt(changes)
            return
        raise WeightsChangedError(
            CHANGED.format(self.report.model),
            where=str(changes) or None,
            why="compiled signatures keep the old weights, but a new signature or export would use the new ones",
            fix="optimize the model again",
        )

    def _agrees_with_the_model(self) -> bool:
        assert self.executable is not None
        with torch.no_grad():
            return executable_difference(self.executable, self._mode.in_eval(), self.example) == ""

    def _retire(self, found: str) -> None:
        """Falls back to eager for every signature: what is wrong with one may be wrong with all."""
        self.executable, self.backend = None, "eager"
        self._audits.end()
        if self._on_difference is not None:
            self._on_difference(found)
            return
        name = self.report.model
        self._say(f"{name} runs in eager mode from now on: an audit found a difference ({found}); {LOOK_AT}")

    def _say(self, text: str) -> None:
        if text not in self.report.audits:
            self.report = self.report.with_audit(text)
            warn(f"tsopt: {text}", UserWarning)

    def serving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable | None:
        """The executable that would serve a call, if there already is one; None if the model itself would."""
        executable = self.executable
        if executable is None or executable.accepts(args, kwargs) is not None:
            return executable
        with contextlib.suppress(SignatureError, *UNTOLD):
            executable.bind(args, kwargs)
            return executable
        accepting = self.new_signatures.accepting(args, kwargs)
        if accepting is not None:
            return accepting[0]
        try:
            found = self.new_signatures.found(args, kwargs)
        except (*UNTOLD, TsoptError):  # what cannot be told is not served by what was made
            return None
        return found if isinstance(found, Executable) else None

    def _eager_looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._audits.left = NOW_AND_THEN
        self._mode.look()
        if self._weights is not None and self._weights.touched():
            self._say(f"{CHANGED.format(self.report.model)}: eager calls use the new ones")
        return self(*args, **kwargs)

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        self._eager_calls += 1
        with contextlib.nullcontext() if self._is_inside else torch.no_grad():
            found = self._mode.as_optimized(self.model)(*args, **kwargs)
        self.new_signatures.after_eager(args, kwargs)
        return found

    def _thorough(self, executable: Executable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reason = objection_to(args, kwargs)
        if reason:
            return self._unserved(reason, args, kwargs)
        try:
            leaves = executable.bind(args, kwargs)
        except (SignatureError, *UNTOLD):
            if self._policy == "error":
                raise
            return self._by_specialization(args, kwargs)
        return executable.run_leaves(leaves, args, kwargs)

    def _by_specialization(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._specialization(args, kwargs)
        if not isinstance(found, Executable):
            self._check_weights(thoroughly=False)
            return found(*args, **kwargs)
        try:
            leaves = found.bind(args, kwargs)
        except SignatureError as error:  # the model asks what no capture answers as this call does
            self._note("a guard fails", f"runs in eager mode: {error.what}")
            return self._eager(*args, **kwargs)
        return found.run_leaves(leaves, args, kwargs)

    def _specialization(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if self._policy == "eager":
            return self._eager
        if iterator_in(args, kwargs) is not None:
            self._note("an iterator among the arguments", "runs in eager mode: a call consumes it")
            return self._eager
        return self.new_signatures.serving(args, kwargs)

    def _note(self, signature: str, outcome: str) -> None:
        log.info("call with a new signature (%s): %s", signature, outcome)
        if (signature, outcome) not in self.report.signatures:
            self.report = self.report.with_signature(signature, outcome)

    @property
    def in_eager(self) -> Counter[str]:
        """How many calls the model itself has served, by reason."""
        return +Counter({NOT_COMPILED if self.executable is not None else NOT_FASTER: self._eager_calls})

    def _tensors(self) -> list[torch.Tensor]:
        own = super()._tensors() or [*self.program.weights.values()]
        return own or [*flat_inputs(self.program, self.example)]

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
        notes = [] if self.executable is not None else [EAGER_WON]
        with protected(self.model, written=self.program.state.values()):
            inputs = [value.clone() for value in flat_inputs(self.program, self.example)]
            programs = {FP32: self.program, variant: int8}
            found = profile(self.report.model, programs, winner, inputs, self._threads, notes)
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
        changes = None if self._weights is None else self._weights.changes()
        outlived = changes is not None and not changes.only_resized
        model = executable if self.executable is not None and outlived else self._mode.in_eval()
        return store.save(executable, path, model, self.example, self.report)

    def verified(self, backend: str, **options: Any) -> Executable:
        """The optimized program compiled with another backend and verified against the model, for export.

        If the winner runs in int8 and the backend supports its variant, the exported program is in int8 too.

        Raises:
            BackendError: the backend does not support the program, or fails.
            AccuracyError: it does not compute the same values as the model, for the example or at another size that
                the program is for.
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
            verify(self._mode.in_eval(), executable, self.example, program=self.program, precision=executable.precision)
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
