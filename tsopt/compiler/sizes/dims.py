"""Which dimensions are dynamic: as specified by the user, or inferred from several examples."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsopt.compiler.calls.counters import counted
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Dim, Signature, dim_of
from tsopt.compiler.calls.structure import Structure, flatten, unflatten
from tsopt.errors import UsageError

Place = tuple[int, int]  # a tensor of the call, and an axis
Wanted = dict[int, dict[int, Dim | None]]  # tensor of the call -> axis -> its Dim, if named
_TEXT = re.compile(r"(?P<name>[A-Za-z_]\w*)(\[(?P<low>\d+)?\.\.(?P<high>\d+)?\])?")
SYNTAX = "name or name[low..high]"
SMALLEST = 2  # never traced with 0 or 1: torch takes these for sizes of their own kind


@dataclass(frozen=True, slots=True)
class Dynamic:
    """What is to be captured for more than one size.

    Attributes:
        axes: which.
        trace: the call that it is traced with, all of these sizes at least 2.
        traced: these sizes.
        seen: for each axis its size in each example.
        structure: of these calls, whose integers may go along with a size.
    """

    axes: Wanted
    trace: Example
    traced: dict[Place, int]
    seen: dict[Place, tuple[int, ...]]
    structure: Structure

    @property
    def calls(self) -> list[dict[Place, int]]:
        """The sizes of each example."""
        count = len(next(iter(self.seen.values())))
        return [{place: sizes[number] for place, sizes in self.seen.items()} for number in range(count)]

    @property
    def largest(self) -> int:
        """Which of the examples is traced."""
        return _largest(self.seen)


def dim(text: str | Dim) -> Dim:
    """Reads `batch` or `batch[1..32]`.

    Raises:
        UsageError: it is neither, or the range holds nothing.
    """
    if isinstance(text, Dim):
        made = text
    else:
        found = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            raise UsageError(f"invalid dimension {text!r}", fix=f"write {SYNTAX}")
        made = Dim(found["name"], int(found["low"] or 1), int(found["high"]) if found["high"] else None)
    if made.low < 0 or (made.high is not None and made.high < max(made.low, SMALLEST)):
        raise UsageError(
            f"invalid range for {made}", fix="use a range that reaches at least 2, for example batch[1..32]"
        )
    return made


def with_upper_ends(wanted: Mapping[str, Mapping[int, Any]], signature: Signature) -> frozenset[str]:
    """The names of a program's Dims for which the user has given an upper end, at one of their axes."""
    return frozenset(
        dim_of(name)[0]
        for item in signature.user_inputs
        for axis, text in wanted.get(item.name, {}).items()
        if dim(text).high is not None and item.axes and (name := item.axes[axis]) is not None
    )


def from_mapping(wanted: Mapping[Any, Any], names: Sequence[str], example: Example) -> Wanted:
    """Reads `{"x": {0: "batch"}}`.

    Args:
        names: of the tensors of the call, as the program names them.

    Raises:
        UsageError: no such input, no such axis, or not a dimension.
    """
    leaves, _ = flatten((example.args, example.kwargs))
    found: Wanted = {}
    known: dict[str, Dim] = {}
    for name, axes in wanted.items():
        if name not in names:
            raise UsageError(f"dynamic: there is no input {name!r}", fix=f"use one of: {', '.join(names)}")
        if not isinstance(axes, Mapping):
            raise UsageError(f"dynamic: {name!r} must map axes to names", fix=f'write {{"{name}": {{0: "batch"}}}}')
        position = names.index(name)
        rank = leaves[position].dim()
        for axis, text in axes.items():
            if type(axis) is not int or not -rank <= axis < rank:
                raise UsageError(f"dynamic: {name!r} has no axis {axis!r}", fix=f"use an axis from 0 to {rank - 1}")
            made = dim(text)
            if known.setdefault(made.name, made) != made:
                raise UsageError(
                    f"dynamic: {made.name} has two different ranges", fix="use the same range at every axis"
                )
            found.setdefault(position, {})[axis % rank] = made
    if not found:
        raise UsageError("dynamic does not name an axis", fix='write {"x": {0: "batch"}}')
    return found


def from_examples(examples: Sequence[Example]) -> Wanted:
    """The axes in which examples differ.

    Raises:
        UsageError: they differ in something else, or in nothing.
    """
    flat = [flatten((item.args, item.kwargs)) for item in examples]
    first, _ = flat[0]
    found: Wanted = {}
    alike = counted(flat) is not None
    for leaves, _ in flat[1:]:
        kinds = [
            (a.dtype, a.dim(), a.device) == (b.dtype, b.dim(), b.device) for a, b in zip(first, leaves, strict=False)
        ]
        if not alike or not all(kinds):
            raise UsageError(
                "the examples differ in more than their sizes",
                why="the sizes that differ between the examples become dynamic, and integers that differ by as much as "
                "one of them; everything else must be the same",
                fix="pass examples that differ only in their sizes; pass several arguments as a tuple: (x, y)",
            )
        for position, (a, b) in enumerate(zip(first, leaves, strict=True)):
            for axis, (mine, theirs) in enumerate(zip(a.shape, b.shape, strict=True)):
                if mine != theirs:
                    found.setdefault(position, {})[axis] = None
    if not found:
        raise UsageError(
            "the examples all have the same sizes",
            why="a list means several examples, and the sizes that differ between them become dynamic",
            fix="pass one example; pass several arguments as a tuple, (x, y), and a single list argument as ([x, y],)",
        )
    return found


def dynamic_of(examples: Sequence[Example], axes: Wanted) -> Dynamic:
    """What to capture: the largest example is traced, with dynamic sizes of 0 and 1 made larger.

    Raises:
        UsageError: a size is outside the range that the user has given for it, or differs from another of its name.
    """
    flat = [flatten((item.args, item.kwargs)) for item in examples]
    structure = counted(flat) or flat[0][1]
    seen = {
        (position, axis): tuple(int(leaves[position].shape[axis]) for leaves, _ in flat)
        for position, found in axes.items()
        for axis in found
    }
    named: dict[str, tuple[int, ...]] = {}
    for (position, axis), sizes in seen.items():
        given = axes[position][axis]
        if given is None:
            continue
        odd = next((size for size in sizes if not given.admits(size)), None)
        if odd is not None:
            raise UsageError(
                f"the example has {given.name} = {odd}, outside its range",
                why=f"the range is {given}",
                fix="use an example with a size in the range",
            )
        pairs = zip(named.setdefault(given.name, sizes), sizes, strict=True)
        apart = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if apart is not None:
            raise UsageError(
                f"the example has {given.name} = {apart[0]} at one axis, and {apart[1]} at another",
                why="axes of one name have the same size in every call",
                fix="give these axes different names, or use an example where they have the same size",
            )
    chosen = _largest(seen)
    traced = _enlarged(axes, seen, chosen)
    return Dynamic(axes, resized(examples[chosen], traced, structure), traced, seen, structure)


def _largest(seen: Mapping[Place, tuple[int, ...]]) -> int:
    """Which of several examples has the largest sizes."""
    totals = list(map(sum, zip(*seen.values(), strict=True)))
    return totals.index(max(totals))


def _enlarged(axes: Wanted, seen: Mapping[Place, tuple[int, ...]], chosen: int) -> dict[Place, int]:
    """The sizes of one of the examples, all of them at least 2.

    Those that are the same amount apart in all examples stay so: a model may ask for a mask that is one longer than
    the cache.
    """
    together: dict[tuple[int, ...], list[Place]] = {}
    for place, sizes in seen.items():
        # Of sizes that never differ, only the small ones: images do not grow because their batch has to.
        if len(set(sizes)) > 1 or sizes[chosen] < SMALLEST:
            together.setdefault(tuple(size - sizes[0] for size in sizes), []).append(place)
    found = {place: sizes[chosen] for place, sizes in seen.items()}
    for places in together.values():
        more = max(SMALLEST - min(found[place] for place in places), 0)
        for position, axis in places:
            size, given = found[position, axis], axes[position][axis]
            fits = given is None or given.admits(size + more)
            found[position, axis] = size + more if fits else max(size, SMALLEST)
    return found


def sampled(dims: Sequence[Dim], usual: Mapping[str, int], count: int, seed: int) -> list[dict[str, int]]:
    """Choices of sizes in the ranges of Dims, up to twice as large as usual, each size of a Dim in at most one of them.

    As many as `count`; fewer where a range holds fewer sizes, and none without Dims.
    """
    draw = random.Random(seed)
    columns = []
    for item in dims:
        high = 2 * usual[item.name] if item.high is None else min(item.high, 2 * usual[item.name])
        sizes = range(-(-item.low // item.step) * item.step, high + 1, item.step)
        drawn = draw.sample(sizes, min(count + 1, len(sizes)))
        columns.append([(item.name, size) for size in drawn if size != usual[item.name]][:count])
    return [dict(choice) for choice in zip(*columns, strict=False)]


def resized(
    example: Example, sizes: Mapping[Place, int], structure: Structure | None = None, *, share: bool = True
) -> Example:
    """The same call with other sizes; values are those of the example, over and over.

    Args:
        sizes: by tensor of the call and axis.
        structure: of the new call, if its integers are not those of the example.
        share: a tensor in two places is counted once.
    """
    leaves, own = flatten((example.args, example.kwargs), share=share)
    made = list(leaves)
    for (position, axis), size in sizes.items():
        tensor = made[position]
        if tensor.shape[axis] != size:
            if not tensor.shape[axis]:
                tensor = tensor.new_zeros([1 if i == axis else n for i, n in enumerate(tensor.shape)])
            rows = torch.arange(size, device=tensor.device) % tensor.shape[axis]
            made[position] = _like(tensor, tensor.detach().index_select(axis, rows))
    args, kwargs = unflatten(structure or own, made)
    return Example(args, kwargs)


def _like(tensor: torch.Tensor, resized: torch.Tensor) -> torch.Tensor:
    """In channels-last memory where the tensor was."""
    memory = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if memory is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=memory):
        return resized
    return resized.contiguous(memory_format=memory)
