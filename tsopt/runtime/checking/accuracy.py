"""Verifies candidates: the verdict on one, by eager's answers on several input sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example, as_example
from tsopt.compiler.calls.memory import overlap
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.precision_names import FP32, INTEGER_VARIANTS
from tsopt.errors import AccuracyError, BackendError
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.compare import TOLERANCES, Comparison, bit_equal, compare
from tsopt.runtime.checking.criterion import RELATIVE_ERROR
from tsopt.runtime.checking.eager_answers import FEW, EagerAnswers
from tsopt.runtime.checking.expected import Expected, answers, difference_in_structure, difference_when_repeated
from tsopt.runtime.checking.inputs import EXTREME, ZEROS, is_ordinary
from tsopt.runtime.checking.verdict import ORDER, Verdict

# Limits of the relative difference to eager (root of the sum of squares) in a lower precision. Inputs that are a
# hundred times too large show overflows, but drive softmax to where the last digit of a score decides.
LIMITS = {"tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2, **dict.fromkeys(INTEGER_VARIANTS, RELATIVE_ERROR)}
WIDER = {"large": 10.0}
# How far a lower precision may round an element, relative to it: half a unit in its last place. For int8, half a step
# of the largest element: smaller ones are rounded by more, so this is a lower bound.
STEPS = {"tf32": 2**-11, "bf16": 2**-9, "fp16": 2**-11, **dict.fromkeys(INTEGER_VARIANTS, 2**-8)}
UNUSUAL = "differs from eager on NaN, infinities or denormals"
TIED = "differs from eager if all inputs are zero"  # ties may be broken in another order
UNSTABLE = "differs from eager where rounding an input changes the outputs as much"
NEAR_ZERO = 1e-6  # the largest output of a model whose differences in absolute terms say nothing
OPEN = "open"  # the test of an output that a tie decides there
# Parts of what a candidate is judged on: the first input sets; a single call on the example; all but the example.
FIRST, ONE_CALL, MADE_UP = "first", "one call", "made up"


class Oracle:
    """The verdicts on candidates, by eager's answers, which are computed once.

    Args:
        model, example, program, seed, state, few, only, beside_others: see EagerAnswers.
        known: an oracle of the same model with another seed; see EagerAnswers.
        strict_specials: what differs on NaN and infinities is wrong, not a note.

    Raises:
        AccuracyError: see EagerAnswers.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        example: Example,
        program: Program | None,
        *,
        seed: int = 0,
        state: Sequence[torch.Tensor] = (),
        few: bool = False,
        strict_specials: bool = False,
        only: str = "",
        beside_others: bool = False,
        known: Oracle | None = None,
    ) -> None:
        asked: dict[str, Any] = {"seed": seed, "state": state, "few": few, "only": only}
        before: EagerAnswers | None = None if known is None else known.eager
        self.eager: EagerAnswers = EagerAnswers(
            model, example, program, **asked, beside_others=beside_others, known=before
        )
        self._strict_specials = strict_specials

    @property
    def expected(self) -> list[Expected]:
        """Eager's answers: on the example first."""
        return self.eager.expected

    @property
    def skipped(self) -> list[str]:
        """Input sets that candidates are not compared on, and why."""
        return self.eager.skipped

    def judge(
        self,
        candidate: Callable[..., Any],
        *,
        exact: bool = False,
        precision: str = FP32,
        part: str = "",
        tolerance: float | None = None,
    ) -> Verdict:
        """The verdict on a candidate.

        Args:
            precision: what it computes products in.
            part: FIRST, ONE_CALL or MADE_UP, for one that is also judged on all input sets, before or later.
            tolerance: of the relative error on the example, for a candidate in a lower precision that a Criterion
                judges on real data. On the other inputs, which are made up, only types, structure and where NaN and
                infinities are decide then.

        Raises:
            Exception: whatever the candidate raises.
        """
        done: list[tuple[str, float, float]] = []
        notes: list[str] = []
        test, worst = "bits", 0.0
        first: list[tuple[torch.Tensor, torch.Tensor]] = []
        for expected in self._among(part):
            kind = expected.inputs.kind
            decides = exact or self._strict_specials or not expected.unusual
            usual = LIMITS.get(precision)
            limit = usual and usual * WIDER.get(kind, 1.0)
            if usual and tolerance is not None:
                limit = tolerance if kind == "example" else math.inf
            try:
                found = self._judged(candidate, expected, exact, limit, usual, STEPS.get(precision, 0.0), first)
            except Exception as error:
                if decides:
                    raise
                notes.append(f"{UNUSUAL}: the candidate raises {type(error).__name__}")
                continue
            if not found.ok and not self._is_wrong(expected, found, exact):
                why = UNSTABLE if found.test == "undecided" else UNUSUAL if expected.unusual else TIED
                notes.append(f"{why}: {found.reason}")
                continue
            if not decides:
                continue
            done.append((kind, found.max_difference, expected.largest or 0.0))
            worst = max(worst, found.max_difference if is_ordinary(kind) else 0.0)
            if not found.ok:
                return self._verdict(False, found.test, worst, done, reason=found.reason)
            test = max(test, found.test, key=ORDER.index)
        if not all(bit_equal(leaf, kept) for leaf, kept in first):
            reason = "an output of the first call was overwritten by a later call"
            return self._verdict(False, "type", worst, done, reason=reason)
        said = tuple(dict.fromkeys(notes))[:1]  # one example says it
        largest = self.eager.largest_output([kind for kind, *_ in done])
        if worst > 0 and largest < NEAR_ZERO:
            said += (f"outputs are near zero (at most {largest:.0e}), so the difference says little",)
        return self._verdict(True, test, worst, done, notes=said)

    def _among(self, part: str) -> list[Expected]:
        """Eager's answers that a candidate is compared with; MADE_UP is the example where nothing could be made up."""
        example, *made_up = self.expected[: FEW if part == FIRST else None]
        if part == ONE_CALL:
            return [replace(example, again=())]
        return made_up if part == MADE_UP and made_up else [example, *made_up]

    def _verdict(
        self,
        ok: bool,
        test: str,
        worst: float,
        done: Sequence[tuple[str, float, float]],
        *,
        reason: str = "",
        notes: tuple[str, ...] = (),
    ) -> Verdict:
        """Args: done: the kind of each input set, the largest difference there, and the largest output."""
        kinds, differences, sizes = zip(*done, strict=True) if done else ((), (), ())
        skipped = tuple(self.skipped)
        return Verdict(ok, test, worst, kinds, skipped, reason, notes, differences, sizes)

    def _is_wrong(self, expected: Expected, found: Comparison, exact: bool) -> bool:
        """Whether a difference is wrong; otherwise it is a note."""
        if exact or self._strict_specials:
            return True
        kind = expected.inputs.kind
        if (kind.startswith(EXTREME) or kind in WIDER) and found.test == "undecided":
            return False
        return not expected.unusual and found.test != OPEN

    def _judged(
        self,
        candidate: Callable[..., Any],
        expected: Expected,
        exact: bool,
        limit: float | None,
        usual: float | None,
        step: float,
        first: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> Comparison:
        """The comparison on one input set. The outputs of the first call are kept in `first`.

        Args:
            usual: the limit for calls that are repeated: a candidate has to agree with itself.
            step: of the rounding in a lower precision.
        """
        kind = expected.inputs.kind
        with self.eager.frozen(None, self.eager.state, kind):
            call = expected.inputs.clone()
            given, _ = flatten((call.args, call.kwargs))
            leaves, structure, effects = outcome_of(candidate, call.args, call.kwargs)
            leaves = [self._lasting(leaf) for leaf in leaves]
            spoilt = self._spoilt(expected, [*given, *self.eager.state], exact, limit, usual)
            kept = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if not getattr(candidate, "returns_copies", False):
                kept = [leaf.detach().clone() for leaf in kept]
            again = [
                answers(candidate, inputs, kept if inputs is expected.inputs else ()) for inputs, _ in expected.again
            ]
        if not first:
            first += zip([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], kept, strict=True)
        failure = difference_in_structure(expected, structure, effects, leaves) or spoilt
        if failure:
            return Comparison(False, "type", 0.0, f"{failure} ({kind} input)")
        test, worst = "bits", 0.0
        noted: Comparison | None = None
        for position, (value, reference) in enumerate(zip(leaves, expected.leaves, strict=True)):
            found = self._compare(value, reference, position, expected, exact, limit)
            if (
                found.test == "limit"
                and not found.ok
                and self._is_amplified(reference, position, expected, limit, step)
            ):
                found = replace(found, test="undecided")
            if kind == ZEROS and not found.ok and self._is_open(expected, position, found, limit):
                found = replace(found, test=OPEN)
            worst = max(worst, found.max_difference)
            if not found.ok:
                reason = f"{expected.name(position)} on the {kind} input: {found.reason}"
                failed = Comparison(False, found.test, worst, reason)
                if self._is_wrong(expected, found, exact):
                    return failed
                noted = noted or failed
                continue
            test = max(test, found.test, key=ORDER.index)
        if noted is not None:
            return noted
        failure = difference_when_repeated(expected, kept, again, exact, usual)
        return Comparison(not failure, "type" if failure else test, worst, failure)

    def _is_open(self, expected: Expected, position: int, found: Comparison, limit: float | None) -> bool:
        """Whether a tie may decide an output on zeros. In a lower precision, its rounding may too."""
        is_of_values = found.test not in ("type", "places")
        return is_of_values and (limit is not None or self.eager.is_open(expected, position))

    def _lasting(self, leaf: Any) -> Any:
        """The output, copied if it shares memory with the model's state, which is restored after the call."""
        return leaf.detach().clone() if any(overlap(leaf, tensor) for tensor in self.eager.state) else leaf

    def _is_amplified(
        self, reference: torch.Tensor, position: int, expected: Expected, limit: float | None, step: float
    ) -> bool:
        """Whether rounding the inputs as a lower precision does moves an output beyond the limit, on too large inputs.

        Eager itself computes the outputs from the rounded inputs. A softmax of scores that are a hundred times too
        large takes another value then, whatever computes it.
        """
        if expected.inputs.kind not in WIDER:
            return False
        moved = self.eager.neighbours(expected, position, step)
        return any(not compare(near, reference, limit=limit).ok for near in moved)

    def _spoilt(
        self,
        expected: Expected,
        after: Sequence[torch.Tensor],
        exact: bool,
        limit: float | None,
        usual: float | None,
    ) -> str:
        """How the inputs or the model's state differ from eager after the call.

        Args:
            usual: the limit for inputs that eager leaves alone: a criterion judges only what it has written.
        """
        before, _ = flatten((expected.inputs.example.args, expected.inputs.example.kwargs))
        for position, (value, reference) in enumerate(zip(after, expected.written, strict=True)):
            is_kept = position < len(before) and bit_equal(before[position], reference)
            found = compare(value, reference, exact=exact, limit=usual if is_kept else limit)
            if not found.ok:
                what = "an input" if position < len(before) else "the model's state"
                return f"{what} differs from eager after the call: {found.reason}"
        return ""

    def _compare(
        self,
        value: torch.Tensor,
        reference: torch.Tensor,
        position: int,
        expected: Expected,
        exact: bool,
        limit: float | None,
    ) -> Comparison:
        found = compare(
            value,
            reference,
            exact=exact,
            limit=limit,
            size=0.0 if limit is None else self.eager.size_on_the_example(position, expected),
            reference64=lambda: self.eager.wide_output(expected, position),
            neighbours=lambda: self.eager.neighbours(expected, position),
            moved=lambda: self.eager.moved(expected, position),
        )
        if found.ok or found.test == "type" or exact or reference.dtype in TOLERANCES:
            return found
        if self.eager.decided_by_rounding(expected, position, value, reference):
            return replace(found, ok=True, test="decision", reason="")
        return found


def verify(
    model: Callable[..., Any],
    candidate: Callable[..., Any],
    example_input: Any,
    *,
    program: Program | None = None,
    exact: bool = False,
    precision: str = FP32,
    seed: int = 1,
) -> Verdict:
    """Compares a candidate with the model on inputs like the example.

    Args:
        program: the captured program, for the float64 reference; None captures it.
        exact: require bit-equal values.
        precision: the precision of the candidate's matrix products; below `fp32`, larger differences are accepted.
        seed: seed of the generated inputs.

    An Executable with a tolerance, because it was accepted on real data, is compared on the example only. One for many
    sizes is compared at others than those of the example as well.

    Raises:
        AccuracyError: the candidate does not compute the same values.
        BackendError: the candidate fails.
    """
    example = as_example(example_input)
    if program is None:
        from tsopt.compiler.capture.capture import capture

        program = capture(model, example, allow_nan=True)
    oracle = Oracle(model, example, program, seed=seed)
    tolerance = candidate.tolerance if isinstance(candidate, Executable) else None
    try:
        verdict = oracle.judge(candidate, exact=exact, precision=precision, tolerance=tolerance)
    except Exception as error:  # the candidate's own failure
        raise BackendError(
            "the candidate fails on an input that the model accepts", why=f"{type(error).__name__}: {error}"
        ) from error
    if not verdict.ok:
        raise AccuracyError("the candidate does not compute the same values as the model", why=verdict.reason)
    if isinstance(candidate, Executable) and candidate.signature.dims:
        from tsopt.runtime.checking.held_out_sizes import verify_at_other_sizes

        accuracy: dict[str, Any] = {"exact": exact, "precision": precision}
        if tolerance is not None:  # which is of real data, and there is none of these sizes
            accuracy["tolerance"] = math.inf
        verify_at_other_sizes(model, candidate, program, example, seed=seed, **accuracy)
    return verdict


def is_exact(program: Program, candidate: Candidate) -> bool:
    """Whether bit-equality is required: torch's own kernels and only EXACT rewrites."""
    return candidate.info.same_kernels and candidate.precision == FP32 and program.numerics == Numerics.EXACT
