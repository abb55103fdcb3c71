"""The weights of a model at one time, and whether anybody has written to them since."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tsopt.compiler.protect import modules_of
from tsopt.runtime.calling import unseen_writes

# Subclasses of Tensor that leave this as it is have memory of their own, as any tensor has.
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class Weights:
    """The weights of a model at one time, known again by their values.

    Args:
        also: tensors that the model computes with beside its own; `written`: those that it writes in its calls.
        exact: take down what the values are, which reads all of them once; otherwise only who has written is noticed.
    """

    def __init__(
        self,
        model: Any,
        also: Iterable[torch.Tensor] = (),
        written: Iterable[torch.Tensor] = (),
        *,
        exact: bool = True,
    ) -> None:
        self._model, self._also = model, list(also)
        self._out = [*written]
        self._seen = [(tensor, _touch(tensor)) for tensor in self._tensors()]
        self._written = False  # by somebody who does not count
        unseen_writes.tell(self)
        self._digest = self._now() if exact else None

    def _tensors(self) -> list[torch.Tensor]:
        out = {_address(tensor) for tensor in self._out}
        own = tensors_of(self._model)
        mine = {_address(tensor) for tensor in own}
        tensors = [*own, *(tensor for tensor in self._also if _address(tensor) not in mine)]
        return [tensor for tensor in tensors if has_place(tensor) and _address(tensor) not in out]

    def touched(self) -> bool:
        """Whether somebody has written to one of them, or put another in its place, as far as torch knows."""
        return self._written or any(_touch(tensor) != touch for tensor, touch in self._seen)

    def was_written(self, places: frozenset[int]) -> None:
        self._written = self._written or any(unseen_writes.place_of(tensor) in places for tensor, _ in self._seen)

    def changed(self) -> bool:
        """Whether any value has changed, no matter who wrote it. Reads every weight."""
        if self._digest is None:
            return self.touched()
        self._written, written = False, self._written  # before the look: more may be written meanwhile
        if self._now() != self._digest:
            self._written = written
            return True
        self._seen = [(tensor, _touch(tensor)) for tensor, _ in self._seen]  # written, with the same values
        return False

    def _now(self) -> list[tuple[Any, int]]:
        return [((tensor.dtype, tensor.shape), _checksum(tensor)) for tensor in self._tensors()]


def _checksum(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return zlib.crc32(dense.reshape(-1).view(torch.uint8).numpy().data)


def _touch(tensor: torch.Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _address(tensor: torch.Tensor) -> Any:
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if has_place(tensor) and tensor.numel() else id(tensor)


def has_place(tensor: torch.Tensor) -> bool:
    """Whether it has memory that can be told by an address."""
    lazy = isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return not lazy and is_dense and type(tensor).__torch_dispatch__ is _NO_DISPATCH


def tensors_of(model: Any) -> Sequence[torch.Tensor]:
    """The parameters and buffers of a module, each once; none of a function."""
    held = [tensor for m in modules_of(model) for tensor in (*m._parameters.values(), *m._buffers.values())]
    return [*{id(tensor): tensor for tensor in held if tensor is not None}.values()]
