"""Validates dynamic sizes that a program was not traced with, and narrows its ranges to those that work.

A range is accepted if the program was run at both ends and in between, and was correct.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tsopt.compiler.calls.conditions import ALWAYS
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Dim
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.dims import with_upper_ends
from tsopt.compiler.sizes.generalize import NotGeneral
from tsopt.compiler.sizes.specialize import sizes_in, traced_sizes, work_at
from tsopt.errors import AccuracyError, CaptureError, SignatureError, summary_of
from tsopt.runtime.backends.backend import Grows, compile, get_backend
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.judge import HeldOut
from tsopt.runtime.checking.other_sizes import ModelAtSizes, is_too_large
from tsopt.runtime.checking.tried_sizes import NEAR, beside, corners, with_ones

FURTHER = 2  # times the largest example: how far a range goes that nobody has given an end
LEAST = 8  # and this far at least
MUCH = 1e8  # numbers that a call computes: a range ends at the largest example rather than at such a call


@dataclass(frozen=True, slots=True)
class ValidatedRanges:
    """A program, and for one of many sizes what its promise was tried at.

    Attributes:
        program: its Dims have the ranges that were checked.
        held_out: the sizes, with eager's answers.
        notes: where a range is smaller than what was asked for, and why.
        limits: the Dims with the ranges that the capture allows.
    """

    program: Program
    held_out: tuple[HeldOut, ...] = ()
    notes: tuple[str, ...] = ()
    limits: tuple[Dim, ...] = ()

    def checked_with(self, optimized: Program) -> ValidatedRanges:
        """This, where the passes have left it right at all sizes that were tried.

        Raises:
            NotGeneral: they have not.
        """
        run = compile(optimized, "eager", share_weights=True)
        for item in self.held_out:
            failure = failure_of(run, item.oracle)
            if failure:
                raise NotGeneral(
                    "the program after the passes is correct only at some sizes", why=f"at {item}: {failure}"
                )
        return self

    @property
    def checked(self) -> str:
        """`batch: 1..32, checked at 1, 2, 7, 32`."""
        parts = []
        for dim in self.program.signature.dims:
            sizes = sorted({item.sizes[dim.name] for item in self.held_out})
            parts.append(f"{dim}, checked at {', '.join(map(str, sizes))}")
        parts += [f"only where {condition}" for condition in self.program.signature.decisive]
        return "; ".join(parts)


def validate_ranges(
    model: Callable[..., Any],
    program: Program,
    *examples: Example,
    seed: int,
    wanted: Mapping[str, Mapping[int, Any]] | None = None,
) -> ValidatedRanges:
    """Runs a captured program by torch at the ends of its ranges and between them, and makes its promise fit.

    Args:
        examples: calls; the values of the first are taken for other sizes as well.
        wanted: the dynamic dimensions as the user has written them. An upper end that is given there is reached if
            possible; other dimensions are tried up to twice the largest example.

    Raises:
        CaptureError: it is not right between the ends.
    """
    asked = ModelAtSizes(model, examples[0], seed)
    run = compile(program, "eager", share_weights=True)
    program = _tied(asked, program, run, examples)
    known = [sizes_in(program.signature, item) for item in examples]
    search = _Search(asked, program, compile(program, "eager", share_weights=True), known[0])
    limits, whole = program.signature.dims, with_upper_ends(wanted or {}, program.signature)
    dims = tuple(search.range_of(dim, [sizes[dim.name] for sizes in known], whole=dim.name in whole) for dim in limits)
    program = replace(program, signature=replace(program.signature, dims=dims))
    held_out = tuple(answers_at_other_sizes(model, program, examples[0], seed=seed))
    for item in held_out:
        failure = failure_of(search.run, item.oracle)
        if failure:
            raise CaptureError(
                f"the captured program is wrong at {item}",
                why=failure,
                fix="leave dynamic out: each size is captured when it is first called",
            )
    if dims and not held_out:
        raise CaptureError(
            "no size other than that of the example could be tried",
            why="the model fails at other sizes, its inputs would be larger than 1 GB, or on a GPU an index might not "
            "exist",
            fix="leave dynamic out: each size is captured when it is first called",
        )
    return ValidatedRanges(program, held_out, tuple(search.notes), limits)


def answers_at_other_sizes(
    model: Callable[..., Any], program: Program, example: Example, *, seed: int, is_reference: bool = True
) -> Iterator[HeldOut]:
    """Eager's answers at the ends of a program's ranges and between them, where the model takes such sizes.

    Args:
        program: its Dims have upper ends.
        is_reference: whether its graph is right at other sizes.
    """
    asked = ModelAtSizes(model, example, seed, is_reference)
    for sizes in corners(program.signature):
        served = program.signature.unmet(sizes) is None and not is_too_large(program.signature, sizes)
        oracle = asked.answers_at(program, sizes) if served else None
        if oracle is not None:  # the model may take two ends one by one, and not together
            yield HeldOut(sizes, oracle)


def verify_at_other_sizes(
    model: Callable[..., Any], run: Executable, program: Program, example: Example, *, seed: int, **accuracy: Any
) -> None:
    """Compares an executable for many sizes with the model at the ends of its ranges and between them.

    Args:
        program: the captured program; for a single size or for many.
        accuracy: how accurate the executable has to be, as `Oracle.judge` takes it.

    Raises:
        AccuracyError: it does not compute the same values.
    """
    example = example.as_captured(run.signature)
    known = sizes_in(run.signature, example)
    dims = tuple(
        dim if dim.high is not None else replace(dim, high=max(FURTHER * known[dim.name], LEAST) // dim.step * dim.step)
        for dim in run.signature.dims
    )
    if not program.signature.dims and run.reference is not None:
        program = run.reference
    for_many = bool(program.signature.dims)
    if not for_many:
        program = replace(program, signature=run.signature)
    program = replace(program, signature=replace(program.signature, dims=dims, conditions=run.signature.conditions))
    for item in answers_at_other_sizes(model, program, example, seed=seed, is_reference=for_many):
        failure = failure_of(run, item.oracle, **accuracy)
        if failure:
            raise AccuracyError(
                f"{run.backend} does not compute the same values as the model at {item}",
                why=failure,
                fix="use another backend, or a smaller range of sizes",
            )


def widened(model: Callable[..., Any], executable: Executable, example: Example, *, seed: int = 0) -> Executable | None:
    """The executable with ranges that a call is in, and twice its sizes if that is right; None if the call is not.

    Args:
        executable: with the program that was captured as its reference.
    """
    if executable.reference is None or not executable.limits:
        return None
    dims = executable.signature.dims
    example = example.as_captured(executable.signature)
    run = executable.called_as(replace(executable.signature, dims=executable.limits))
    try:
        run.bind(example.args, example.kwargs)
    except SignatureError:
        return None
    sizes = sizes_in(run.signature, example)
    program = replace(executable.reference, signature=run.signature)
    accuracy = {"precision": executable.precision, "tolerance": executable.tolerance}
    search = _Search(ModelAtSizes(model, example, seed), program, run, sizes, accuracy=accuracy)
    if search.why_not(sizes):
        return None
    wider = tuple(search.wider(dim, limit, sizes[dim.name]) for dim, limit in zip(dims, executable.limits, strict=True))
    if not all(dim.admits(sizes[dim.name]) for dim in wider):
        return None
    reached = tuple(
        replace(new, high=None if old.high is None else max(old.high, sizes[old.name]))
        for old, new in zip(dims, wider, strict=True)
    )
    for found in (wider, reached):
        made = executable.called_as(replace(executable.signature, dims=found))
        if _may_grow(executable, found) and not search.is_wrong_at_one(found):
            return made
    return None


def _may_grow(executable: Executable, dims: tuple[Dim, ...]) -> bool:
    """Whether the engine of an executable computes the integers right that occur in wider ranges."""
    backend, program = get_backend(executable.place or executable.backend), executable.reference
    if not isinstance(backend, Grows) or program is None:
        return True
    narrow, wide = (replace(program.signature, dims=item) for item in (executable.signature.dims, dims))
    return backend.may_grow(replace(program, signature=narrow), replace(program, signature=wide))


def _tied(asked: ModelAtSizes, program: Program, run: Executable, examples: Sequence[Example]) -> Program:
    """The program, with one Dim for sizes that are the same wherever the model runs and the program is right.

    The graph need not say that they are: a mask that is read by positions may have more rows than the tokens, and
    kernels read what they need of keys and values that do not fit.
    """
    traced = traced_sizes(program.signature)
    known = [traced, *(sizes_in(program.signature, item) for item in examples)]
    captured = program
    is_right = cache(lambda: _right(asked, captured, run, traced))
    for first, second in itertools.combinations(traced, 2):
        dims = {dim.name: dim for dim in program.signature.dims}
        if first not in dims or second not in dims or any(sizes[first] != sizes[second] for sizes in known):
            continue
        apart = [{**traced, name: beside(program.signature, dims[name], traced[name])} for name in (first, second)]
        if any(map(program.signature.unmet, apart)):
            continue
        if not all(_right(asked, captured, run, sizes) for sizes in apart) and is_right():
            program = replace(program, signature=program.signature.tied(dims[first], dims[second]))
    return program


def _right(asked: ModelAtSizes, program: Program, run: Executable, sizes: Mapping[str, int]) -> bool:
    """Whether the model runs at these sizes, and the program as it does."""
    if not asked.runs_at(program, sizes) or not asked.runs_at(program, sizes, run):  # before more is asked of the model
        return False
    oracle = asked.answers_at(program, sizes)
    return oracle is not None and not failure_of(run, oracle)


@dataclass
class _Search:
    """Looks for the ends of ranges.

    Attributes:
        run: the captured program by torch.
        usual: the sizes of the example.
        notes: ends that were asked for and cannot be.
        accuracy: how accurate the program has to be, as `Oracle.judge` takes it.
    """

    asked: ModelAtSizes
    program: Program
    run: Callable[..., Any]
    usual: Mapping[str, int]
    notes: list[str] = field(default_factory=list)
    accuracy: Mapping[str, Any] = field(default_factory=dict)

    def range_of(self, dim: Dim, known: Sequence[int], *, whole: bool) -> Dim:
        """The Dim with ends at which the model runs and the program is right; those of the examples are, as it is."""
        low = -(-dim.low // dim.step) * dim.step
        high = max(FURTHER * max(known), LEAST)
        if dim.high is not None:
            high = dim.high if whole else min(dim.high, high)
        high = max(high // dim.step * dim.step, low)
        if not whole and work_at(self.program, {**self.usual, dim.name: high}) > MUCH:
            high = max(known)
        return replace(dim, low=self._lowest(dim, low, min(known)), high=self._highest(dim, high, max(known)))

    def wider(self, dim: Dim, limit: Dim, size: int) -> Dim:
        """The Dim with a range that a size is in, and twice the size if it was too large; unchanged if 1 is wrong."""
        if dim.high is None or size <= dim.high:
            # Of 0 and 1, each is right or wrong by itself.
            between = range(size + dim.step, min(dim.low, ALWAYS), dim.step)
            if any(self.why_not({**self.usual, dim.name: other}) for other in between):
                return dim
            return replace(dim, low=min(dim.low, size))
        high = FURTHER * size if limit.high is None else min(FURTHER * size, limit.high)
        high = high // dim.step * dim.step
        if work_at(self.program, {**self.usual, dim.name: high}) > MUCH:
            high = size
        return replace(dim, high=self._highest(limit, high, size))

    def _lowest(self, dim: Dim, low: int, known: int) -> int:
        # Of 0 and 1, each is right or wrong by itself.
        alone = range(low, min(ALWAYS, known), dim.step)
        wrong = [(size, why) for size in alone if (why := self.why_not(self._served(dim, size, dim.step)))]
        if alone and not wrong:
            return low
        self.notes += [f"excluded {dim.name} {size}: {why}" for size, why in wrong]
        tried = low = wrong[-1][0] + dim.step if wrong else low
        while tried < known:
            why = self.why_not(self._served(dim, tried, dim.step))
            if not why:
                break
            if tried == low and not wrong:
                self.notes.append(f"excluded {dim.name} {tried}: {why}")
            tried = min(max(tried + dim.step, 2 * tried), known) if tried > 1 else tried + dim.step
        return tried

    def _highest(self, dim: Dim, high: int, known: int) -> int:
        tried = high
        while tried > known:
            why = self.why_not(self._served(dim, tried, -dim.step))
            if not why:
                break
            if tried == high and dim.high is not None:
                self.notes.append(f"excluded {dim.name} {tried}: {why}")
            tried = max((tried + known) // 2 // dim.step * dim.step, known) if tried - known > dim.step else known
        return tried

    def is_wrong_at_one(self, dims: Sequence[Dim]) -> bool:
        """Whether the program is wrong at sizes of 0 or 1, which torch.export takes for another program."""
        highest = {dim.name: self.usual[dim.name] if dim.high is None else dim.high for dim in dims}
        pairs = zip(with_ones(dims, highest), with_ones(dims, self.usual), strict=True)
        tried = (
            next((sizes for sizes in pair if self._can_be_tried(sizes, but_much=sizes is pair[0])), None)
            for pair in pairs
        )
        return any(sizes is not None and bool(self.why_not(sizes)) for sizes in tried)

    def _can_be_tried(self, sizes: Mapping[str, int], *, but_much: bool) -> bool:
        """Whether the model runs at these sizes.

        Args:
            but_much: they are more than those of the call: not if MUCH would be computed.
        """
        signature = self.program.signature
        served = signature.unmet(sizes) is None and not is_too_large(signature, sizes)
        served = served and not (but_much and work_at(self.program, sizes) > MUCH)
        return served and self.asked.runs_at(self.program, sizes)

    def _served(self, dim: Dim, size: int, step: int) -> dict[str, int]:
        """The sizes of the example, but one at or next to an end of its range: the first that no condition excludes."""
        row = (size + i * step for i in range(NEAR))
        near = [{**self.usual, dim.name: other} for other in row if other == size or dim.admits(other)]
        return next((sizes for sizes in near if self.program.signature.unmet(sizes) is None), near[0])

    def why_not(self, sizes: Mapping[str, int]) -> str:
        failed = self.program.signature.unmet(sizes)
        if failed is not None:
            return f"the model was captured for sizes where {failed}"
        if is_too_large(self.program.signature, sizes):
            return "not tried, because its inputs would be larger than 1 GB"
        if not self.asked.survives(self.program, sizes):
            return "an index might not exist, and a failed assert would make the GPU unusable"
        oracle = self.asked.answers_at(self.program, sizes)
        return (
            "the model itself fails at this size" if oracle is None else failure_of(self.run, oracle, **self.accuracy)
        )


def failure_of(run: Callable[..., Any], oracle: Oracle, **accuracy: Any) -> str:
    """Why a candidate is wrong; empty if it is correct."""
    try:
        verdict = oracle.judge(run, **accuracy)
    except Exception as error:  # the program's, where the model has none
        return summary_of(error)
    return "" if verdict.ok else verdict.reason
