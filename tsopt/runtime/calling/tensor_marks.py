"""Tensors as they were at one time: how often they had been written, where they lay, and how they were read there."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tsopt.runtime.calling import unseen_writes
from tsopt.runtime.calling.alike import differ

_version, _dtype = attrgetter("_version"), attrgetter("dtype")
_place, _size, _strides = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
Mark = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
# Memory of these types is not read as another type of the same size, so nobody asks at each call.
WIDE = frozenset({torch.float32, torch.float64, torch.int64, torch.complex64, torch.complex128})


class TensorMarks:
    """Tensors as they are now.

    Args:
        tensors: that have a place.
        before: tensors that are marked here count as they were then.

    Attributes:
        tensors: as given.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], before: TensorMarks | None = None) -> None:
        self.tensors = [*tensors]
        known = {} if before is None else before._marks  # whose tensors are still there: an id is that of one of them
        self._marks: dict[int, Mark] = {id(tensor): known.get(id(tensor)) or _mark(tensor) for tensor in self.tensors}
        # Those in doubt, and what they were.
        self._doubted: list[tuple[torch.Tensor, torch.Tensor]] = [] if before is None else before._doubted
        self._in_columns()

    def _in_columns(self) -> None:
        """The marks as `hold` compares them: what is the same for every tensor at once takes the least time."""
        self._counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._shaped = [tensor for tensor in self.tensors if tensor.dim() > 1]
        self._typed = [tensor for tensor in self.tensors if tensor.dtype not in WIDE]
        self._versions = [self._marks[id(tensor)][0] for tensor in self._counted]
        self._places = [self._marks[id(tensor)][1] for tensor in self.tensors]
        self._sizes = [self._marks[id(tensor)][2] for tensor in self.tensors]
        self._strides = [self._marks[id(tensor)][3] for tensor in self._shaped]
        self._dtypes = [self._marks[id(tensor)][4] for tensor in self._typed]
        self._expected = None if self._doubted else self._versions  # None while statistics are in doubt

    def hold(self) -> bool:
        """Whether none has been written to, given other memory, or is read in another way."""
        return (
            [*map(_version, self._counted)] == self._expected
            and [*map(_place, self.tensors)] == self._places
            and [*map(_size, self.tensors)] == self._sizes
            and [*map(_strides, self._shaped)] == self._strides
            and (not self._typed or [*map(_dtype, self._typed)] == self._dtypes)
        )

    def overwritten(self) -> bool:
        """Whether any has been written to or given other memory, as far as is known without comparing values."""
        written = [*map(_version, self._counted)] != self._versions
        return written or [*map(_place, self.tensors)] != self._places

    def leave_out(self, ids: frozenset[int]) -> None:
        """Tensors that do not count any more."""
        self.tensors = [tensor for tensor in self.tensors if id(tensor) not in ids]
        self._in_columns()

    def was_written(self, places: frozenset[int]) -> None:
        """Told of a write that no version tells of."""
        if any(unseen_writes.place_of(tensor) in places for tensor in self._counted):
            self._marks, self._doubted = {name: (-1, *mark[1:]) for name, mark in self._marks.items()}, []
            self._in_columns()

    def doubt(self) -> None:
        """Statistics may be written without raising a version: they are compared by value when it matters."""
        if self._expected is not None:
            small = [tensor for tensor in self._counted if tensor.dim() < 2 and not tensor.requires_grad]
            with _disable_current_modes():  # a tracer may be calling the model: these are the values there are
                self._doubted = [(tensor, tensor.detach().clone()) for tensor in small]
            self._expected = None if small else self._versions

    def settle(self) -> bool:
        """Whether there was a doubt that a look at the values has ended: they are what they were."""
        counted = {id(tensor) for tensor in self._counted}
        if not self._doubted or any(differ(*pair) for pair in self._doubted if id(pair[0]) in counted):
            return False
        self._expected, self._doubted = self._versions, []
        return True


def _mark(tensor: Any) -> Mark:
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype
