"""Results that alias: an input itself, a view of an input, or a view of another result.

In eager, a write to such a result is visible in what it aliases; an engine returns copies. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tsopt.compiler.calls.types import TensorType

INPUT, OUTPUT = "input", "output"


@dataclass(frozen=True, slots=True)
class View:
    """Where in memory a result lies, as seen in a call of the model on the example.

    Attributes:
        kind: INPUT or OUTPUT.
        of: position of the tensor that it is a view of, among the user's inputs, then the model's state that is
            written; or among the results.
        layout: the strides of that tensor for which this holds; `()`: contiguous, None: any.
        shape, stride, offset: the elements of that tensor that the view has, counted from its first one; all None
            where it is that tensor itself.
    """

    kind: str
    of: int
    layout: tuple[int, ...] | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    offset: int | None = None

    def within(self, base: Any, value: Any) -> Any:
        """The view of a call's tensor; `value`, which is a copy, where that tensor has another layout."""
        if self.layout is not None and not (base.stride() == self.layout if self.layout else base.is_contiguous()):
            return value
        if self.shape is None:
            return base if base.shape == value.shape else value
        if value.shape != self.shape:
            return value
        return base.as_strided(self.shape, self.stride, base.storage_offset() + (self.offset or 0))

    def to_json(self) -> list[Any]:
        whole = [self.kind, self.of, None if self.layout is None else list(self.layout)]
        return whole if self.shape is None else [*whole, list(self.shape), list(self.stride or ()), self.offset]

    @classmethod
    def from_json(cls, data: Any) -> View:
        """Raises ValueError for what is not a view. Whether it stays within its tensor, `fits` says."""
        kind, of, layout, *part = data
        made = cls(kind, of, None if layout is None else tuple(layout), *map(_as_tuple, part))
        numbers = (of, *(made.layout or ()), *(made.shape or ()), *(made.stride or ()), made.offset or 0)
        known = kind in (INPUT, OUTPUT) and len(part) in (0, 3)
        if not known or not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
            raise ValueError(f"invalid view: {str(data)[:80]}")
        return made

    def fits(self, base: TensorType, own: TensorType) -> bool:
        """Whether it lies within a tensor of one type, and is of the type that its result has."""
        if base.dtype != own.dtype or base.device != own.device:
            return False
        if self.shape is None or self.stride is None or self.offset is None:
            return base.shape == own.shape
        strides = self.layout or _contiguous(base.shape)
        if self.layout is None or self.shape != own.shape or len(self.stride) != len(own.shape):
            return False
        if len(strides) != len(base.shape) or 0 in own.shape:
            return False
        return self.offset + _last(own.shape, self.stride) <= _last(base.shape, strides)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


def _last(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The place of the last element of a tensor; -1 for one without elements."""
    if 0 in shape:
        return -1
    return sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def views_among(results: Sequence[Any], given: Sequence[Any], as_is: Sequence[bool]) -> tuple[View | None, ...]:
    """For each result of a call, what it is a view of; None for one that has memory of its own, or the model's.

    Args:
        results: tensors that the call has returned.
        given: its inputs, and the model's tensors that it writes.
        as_is: for each of these, whether it is returned itself whatever its layout.
    """
    found: list[View | None] = []
    for result in results:
        whole = next((i for i, tensor in enumerate(given) if tensor is result), None)
        if whole is not None:
            found.append(View(INPUT, whole, None if as_is[whole] else _layout(given[whole])))
            continue
        found.append(_part(result, given, INPUT))
    # Of results that share memory, the one that reaches furthest is what the others are views of.
    settled: list[Any] = [None] * len(results)
    for i in sorted((i for i, view in enumerate(found) if view is None), key=lambda i: -_reach(results[i])):
        found[i] = _part(results[i], settled, OUTPUT)
        settled[i] = results[i] if found[i] is None else None
    return tuple(found)


def _part(result: Any, bases: Sequence[Any], kind: str) -> View | None:
    for position, base in enumerate(bases):
        if base is None or _kind(base) != _kind(result) or not result.numel():
            continue
        offset = result.storage_offset() - base.storage_offset()
        if _memory(base) == _memory(result) and offset >= 0 and offset + _reach(result) <= _reach(base):
            return View(kind, position, _layout(base), tuple(result.shape), tuple(result.stride()), offset)
    return None


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.layout, tensor.is_conj(), tensor.is_neg()


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _reach(tensor: Any) -> int:
    return _last(tensor.shape, tensor.stride())


def _layout(tensor: Any) -> tuple[int, ...]:
    return () if tensor.is_contiguous() else tuple(tensor.stride())
