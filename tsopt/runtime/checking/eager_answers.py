"""Eager's answers on several input sets, and what its float64 reference says of them."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.narrow_floats import widened
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.graph.origin import user_frame
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.values import Values, laid_out
from tsopt.compiler.protect import protected
from tsopt.compiler.random_state import RandomState
from tsopt.errors import AccuracyError
from tsopt.runtime.checking.compare import NOISE, are_equal, bit_equal, compare, size_of
from tsopt.runtime.checking.decisions import decided_within_rounding, may_be_decided_by_rounding, values_behind
from tsopt.runtime.checking.expected import Expected, answers
from tsopt.runtime.checking.inputs import (
    EXTREME,
    OF_THE_SAME_SIZE,
    SPECIAL,
    ZEROS,
    InputSet,
    by_column,
    input_sets,
    is_ordinary,
    sets_near,
)
from tsopt.runtime.checking.made_up import why_near, why_near_in_call
from tsopt.runtime.checking.masks import FALSE_ROWS, TRUE_ROWS
from tsopt.runtime.checking.neighbours import Answers, neighbours
from tsopt.runtime.checking.reference64 import Reference64, called_in_float64
from tsopt.runtime.checking.seeded import Seeded
from tsopt.runtime.checking.time_limits import at_most

log = logging.getLogger("tsopt")

# Seconds of eager calls for the made-up input sets, but this many at least, and which ones find most.
SECONDS, FEWEST = 2.0, 1
FIND_MOST = ("drawn-1", SPECIAL, FALSE_ROWS, "large", TRUE_ROWS, ZEROS, "random", "tiny")
FEW = 2  # input sets: the example, and values drawn from it
# Calls on the example after the first, but one if calls take longer than so many seconds; a call on another input comes
# before the last of them.
REPEATED_CALLS, LONG_CALL = 2, 0.5
# Seconds, and multiples of the call on the example: the time that the model may take on generated inputs.
PATIENCE, SLOWER = 20.0, 50.0


class EagerAnswers:
    """Eager's answers on several input sets, computed once.

    Args:
        model: the user's model; called under protection, in `seeds` of its own.
        program: the captured program before any pass: the float64 reference.
        state: what the model may write beside its inputs; the program says it where there is one.
        few: two input sets.
        only: a name for the example, where that is the only input set and is called once, whatever its answers are.
        beside_others: other threads run, whose random numbers and tensors are left alone: calls draw none, and write
            nothing but the state.
        known: the answers of the same model with another seed. Those on the example are taken from there, with their
            float64, where neither the seed nor earlier calls decide them.

    Raises:
        AccuracyError: the model fails on its example, or returns no finite value on any input set.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        example: Example,
        program: Program | None,
        *,
        seed: int,
        state: Sequence[torch.Tensor],
        few: bool,
        only: str,
        beside_others: bool = False,
        known: EagerAnswers | None = None,
    ) -> None:
        self.program, self.only, self._beside_others = program, only, beside_others
        self._model = model
        self.seed = seed
        self.expected: list[Expected] = []
        self.skipped: list[str] = []
        self._wide: dict[str, dict[fx.Node, Any] | None] = {}  # by the kind of the input set
        self._near = Answers()
        self._patience = PATIENCE
        self._by_column: dict[str, InputSet | None] = {}
        self.state = list(program.state.values()) if program is not None else list(state)
        if program is not None:
            example = example.as_captured(program.signature)
        self._example = example
        first, *others = [InputSet(only, example)] if only else self._made_up(model, example, few)
        self._draws = True  # random numbers, on the example, if that is known
        between = next((inputs for inputs in others if inputs.kind == FIND_MOST[0]), None)
        if known is None or not known._answers_again(first.kind):
            self.call_seconds = self._ask(model, first, self.state, between)
        else:
            self._take(known)
        for inputs in others[: FEW - 1] if few else self._affordable(others):
            self._ask(model, inputs, self.state)
        self._forget_needless_calls()
        if all(expected.unusual for expected in self.expected):
            raise AccuracyError(
                "the model returns no finite value on any input, so nothing can be verified",
                why="; ".join(self.skipped)[:300],
                fix="pass a realistic example_input",
            )

    @property
    def takes_long(self) -> bool:
        """Whether a call on the example does."""
        return self.call_seconds > LONG_CALL

    def _answers_again(self, kind: str) -> bool:
        """Whether the model gives the same answers on the example in each call."""
        first = self.expected[0]
        is_same = all(
            inputs is first.inputs and len(found) == len(first.leaves) and all(map(bit_equal, found, first.leaves))
            for inputs, found in first.again
        )
        return first.inputs.kind == kind and not self._draws and bool(first.again) and is_same

    def _take(self, known: EagerAnswers) -> None:
        """The answers on the example, as they were."""
        self.expected.append(known.expected[0])
        self.call_seconds, self._patience, self._draws = known.call_seconds, known._patience, known._draws
        kind = known.expected[0].inputs.kind
        if kind in known._wide:
            self._wide[kind] = known._wide[kind]

    def _made_up(self, model: Callable[..., Any], example: Example, few: bool) -> list[InputSet]:
        """The example, and the input sets that the model, and candidates, can be called with."""
        if self.program is not None:
            why = why_near(self.program)
        else:
            with self.frozen(model, self.state, ""):
                why = why_near_in_call(model, InputSet("", example).clone())
        if not why:
            return input_sets(example, self.seed, None if few else self.program)
        self.skipped.append(f"values far from those of the example: {why}")
        return sets_near(example, self.seed)

    def _affordable(self, made_up: Sequence[InputSet]) -> list[InputSet]:
        """Those that there is time for, the ones that find most first: each is a call of every candidate, twice."""
        count = max(FEWEST, int(SECONDS / max(self.call_seconds, 1e-9)))
        ranks = {kind: rank for rank, kind in enumerate(FIND_MOST)}
        chosen = {item.kind for item in sorted(made_up, key=lambda item: ranks.get(item.kind, len(ranks)))[:count]}
        if left_out := [item.kind for item in made_up if item.kind not in chosen]:
            self.skipped.append(f"{', '.join(left_out)}: a call takes {self.call_seconds:.1f} s")
        return [item for item in made_up if item.kind in chosen]

    def _forget_needless_calls(self) -> None:
        """Leaves out the call in between where the model answers it as if it were the first one: it keeps no state."""
        for position, expected in enumerate(self.expected):
            made = [(inputs, found) for inputs, found in expected.again if inputs is not expected.inputs]
            fresh = next((item for item in self.expected for inputs, _ in made if item.inputs is inputs), None)
            if (
                fresh is not None
                and are_equal(made[0][1], fresh.leaves)
                and are_equal(expected.again[-1][1], expected.leaves)
            ):
                again = tuple(item for item in expected.again if item[0] is expected.inputs)
                self.expected[position] = replace(expected, again=again)

    def _ask(
        self,
        model: Callable[..., Any],
        inputs: InputSet,
        state: Sequence[torch.Tensor],
        between: InputSet | None = None,
    ) -> float:
        """Asks the model, and returns about how many seconds a call takes.

        Args:
            between: a call before the last repeated one: what it leaves in the model, the model may remember.
        """
        is_example = inputs.kind in ("example", self.only)
        start, asks_again = time.perf_counter(), False
        seconds: list[float] = []
        try:
            # A data-dependent loop may never end on generated values.
            with self.frozen(model, state, inputs.kind), nullcontext() if is_example else at_most(self._patience):
                call, drawn = inputs.clone(), RandomState.now()
                given, _ = flatten((call.args, call.kwargs))
                leaves, structure, effects = outcome_of(model, call.args, call.kwargs)
                leaves = [leaf.detach().clone() for leaf in leaves]
                written = tuple(tensor.detach().clone() for tensor in (*given, *self.state))
                first = time.perf_counter() - start
                again: list[tuple[InputSet, tuple[torch.Tensor, ...]]] = []
                for number in range(REPEATED_CALLS if is_example and not self.only else 0):
                    is_last = number == REPEATED_CALLS - 1 or min([first, *seconds]) > LONG_CALL
                    if between is not None and is_last:
                        fresh = self._answered(model, between)
                        if fresh is None:  # it may have written state before it failed
                            asks_again = not again
                            break
                        again.append(fresh)
                    begun = time.perf_counter()
                    again.append((inputs, answers(model, inputs, leaves)))
                    seconds.append(time.perf_counter() - begun)
                    if min([first, *seconds]) > LONG_CALL:
                        break
                if is_example:
                    self._draws = self._beside_others or not drawn.is_current()
        except Exception as error:  # the model's own refusal of an input that we made up
            if is_example:
                raise AccuracyError(
                    "the model fails on the example input",
                    where=user_frame(error),
                    why=f"{type(error).__name__}: {str(error)[:200]}",
                ) from error
            other = None if isinstance(error, TimeoutError) else self._with_codes_by_column(inputs)
            if other is not None:
                return self._ask(model, other, state)
            self.skipped.append(f"{inputs.kind}: eager raises {type(error).__name__}")
            return 0.0
        if asks_again:
            return self._ask(model, inputs, state)
        if is_example:
            self._patience = max(PATIENCE, SLOWER * (time.perf_counter() - start))
        floats = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.numel()]
        decided = any(bool(widened(leaf).isfinite().any()) for leaf in floats)
        if inputs.kind not in (SPECIAL, self.only) and floats and not decided:
            self.skipped.append(f"{inputs.kind}: eager returns no finite value")
        else:
            self.expected.append(Expected(inputs, tuple(leaves), structure, effects, written, tuple(again)))
        return min(seconds, default=first)

    def _answered(
        self, model: Callable[..., Any], inputs: InputSet
    ) -> tuple[InputSet, tuple[torch.Tensor, ...]] | None:
        """The answers on an input set that was made up, or on its other form; None if the model refuses both."""
        for form in filter(None, (inputs, self._with_codes_by_column(inputs))):
            try:
                with at_most(self._patience):
                    return form, answers(model, form)
            except Exception as error:  # the model's own refusal of an input that we made up
                log.debug("%s: eager raises %s", form.kind, type(error).__name__)
        return None

    def _with_codes_by_column(self, inputs: InputSet) -> InputSet | None:
        """The input set in another form, once; None if it is that one already, or there is none."""
        if inputs.kind.startswith(EXTREME):  # its integers are what it is about
            return None
        if inputs.kind not in self._by_column:
            self._by_column[inputs.kind] = by_column(inputs, self._example, self.seed)
        found = self._by_column[inputs.kind]
        return None if found is inputs else found

    def frozen(self, model: Any, state: Sequence[torch.Tensor], kind: str) -> AbstractContextManager[Any]:
        """In which a model or a candidate is called on a kind of input set."""
        if self._beside_others:
            return protected(model, written=state, among_threads=True, draws=False)
        return Seeded(protected(model, written=state), self.seed, kind)

    def largest_output(self, kinds: Sequence[str]) -> float:
        """The largest finite magnitude that eager returned on these input sets."""
        ordinary = list(filter(is_ordinary, kinds))
        sizes = (item.largest for item in self.expected if item.inputs.kind in ordinary)
        return max((size for size in sizes if size is not None), default=math.inf)

    def size_on_the_example(self, position: int, expected: Expected) -> float:
        """The root mean square of an output there, for inputs as large as the example; otherwise 0.

        Outputs of an input that we made up, such as two logits, may be near zero by chance.
        """
        example = self.expected[0]
        if not expected.inputs.kind.startswith(OF_THE_SAME_SIZE) or position >= len(example.leaves):
            return 0.0
        leaf = widened(example.leaves[position])
        if not leaf.is_floating_point() or not leaf.numel() or not bool(leaf.isfinite().all()):
            return 0.0
        return size_of(leaf)

    def decided_by_rounding(
        self, expected: Expected, position: int, value: torch.Tensor, reference: torch.Tensor
    ) -> bool:
        """Whether an output differs from eager only in decisions that rounding may have made: see `decisions`."""
        wide = self._wide_values(expected)
        if wide is None:
            return False
        output = self._outputs()[position]
        sources = values_behind(output)
        try:
            with self.frozen(None, self.state, expected.inputs.kind), at_most(self._patience):
                own = dict(zip(sources, self._own_values(expected).compute(sources), strict=True))
                return decided_within_rounding(output, wide, own, value, reference, self._own_values(expected))
        except TimeoutError:  # by other decisions, a loop of the model may not end
            return False

    def is_open(self, expected: Expected, position: int) -> bool:
        """Whether rounding, or the order of equal values, may decide what an output is; also if that is not known."""
        wide = self._wide_values(expected)
        if wide is None:
            return True
        output, reference = self._outputs()[position], expected.leaves[position]
        if not compare(reference, wide[output].to(reference.dtype)).ok:
            return True
        with self.frozen(None, self.state, expected.inputs.kind):
            own = self._own_values(expected)
            return may_be_decided_by_rounding(output, own.in_float64(()), own)

    def _own_values(self, expected: Expected) -> Values:
        """Those of the captured program, to be asked for while the random state is frozen."""
        assert self.program is not None
        leaves, _ = flatten((expected.inputs.example.args, expected.inputs.example.kwargs))
        return Values.on(self.program, laid_out(self.program, [leaf.clone() for leaf in leaves]))

    def _outputs(self) -> list[fx.Node]:
        program = self.program
        return [] if program is None else program.outputs[len(program.signature.writes) :]

    def wide_output(self, expected: Expected, position: int) -> torch.Tensor | None:
        """An output in float64; None without a program that computes what the model does."""
        wide = self._wide_values(expected)
        return None if wide is None else wide[self._outputs()[position]]

    def neighbours(self, expected: Expected, position: int, step: float = 0.0) -> Iterator[torch.Tensor]:
        """An output of the captured program for inputs that are off by one rounding.

        Args:
            step: of the rounding, relative to the element; 0: that of its dtype.
        """
        program, kind = self.program, expected.inputs.kind
        leaves, _ = flatten((expected.inputs.example.args, expected.inputs.example.kwargs))
        if program is None:
            return

        def ask(near: list[torch.Tensor]) -> list[Any]:
            with self.frozen(None, self.state, kind):
                return Values.on(program, laid_out(program, near)).compute(self._outputs())

        for number, near in enumerate(neighbours(leaves, self.seed, step)):
            value = self._near.answer((kind, step), number, partial(ask, near))[position]
            if not isinstance(value, torch.Tensor):  # a check in the model tells even these apart
                return
            yield value

    def moved(self, expected: Expected, position: int) -> Iterator[torch.Tensor]:
        """The model's own output for such inputs: nothing if there is a program, or if the model rejects them."""
        kind, leaves = expected.inputs.kind, flatten((expected.inputs.example.args, expected.inputs.example.kwargs))
        if self.program is not None:
            return
        # The model may compute, and so round, in a finer dtype than that of its inputs.
        floats = [leaf for leaf in (*leaves[0], expected.leaves[position]) if leaf.is_floating_point()]
        step = min((torch.finfo(leaf.dtype).eps for leaf in floats), default=0.0)

        def ask(near: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            with self.frozen(self._model, self.state, kind), at_most(self._patience):
                return answers(self._model, InputSet(kind, Example(*unflatten(leaves[1], near))))

        for number, near in enumerate(itertools.islice(neighbours(leaves[0], self.seed, step), NOISE)):
            try:
                found = self._near.answer((kind, step), number, partial(ask, near))
            except Exception as error:  # the model's own refusal of an input that we made up
                log.debug("%s, off by one rounding: eager raises %s", kind, type(error).__name__)
                return
            if len(found) == len(expected.leaves):
                yield found[position]

    def _wide_values(self, expected: Expected) -> dict[fx.Node, Any] | None:
        if self.program is None:
            return None
        kind = expected.inputs.kind
        if kind not in self._wide:
            leaves, _ = flatten((expected.inputs.example.args, expected.inputs.example.kwargs))
            with self.frozen(None, self.state, kind):
                found = self._own_values(expected).compute(self._outputs())
            with self.frozen(None, self.state, kind), at_most(self._patience):
                wide = Reference64(self.program).run(leaves)
            # Float64 of a program that does not compute what the model does decides nothing.
            is_of_the_model = are_equal(found, expected.leaves) or (
                wide is not None and self._is_equal_in_float64(expected, wide)
            )
            self._wide[kind] = wide if is_of_the_model else None
        return self._wide[kind]

    def _is_equal_in_float64(self, expected: Expected, wide: Mapping[fx.Node, Any]) -> bool:
        """Whether the model differs from the captured program by rounding only.

        Eager may use other kernels than it does while it is captured: fused attention, for one.
        """
        with self.frozen(self._model, self.state, expected.inputs.kind), at_most(self._patience):
            found = called_in_float64(self._model, expected.inputs.clone())
        return found is not None and are_equal(found, [wide[node] for node in self._outputs()])
