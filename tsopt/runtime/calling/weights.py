"""The weights of a model at one time, and whether anybody has written to them since."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tsopt.compiler.protect import InEvalMode
from tsopt.compiler.tensor_bytes import bytes_in
from tsopt.runtime.calling import unseen_writes

NAMED = 3  # of the weights that have changed: what changes one often changes all
Digest = dict[str, tuple[Any, int]]  # what each tensor is like, and a checksum of its values

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
        self._seen = [(tensor, _touch(tensor)) for tensor in self._tensors().values()]
        self._written = False  # by somebody who does not count
        unseen_writes.tell(self)
        self._digest = _digest(self._tensors()) if exact else None

    def _tensors(self) -> dict[str, torch.Tensor]:
        out = {_address(tensor) for tensor in self._out}
        own = named_tensors_of(self._model)
        mine = {_address(tensor) for tensor in own.values()}
        others = [tensor for tensor in self._also if _address(tensor) not in mine]
        tensors = own | {f"tensor {number} outside of the modules": tensor for number, tensor in enumerate(others, 1)}
        return {name: tensor for name, tensor in tensors.items() if has_place(tensor) and _address(tensor) not in out}

    def touched(self) -> bool:
        """Whether somebody has written to one of them, or put another in its place, as far as torch knows."""
        return self._written or any(_touch(tensor) != touch for tensor, touch in self._seen)

    def was_written(self, places: frozenset[int]) -> None:
        self._written = self._written or any(unseen_writes.place_of(tensor) in places for tensor, _ in self._seen)

    def changed(self) -> bool:
        """Whether any value has changed, no matter who wrote it. Reads every weight."""
        return self.changes() is not None

    def changes(self) -> Changes | None:
        """What has changed, no matter who wrote it; None if nothing has. Reads every weight."""
        if self._digest is None:
            return Changes((), False, {}) if self.touched() else None
        self._written, written = False, self._written  # before the look: more may be written meanwhile
        before, tensors = self._digest, self._tensors()
        now = _digest(tensors)
        if now == before:
            self._seen = [(tensor, _touch(tensor)) for tensor, _ in self._seen]  # written, with the same values
            return None
        self._written = written
        names = tuple(name for name in {**before, **now} if before.get(name) != now.get(name))
        resized = (
            name in tensors
            and not isinstance(tensors[name], nn.Parameter)
            and (name not in before or before[name][0] != now[name][0])
            for name in names
        )
        return Changes(names, all(resized), now)

    def adopt(self, changes: Changes) -> None:
        """Takes the values that were found there as the reference."""
        self._written, self._digest = False, changes.digest
        self._seen = [(tensor, _touch(tensor)) for tensor in self._tensors().values()]


@dataclass(frozen=True, slots=True)
class Changes:
    """How weights differ from what they were.

    names: of those that have other values, are new, or are gone; none where values were not taken down.
    only_resized: all of them are buffers that were added or resized, such as caches. A model fills these in the first
        call that needs them, even if the user calls the model itself.
    """

    names: tuple[str, ...]
    only_resized: bool
    digest: Digest

    def __str__(self) -> str:
        more = f" and {len(self.names) - NAMED} more" if len(self.names) > NAMED else ""
        return ", ".join(self.names[:NAMED]) + more


def _digest(tensors: Mapping[str, torch.Tensor]) -> Digest:
    return {name: ((tensor.dtype, tensor.shape), _checksum(tensor)) for name, tensor in tensors.items()}


def _checksum(tensor: torch.Tensor) -> int:
    with torch.no_grad():
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return zlib.crc32(bytes_in(dense).numpy().data)


def _touch(tensor: torch.Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _address(tensor: torch.Tensor) -> Any:
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if has_place(tensor) and tensor.numel() else id(tensor)


def has_place(tensor: torch.Tensor) -> bool:
    """Whether it has memory that can be told by an address."""
    lazy = isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return not lazy and is_dense and type(tensor).__torch_dispatch__ is _NO_DISPATCH


def named_tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module, each once, by name; none of a function."""
    root = model.module if isinstance(model, InEvalMode) else model
    places = dict(root.named_modules()) if isinstance(root, nn.Module) else {}
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for place, module in places.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), (f"{place}.{name}".lstrip("."), tensor))
    return dict(found.values())
