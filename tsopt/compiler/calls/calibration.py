"""Reads calibration data (a DataLoader, an iterable, arrays in files) as calls of the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tsopt.compiler.calls.calibration_again import counted, owned, unreadable
from tsopt.compiler.calls.calibration_files import FORMS, Named, Unnamed, from_files, with_tensors
from tsopt.compiler.calls.calibration_forms import Placed, Unlike, named_parts, ways_to_read
from tsopt.compiler.calls.calibration_kept import MOST, Kept, most_like
from tsopt.compiler.calls.calibration_order import (
    Item,
    Measure,
    halves,
    in_turn,
    spread,
    spread_out,
)
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.narrow_floats import widened
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.structure import unflatten
from tsopt.compiler.graph.origin import user_frame
from tsopt.compiler.random_state import random_state_kept
from tsopt.errors import SignatureError, UsageError, summary_of

MEASURED = 8  # calls that the loss of each layer is measured on
CHOOSING = 8  # calls that each choice of layers is tried on
JUDGING = 16  # calls that candidates are judged by, at least, before any are left to the choice of layers alone
FOR_BOTH = "a single input cannot be split, so it sets the scales and judges the candidates"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calls of a model on real data, each with the sizes of the example.

    Attributes:
        calls: at most MOST.
        read: what was made of the data.
        is_split: whether half of the calls are held out; otherwise all of them serve for both.
    """

    calls: tuple[Example, ...]
    read: str
    is_split: bool = True

    @property
    def observed(self) -> tuple[Example, ...]:
        """The calls that scales are computed from: one of each two, in their order, in which a state goes on."""
        return tuple(halves(self.calls)[0]) if self.is_split else self.calls

    @property
    def measured(self) -> tuple[Example, ...]:
        """Those of them that the loss of each layer is measured on."""
        count = len(self.observed)
        return tuple(self.observed[place] for place in spread(min(MEASURED, count), count))

    @property
    def held_out(self) -> tuple[Example, ...]:
        """The others, or the only one."""
        return spread_out(halves(self.calls)[1] or self.calls) if self.is_split else self.calls

    @property
    def choosing(self) -> tuple[Example, ...]:
        """The calls that each choice of layers is tried on."""
        return self.held_out[:CHOOSING]

    @property
    def judging(self) -> tuple[Example, ...]:
        """The calls that candidates are judged by: others than those that have chosen, if there are enough."""
        rest = self.held_out[CHOOSING:]
        return rest if len(rest) >= JUDGING else self.held_out

    @property
    def text(self) -> str:
        """What was made of the data, for the report."""
        return f"{self.read}; {FOR_BOTH}" if self.is_split and len(self.calls) == 1 else self.read


@contextmanager
def called_on_data(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of calls on calibration data into a UsageError."""
    try:
        yield
    except kinds as error:
        raise UsageError(
            "the model fails on a calibration input",
            where=user_frame(error),
            why=summary_of(error),
            fix="leave out the inputs that the model does not take",
        ) from error


def read_calibration(
    data: Any,
    signature: Signature,
    example: Example,
    progress: Callable[[str], None] = lambda text: None,
    end: float = math.inf,
) -> Calibration:
    """Reads calibration data, as much of it as is needed, and as memory and time allow.

    Batches of other sizes are split or concatenated along the first axis. What the data draws (each loop over a
    DataLoader draws a seed) leaves the random state as it was.

    Args:
        data: a DataLoader, a Dataset or an iterable of calls, each like an `example_input`, or of (input, target); or a
            path.
        signature: of the captured program.
        example: a call of it.
        end: when reading should be over, by the monotonic clock; a few inputs are read in any case.

    Raises:
        UsageError: there is none, it cannot be read, does not fit the signature, or holds NaN.
    """
    reader, kept, limit = _Reader(signature, example), Kept(end), ""
    with random_state_kept():
        for item in _items(data, lambda item: _measured(item, signature, example), end, reader.notes):
            made = spread_out([*enumerate(reader.calls(item.value, item.places[0], MOST))])
            for position, (row, call) in enumerate(made):
                is_spare = position >= item.share  # where items hold many calls
                if not kept.has_room(is_spare):
                    break
                # Copies: a loader may fill the same memory with the next item.
                own = Example(*owned((call.args, call.kwargs)))
                own = own if signature.aliasing else own.apart()
                kept.add((item.place_of(row, len(made)), row), own, is_spare)
            progress(f"{kept.shares} inputs")
            if kept.is_enough:
                limit = kept.why_no_more()
                break
    calls = kept.in_order()
    have = len(reader.waiting[0]) if reader.waiting else 0
    if not calls and reader.waiting:
        size = signature.user_inputs[0].type.shape[0]
        raise UsageError(
            f"calibration holds {have} of the {size} rows of one input",
            why=f"the first axis of the example is {size}",
            fix="pass more data, or a smaller example_input",
        )
    if not calls:
        raise UsageError("calibration is empty", why="it holds no input", fix=FORMS)
    left = [f"{counted(have, 'row')} left over"] if have and len(calls) < MOST else []
    said = (counted(len(calls), "input"), limit, *reader.notes, *left)
    return Calibration(tuple(calls), "; ".join(filter(None, said)))


def _measured(item: Any, signature: Signature, example: Example) -> tuple[float, int]:
    """How many calls an item yields, up to MOST, or which part of one; and how many like these are needed."""
    reader = _Reader(signature, example)
    made = list(reader.calls(item, 0, MOST))
    part = len(reader.waiting[0]) / signature.user_inputs[0].type.shape[0] if reader.waiting else 0
    return len(made) + part, most_like(made[0] if made else example)


def _items(data: Any, measure: Measure, end: float, notes: list[str]) -> Iterator[Item]:
    """The items, as `in_turn` reads them, or of files; an error of the data names its place."""
    if isinstance(data, (str, Path)):
        yield from (Item((number,), item) for number, item in enumerate(from_files(Path(data))))
        return
    is_dataset = not isinstance(data, Iterable) and hasattr(type(data), "__getitem__")
    if isinstance(data, (torch.Tensor, Example, Mapping)) or not (is_dataset or isinstance(data, Iterable)):
        raise UsageError(f"calibration is a {type(data).__name__}, not a collection of inputs", fix=FORMS)
    count = 0
    try:
        for item in in_turn(data, measure, end, notes):
            yield item
            count += 1
    except UsageError:
        raise
    except Exception as error:
        raise unreadable(error, count) from error


class _Reader:
    """Turns items of the data into calls.

    Attributes:
        notes: what was left out of them, for the report.
        waiting: rows of each input that do not fill a call yet.
    """

    def __init__(self, signature: Signature, example: Example) -> None:
        self._signature, self._example = signature, example
        _, self._structure = signature.flattened(example.args, example.kwargs)
        self.notes: list[str] = []
        self.waiting: list[torch.Tensor] = []

    def calls(self, item: Any, number: int, most: int) -> Iterator[Example]:
        """The calls that an item yields; of more, some from all of it."""
        failure: SignatureError | None = None
        item = with_tensors(item)
        for made, note in itertools.chain(self._readings(item), self._batches_of_one(item)):
            try:
                call = self._on_its_device(made)
                fitting = self._fitting(call, most)
            except SignatureError as error:
                failure = failure or error
                continue
            for said in (note, *self._infinities_in(call, number)):
                if said and said not in self.notes:
                    self.notes.append(said)
            yield from fitting
            return
        raise UsageError(
            f"calibration input {number} does not fit the model",
            why=None if failure is None else "; ".join(filter(None, (failure.what, failure.why))),
            fix=self._fix_of(item),
        )

    def _fix_of(self, item: Any) -> str:
        """What to do about an item that does not fit."""
        names = [one.name for one in self._signature.user_inputs]
        by_name = isinstance(item, Named) and not set(names) <= set(item)
        if by_name or (isinstance(item, Unnamed) and len(item) < len(names)):
            return f"save all inputs of a call in one file by numpy.savez, under their names: {', '.join(names)}"
        return "pass inputs like example_input; only the batch size may differ"

    def _infinities_in(self, call: Example, number: int) -> Iterator[str]:
        """Notes on inputs with infinities, as masks have them; a layer that they reach stays in float32.

        Raises:
            UsageError: there is NaN in an input.
        """
        leaves, _ = self._signature.flattened(call.args, call.kwargs)
        for one, leaf in zip(self._signature.user_inputs, leaves, strict=True):
            if not leaf.is_floating_point() or bool(widened(leaf).isfinite().all()):
                continue
            if bool(leaf.isnan().any()):
                raise UsageError(
                    f"calibration input {number} contains NaN",
                    why="no scale can be computed from it",
                    fix="leave this input out",
                )
            yield f"infinities in {one.name}"

    def _fitting(self, call: Example, most: int) -> list[Example]:
        """Fits a call to the signature: as it is, or appended to the pending rows and cut into batches.

        Raises:
            SignatureError: it differs in more than its batch size.
        """
        try:
            self._signature.bind(call.args, call.kwargs)
            return [call]
        except SignatureError:
            leaves, structure = self._signature.flattened(call.args, call.kwargs)
            if structure != self._structure or not are_rows(self._signature, leaves):
                raise
        rows = [torch.cat(both) for both in zip(self.waiting, leaves, strict=True)] if self.waiting else leaves
        size = self._signature.user_inputs[0].type.shape[0]
        count = len(rows[0]) // size
        starts = [place * size for place in spread(min(count, most), count)]
        made = [Example(*unflatten(structure, [row[start : start + size] for row in rows])) for start in starts]
        for item in made[:1]:
            self._signature.bind(item.args, item.kwargs)
        self.waiting = [row[count * size :].clone() for row in rows]
        return made

    def _on_its_device(self, call: Example) -> Example:
        """Moves a call to the device of the model; loaders usually yield CPU tensors."""
        devices = [one.type.device for one in self._signature.user_inputs]
        leaves, structure = self._signature.flattened(call.args, call.kwargs)
        given, leaves = leaves, list(map(with_tensors, leaves))
        if len(leaves) != len(devices) or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return call
        if all(a is b and str(a.device) == at for a, b, at in zip(given, leaves, devices, strict=True)):
            return call
        return Example(*unflatten(structure, [leaf.to(at) for leaf, at in zip(leaves, devices, strict=True)]))

    def _readings(self, item: Any) -> Iterator[tuple[Example, str]]:
        """The possible readings of an item, most likely first, each with a note on what it leaves out."""
        if isinstance(item, Example):
            yield item, ""
            return
        if isinstance(item, Named):
            yield from self._by_name(item)
            return
        if isinstance(item, Mapping) and all(isinstance(key, str) for key in item):
            wanted = {name: value for name, value in item.items() if name in self._example.kwargs}
            others = [name for name in item if name not in wanted]
            yield Example((), dict(item)), ""
            if wanted and others:
                yield Example((), wanted), f"{', '.join(others)} ignored"
            if self._example.args:
                yield from self._by_name(Named(item))
            yield from self._in_other_containers(item)
            return
        if isinstance(item, (list, tuple)):
            yield self._as_the_example(tuple(item)), ""
            yield from self._in_other_containers(item)
            if len(item) in (1, 2):
                targets = "read as (input, target), targets ignored" if len(item) == 2 else ""
                for made, note in self._readings(item[0]):
                    yield made, "; ".join(filter(None, (note, targets)))
            return
        yield self._as_the_example((item,)), ""
        yield from self._in_other_containers(item)

    def _in_other_containers(self, item: Any) -> Iterator[tuple[Example, str]]:
        """The example's containers around the tensors of an item: one argument may be a dict, or an object."""
        for put in ways_to_read(self._structure, item):
            placed = Placed()
            try:
                put(placed)
            except Unlike:
                continue
            leaves = [placed.leaves[index] for index in range(len(placed.leaves))]
            note = f"{', '.join(dict.fromkeys(placed.left_out))} ignored" if placed.left_out else ""
            yield Example(*unflatten(self._structure, leaves)), note
        parts = named_parts(item)
        if parts is not None and not isinstance(item, Mapping):
            yield from self._by_name(Named(parts))

    def _batches_of_one(self, item: Any) -> Iterator[tuple[Example, str]]:
        """The readings of an item that has no batch axis, as a Dataset's has none."""
        ranks = [len(one.type.shape) for one in self._signature.user_inputs]
        for made, note in self._readings(item):
            leaves, structure = self._signature.flattened(made.args, made.kwargs)
            if len(leaves) != len(ranks) or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                continue
            rows = [leaf[None] if leaf.dim() == rank - 1 else leaf for leaf, rank in zip(leaves, ranks, strict=True)]
            yield (
                Example(*unflatten(structure, rows)),
                "; ".join(filter(None, (note, "read as single rows, without a batch axis"))),
            )

    def _as_the_example(self, values: tuple[Any, ...]) -> Example:
        """Values in the places of the example's arguments, positional or by keyword."""
        if not self._example.args and len(values) == len(self._example.kwargs):
            return Example((), dict(zip(self._example.kwargs, values, strict=True)))
        return Example(values)

    def _by_name(self, item: Mapping[str, Any]) -> Iterator[tuple[Example, str]]:
        names = [one.name for one in self._signature.user_inputs]
        if set(names) <= set(item):
            args, kwargs = unflatten(self._structure, [item[name] for name in names])
            others = [name for name in item if name not in names]
            yield Example(args, kwargs), f"{', '.join(others)} ignored" if others else ""
        yield Example((), dict(item)), ""


def pieces(signature: Signature, leaves: Sequence[Any]) -> list[list[Any]]:
    """Splits tensors along their first axes into batches of the signature's size, and drops the remainder.

    Returns an empty list unless all inputs share one batch size.
    """
    if not are_rows(signature, leaves):
        return []
    size = signature.user_inputs[0].type.shape[0]
    return [[leaf[start : start + size] for leaf in leaves] for start in range(0, len(leaves[0]) - size + 1, size)]


def are_rows(signature: Signature, leaves: Sequence[Any]) -> bool:
    """Whether tensors match the inputs of a signature except for a common batch size."""
    kinds = [item.type for item in signature.user_inputs]
    if len(kinds) != len(leaves) or not leaves or not all(kind.shape and kind.shape[0] for kind in kinds):
        return False
    alike = all(
        isinstance(leaf, torch.Tensor)
        and leaf.dim()
        and (leaf.shape[1:], str(leaf.dtype)) == (kind.shape[1:], f"torch.{kind.dtype}")
        for leaf, kind in zip(leaves, kinds, strict=True)
    )
    return alike and len({len(leaf) for leaf in leaves}) == len({kind.shape[0] for kind in kinds}) == 1
