"""Results that alias: an input or a weight itself, a view of one, or a view of another result.

In eager, a write to such a result is visible in what it aliases; an engine returns copies. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tsopt.compiler.calls.conditions import Places, function_of, plain
from tsopt.compiler.calls.types import TensorType

INPUT, OUTPUT = "input", "output"
JOINT = "joint"  # memory that several results share, and that none of them spans
WEIGHT = "weight"  # a tensor of the model that calls do not write


@dataclass(frozen=True, slots=True)
class View:
    """Where in memory a result lies, as seen in a call of the model on the example.

    Attributes:
        kind: INPUT, OUTPUT, JOINT or WEIGHT.
        of: position of the tensor that it is a view of, among the user's inputs, then the model's state that is
            written; or among the results, or among the weights that are returned. Of JOINT memory, the first result
            that lies in it.
        layout: the strides of that tensor for which this holds; `()`: contiguous, None: any. Of JOINT memory, how many
            elements it has.
        shape, stride, offset: the elements of that tensor that the view has, counted from its first one; all None
            where it is that tensor itself.
        places: strides and offset for any sizes, in a program for many; the others are those of the example.
        where: the sizes at which it is a view, by Dim, and a copy at others; empty: at all.
        detached: it requires no gradients, although the tensor does.
    """

    kind: str
    of: int
    layout: tuple[int, ...] | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    offset: int | None = None
    places: Places | None = None
    where: tuple[tuple[str, int], ...] = ()
    detached: bool = False

    def at(self, sizes: Mapping[str, int], shape: tuple[int, ...]) -> View | None:
        """The view as it is for the sizes of a call, in which the result has this shape; None where it is a copy.

        Raises:
            ValueError: its places cannot be computed for these sizes.
        """
        if any(sizes[name] != size for name, size in self.where):
            return None
        if self.places is None:
            return replace(self, where=())
        stride, offset = self.places.at(sizes)
        return replace(self, shape=shape, stride=stride, offset=offset, places=None)

    def renamed(self, name: str, other: str) -> View:
        where = tuple((other if dim == name else dim, size) for dim, size in self.where)
        return replace(self, places=self.places and self.places.renamed(name, other), where=where)

    def within(self, base: Any, value: Any) -> Any:
        """The view of a call's tensor; `value`, which is a copy, where that tensor has another layout."""
        if not self.holds_for(base):
            return value
        if self.shape is None or self.stride is None or self.offset is None:
            return base if base.shape == value.shape else value
        if value.shape != self.shape or not self._lies_in(tuple(base.shape), base.stride()):
            return value
        plain = base.detach() if self.detached else base
        return plain.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)

    def _lies_in(self, shape: Sequence[int], strides: Sequence[int]) -> bool:
        """Whether the elements of a part are all elements of a tensor."""
        own, stride = self.shape or (), self.stride or ()
        return (self.offset or 0) + last_place(own, stride) <= last_place(shape, strides)

    def holds_for(self, base: Any) -> bool:
        """Whether a tensor has the layout for which the result is a view of it."""
        if self.layout is None:
            return True
        return bool(base.stride() == self.layout if self.layout else base.is_contiguous())

    def moved(self, memory: Any, value: Any) -> Any:
        """A result as a part of JOINT memory, which takes its values."""
        part = made = memory.as_strided(self.shape, self.stride, self.offset)
        for axis, step in enumerate(made.stride()):
            if step == 0:  # the same elements again and again
                part, value = part.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
        part.copy_(value)
        return made

    def to_json(self) -> list[Any]:
        whole = [self.kind, self.of, None if self.layout is None else list(self.layout)]
        where = [dict(self.where)] if self.where else []
        if self.shape is None:
            return [*whole, *where]
        part = [*whole, list(self.shape), list(self.stride or ()), self.offset]
        if self.places is None:
            return [*part, *where]
        return [*part, [list(self.places.stride), self.places.offset, list(self.places.dims)]]

    @classmethod
    def from_json(cls, data: Any) -> View:
        """Raises ValueError for what is not a view. Whether it stays within its tensor, `fits` says."""
        kind, of, layout, *part = data
        where = part.pop() if part and isinstance(part[-1], dict) else {}
        places = _places_from(part.pop(), len(part[1])) if len(part) == 4 else None
        made = cls(kind, of, None if layout is None else tuple(layout), *map(_as_tuple, part))
        numbers = (
            of,
            *(made.layout or ()),
            *(made.shape or ()),
            *(made.stride or ()),
            made.offset or 0,
            *where.values(),
        )
        known = kind in (INPUT, OUTPUT, JOINT) and len(part) in (0, 3)
        known = known and (kind != JOINT or (len(part) == 3 and layout is not None and len(layout) == 1))
        if not known or not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
            raise ValueError(f"invalid view: {str(data)[:80]}")
        return replace(made, places=places, where=tuple(where.items()))

    def fits(self, base: TensorType, own: TensorType) -> bool:
        """Whether it lies within a tensor of one type, and is of the type that its result has.

        At single sizes the result may have another shape: `within` compares it.
        """
        if self.where:
            own = replace(own, shape=base.shape if self.shape is None else self.shape)
        if base.dtype != own.dtype or base.device != own.device:
            return False
        if self.kind == JOINT and self.layout and self.stride and self.offset is not None:
            same = self.shape == own.shape and len(self.stride) == len(own.shape) and 0 not in own.shape
            return same and self.offset + last_place(own.shape, self.stride) < self.layout[0]
        if self.shape is None or self.stride is None or self.offset is None:
            return base.shape == own.shape
        strides = self.layout or _contiguous(base.shape)
        if self.layout is None or self.shape != own.shape or len(self.stride) != len(own.shape):
            return False
        if len(strides) != len(base.shape) or 0 in own.shape:
            return False
        return self._lies_in(base.shape, strides)


def of_copies(views: Sequence[View | None], shared: Container[int] = ()) -> list[View | None]:
    """What results are views of where weights are copies: of each other, if they are one weight or parts of it.

    Args:
        shared: weights that are the model's own all the same.
    """
    made = [None if view is not None and view.kind == WEIGHT and view.of not in shared else view for view in views]
    groups: dict[int, list[tuple[int, View]]] = {}
    for position, view in enumerate(views):
        if view is not None and made[position] is None:
            groups.setdefault(view.of, []).append((position, view))
    for group in groups.values():
        whole = next((position for position, view in group if view.shape is None), None)
        if whole is not None:
            for position, view in group:
                made[position] = None if position == whole else replace(view, kind=OUTPUT, of=whole, detached=False)
        elif len(group) > 1 and all(view.places is None and not view.where for _, view in group):
            parts = [(i, view.shape or (), view.stride or (), view.offset or 0) for i, view in group]
            size = max(offset + last_place(shape, stride) for _, shape, stride, offset in parts) + 1
            for position, shape, stride, offset in parts:
                made[position] = View(JOINT, group[0][0], (size,), shape, stride, offset)
    return made


def _places_from(data: Any, rank: int) -> Places:
    stride, offset, dims = data
    if len(stride) != rank or not all(isinstance(name, str) for name in dims):
        raise ValueError(f"invalid places: {str(data)[:80]}")
    for text in (*stride, offset):
        function_of(text, len(dims))
    return Places(tuple(map(plain, stride)), plain(offset), tuple(dims))


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


def last_place(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The place of the last element of a tensor; -1 for one without elements."""
    if 0 in shape:
        return -1
    return sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
