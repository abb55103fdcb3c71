"""Verifies candidates: eager's answers on several input sets, and the verdict on a candidate."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example, as_example
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.graph.origin import user_frame
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.values import Values, laid_out
from tsopt.compiler.precision_names import FP32, INT8_VARIANTS
from tsopt.compiler.protect import protected
from tsopt.compiler.random_state import seed_torch
from tsopt.errors import AccuracyError, BackendError
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.compare import TOLERANCES, Comparison, bit_equal, compare
from tsopt.runtime.checking.criterion import RELATIVE_ERROR
from tsopt.runtime.checking.expected import Expected, answers, difference_in_structure, difference_when_repeated
from tsopt.runtime.checking.inputs import EXTREME, OF_THE_SAME_SIZE, SPECIAL, ZEROS, InputSet, input_sets
from tsopt.runtime.checking.neighbours import neighbours
from tsopt.runtime.checking.reference64 import Reference64, decided_within_rounding
from tsopt.runtime.checking.time_limits import at_most
from tsopt.runtime.checking.verdict import ORDER, Verdict

# Limits of the relative difference to eager (root of the sum of squares) in a lower precision. Inputs that are a
# hundred times too large show overflows, but drive softmax to where the last digit of a score decides.
LIMITS = {"tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2, **dict.fromkeys(INT8_VARIANTS, RELATIVE_ERROR)}
WIDER = {"large": 10.0}
UNUSUAL = "differs from eager on NaN, infinities or denormals"
TIED = "differs from eager if all inputs are zero"  # ties may be broken in another order
UNSTABLE = "differs from eager where rounding an input changes the outputs as much"
NEAR_ZERO = 1e-6  # the largest output of a model whose differences in absolute terms say nothing
REPEATED_CALLS = 2  # calls after the first, on the example
WRONG_ON_ZEROS = ("type", "places")  # of the tests that fail there; other differences may be ties
FEW = 2  # input sets: the example, and values drawn from it
# Seconds, and multiples of the call on the example: the time that the model may take on generated inputs.
PATIENCE, SLOWER = 20.0, 50.0


class Oracle:
    """Eager's answers on several input sets, computed once, and the verdicts on candidates.

    Args:
        model: the user's model; called under protection, in `seeds` of its own.
        program: the captured program before any pass: the float64 reference.
        state: what the model may write beside its inputs; the program says it where there is one.
        few: two input sets, where there are several oracles.
        strict_specials: what differs on NaN and infinities is wrong, not a note.
        only: a name for the example, where that is the only input set and is called once, whatever its answers are.
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
    ) -> None:
        self.program, self.only = program, only
        self.strict_specials = strict_specials
        self.seed = seed
        self.expected: list[Expected] = []
        self.skipped: list[str] = []
        self._wide: dict[str, dict[fx.Node, Any] | None] = {}
        self._patience = PATIENCE
        self._state = list(program.state.values()) if program is not None else list(state)
        if program is not None and not program.signature.aliasing:
            example = example.apart()
        made_up = [InputSet(only, example)] if only else input_sets(example, seed, None if few else program)
        for inputs in made_up[: FEW if few else None]:
            self._ask(model, inputs, self._state)
        if all(expected.unusual for expected in self.expected):
            raise AccuracyError(
                "the model returns no finite value on any input, so nothing can be verified",
                why="; ".join(self.skipped)[:300],
                fix="pass a realistic example_input",
            )

    def _ask(self, model: Callable[..., Any], inputs: InputSet, state: Sequence[torch.Tensor]) -> None:
        is_example = inputs.kind in ("example", self.only)
        start = time.perf_counter()
        try:
            # A data-dependent loop may never end on generated values.
            with self._frozen(model, state, inputs.kind), nullcontext() if is_example else at_most(self._patience):
                call = inputs.clone()
                given, _ = flatten((call.args, call.kwargs))
                leaves, structure, effects = outcome_of(model, call.args, call.kwargs)
                leaves = [leaf.detach().clone() for leaf in leaves]
                written = tuple(tensor.detach().clone() for tensor in (*given, *self._state))
                again = tuple(
                    answers(model, inputs) for _ in range(REPEATED_CALLS if is_example and not self.only else 0)
                )
        except Exception as error:  # the model's own refusal of an input that we made up
            if is_example:
                raise AccuracyError(
                    "the model fails on the example input",
                    where=user_frame(error),
                    why=f"{type(error).__name__}: {str(error)[:200]}",
                ) from error
            self.skipped.append(f"{inputs.kind}: eager raises {type(error).__name__}")
            return
        if is_example:
            self._patience = max(PATIENCE, SLOWER * (time.perf_counter() - start))
        floats = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.numel()]
        decided = any(bool(leaf.isfinite().any()) for leaf in floats)
        if inputs.kind not in (SPECIAL, self.only) and floats and not decided:
            self.skipped.append(f"{inputs.kind}: eager returns no finite value")
            return
        self.expected.append(Expected(inputs, tuple(leaves), structure, effects, written, again))

    def _frozen(self, model: Any, state: Sequence[torch.Tensor], kind: str) -> AbstractContextManager[Any]:
        return _Seeded(protected(model, written=state), self.seed, kind)

    def judge(
        self,
        candidate: Callable[..., Any],
        *,
        exact: bool = False,
        precision: str = FP32,
        few: bool = False,
        tolerance: float | None = None,
    ) -> Verdict:
        """The verdict on a candidate.

        Args:
            precision: what it computes products in.
            few: on the first input sets only, for one that has been judged on all of them before.
            tolerance: of the relative error on the example, for a candidate in a lower precision that a Criterion
                judges on real data. On the other inputs, which are made up, only types, structure and where NaN and
                infinities are decide then.

        Raises:
            Exception: whatever the candidate raises.
        """
        done: list[str] = []
        notes: list[str] = []
        test, worst = "bits", 0.0
        first: list[tuple[torch.Tensor, torch.Tensor]] = []
        for expected in self.expected[: FEW if few else None]:
            kind = expected.inputs.kind
            decides = exact or self.strict_specials or not expected.unusual
            usual = LIMITS.get(precision)
            limit = usual and usual * WIDER.get(kind, 1.0)
            if usual and tolerance is not None:
                limit = tolerance if kind == "example" else math.inf
            try:
                found = self._judged(candidate, expected, exact, limit, usual, first)
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
            done.append(kind)
            worst = max(worst, found.max_difference)
            if not found.ok:
                return Verdict(False, found.test, worst, tuple(done), tuple(self.skipped), found.reason)
            test = max(test, found.test, key=ORDER.index)
        if not all(bit_equal(leaf, kept) for leaf, kept in first):
            reason = "an output of the first call was overwritten by a later call"
            return Verdict(False, "type", worst, tuple(done), tuple(self.skipped), reason)
        said = tuple(dict.fromkeys(notes))[:1]  # one example says it
        largest = self._largest_output(done)
        if worst > 0 and largest < NEAR_ZERO:
            said += (f"outputs are near zero (at most {largest:.0e}), so the difference says little",)
        return Verdict(True, test, worst, tuple(done), tuple(self.skipped), notes=said)

    def _largest_output(self, kinds: Sequence[str]) -> float:
        """The largest finite magnitude that eager returned on these input sets."""
        ordinary = [kind for kind in kinds if kind != "large" and not kind.startswith(EXTREME)]
        leaves = (leaf for item in self.expected if item.inputs.kind in ordinary for leaf in item.leaves)
        finite = (leaf[leaf.isfinite()] for leaf in leaves if leaf.is_floating_point() and leaf.numel())
        return max((float(values.abs().max()) for values in finite if values.numel()), default=math.inf)

    def _is_wrong(self, expected: Expected, found: Comparison, exact: bool) -> bool:
        """Whether a difference is wrong; otherwise it is a note."""
        if exact or self.strict_specials:
            return True
        kind = expected.inputs.kind
        if kind.startswith(EXTREME) and found.test == "undecided":
            return False
        return not expected.unusual and (kind != ZEROS or found.test in WRONG_ON_ZEROS)

    def _judged(
        self,
        candidate: Callable[..., Any],
        expected: Expected,
        exact: bool,
        limit: float | None,
        usual: float | None,
        first: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> Comparison:
        """The comparison on one input set. The outputs of the first call are kept in `first`.

        Args:
            usual: the limit for calls that are repeated: a candidate has to agree with itself.
        """
        kind = expected.inputs.kind
        with self._frozen(None, self._state, kind):
            call = expected.inputs.clone()
            given, _ = flatten((call.args, call.kwargs))
            leaves, structure, effects = outcome_of(candidate, call.args, call.kwargs)
            spoilt = self._spoilt(expected, [*given, *self._state], exact, limit)
            kept = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
            again = [answers(candidate, expected.inputs) for _ in expected.again]
        first += [(leaf, leaf.clone()) for leaf in leaves if isinstance(leaf, torch.Tensor)] if not first else []
        failure = difference_in_structure(expected, structure, effects, leaves) or spoilt
        if failure:
            return Comparison(False, "type", 0.0, f"{failure} ({kind} input)")
        test, worst = "bits", 0.0
        noted: Comparison | None = None
        for position, (value, reference) in enumerate(zip(leaves, expected.leaves, strict=True)):
            found = self._compare(value, reference, position, expected, exact, limit)
            if kind != "large" and not kind.startswith(EXTREME):  # of ordinary size
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

    def _spoilt(self, expected: Expected, after: Sequence[torch.Tensor], exact: bool, limit: float | None) -> str:
        """How the inputs or the model's state differ from eager after the call."""
        inputs = len(expected.written) - len(self._state)
        for position, (value, reference) in enumerate(zip(after, expected.written, strict=True)):
            found = compare(value, reference, exact=exact, limit=limit)
            if not found.ok:
                what = "an input" if position < inputs else "the model's state"
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
            size=0.0 if limit is None else self._size_on_the_example(position, expected),
            reference64=lambda: self._wide_output(expected, position),
            neighbours=lambda: self._neighbours(expected, position),
        )
        if found.ok or found.test == "type" or exact or reference.dtype in TOLERANCES or self.program is None:
            return found
        wide = self._wide_values(expected)
        output = self._outputs()[position]
        if wide is not None and decided_within_rounding(self.program, output, wide, value, reference):
            return replace(found, ok=True, test="decision", reason="")
        return found

    def _size_on_the_example(self, position: int, expected: Expected) -> float:
        """The root mean square of an output there, for inputs as large as the example; otherwise 0.

        Outputs of an input that we made up, such as two logits, may be near zero by chance.
        """
        example = self.expected[0]
        if not expected.inputs.kind.startswith(OF_THE_SAME_SIZE) or position >= len(example.leaves):
            return 0.0
        leaf = example.leaves[position]
        if not leaf.is_floating_point() or not leaf.numel() or not bool(leaf.isfinite().all()):
            return 0.0
        return float(leaf.double().square().mean().sqrt())

    def _outputs(self) -> list[fx.Node]:
        program = self.program
        return [] if program is None else program.outputs[len(program.signature.writes) :]

    def _wide_output(self, expected: Expected, position: int) -> torch.Tensor | None:
        wide = self._wide_values(expected)
        return None if wide is None else wide[self._outputs()[position]]

    def _neighbours(self, expected: Expected, position: int) -> Iterator[torch.Tensor]:
        """An output of the captured program for inputs that are off by one rounding."""
        program, (leaves, _) = self.program, flatten((expected.inputs.example.args, expected.inputs.example.kwargs))
        if program is None:
            return
        for near in neighbours(leaves, self.seed):
            with self._frozen(None, self._state, expected.inputs.kind):
                value = Values.on(program, laid_out(program, near))[self._outputs()[position]]
            if not isinstance(value, torch.Tensor):  # a check in the model tells even these apart
                return
            yield value

    def _wide_values(self, expected: Expected) -> dict[fx.Node, Any] | None:
        if self.program is None:
            return None
        kind = expected.inputs.kind
        if kind not in self._wide:
            leaves, _ = flatten((expected.inputs.example.args, expected.inputs.example.kwargs))
            self._wide[kind] = (
                Reference64(self.program).run(leaves) if self._is_of_the_model(expected, leaves) else None
            )
        return self._wide[kind]

    def _is_of_the_model(self, expected: Expected, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether the captured program gives eager's own answers: float64 of another program decides nothing."""
        program = self.program
        if program is None:
            return False
        with self._frozen(None, self._state, expected.inputs.kind):
            values = Values.on(program, laid_out(program, [leaf.clone() for leaf in leaves]))
            mine = [values[node] for node in self._outputs()]
        return all(
            isinstance(value, torch.Tensor) and compare(value, reference).ok
            for value, reference in zip(mine, expected.leaves, strict=False)
        )


class _Seeded(AbstractContextManager[Any]):
    """A context entered with the same random state each time, so that dropout draws the same.

    Python's and numpy's differ from one kind of input to the next: what was drawn while tracing is not drawn again.
    """

    def __init__(self, inner: AbstractContextManager[Any], seed: int, kind: str) -> None:
        self.inner, self.seed, self.kind = inner or nullcontext(), seed, kind

    def __enter__(self) -> None:
        self.inner.__enter__()
        seed_torch(self.seed)
        random.seed(f"{self.seed} {self.kind}")
        np.random.seed(random.getrandbits(32))

    def __exit__(self, *details: Any) -> bool | None:
        return self.inner.__exit__(*details)


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

    An Executable with a tolerance, because it was accepted on real data, is compared on the example only.

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
    return verdict


def is_exact(program: Program, candidate: Candidate) -> bool:
    """Whether bit-equality is required: torch's own kernels and only EXACT rewrites."""
    return candidate.info.same_kernels and candidate.precision == FP32 and program.numerics == Numerics.EXACT
