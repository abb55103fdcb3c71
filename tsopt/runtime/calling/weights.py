"""The weights of a model at one time, and whether anybody has written to them since."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
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
        self._seen = [(tensor, _touch(tensor)) for tensor in self._tensors().values()]
        self._written = False  # by somebody who does not count
        unseen_writes.tell(self)
        self._digest = self._now() if exact else None

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
        if self._digest is None:
            return self.touched()
        self._written, written = False, self._written  # before the look: more may be written meanwhile
        if self._now() != self._digest:
            self._written = written
            return True
        self._seen = [(tensor, _touch(tensor)) for tensor, _ in self._seen]  # written, with the same values
        return False

    def changes(self) -> list[str]:
        """The names of those that have other values, are new, or are gone; none if not `exact`. Reads every weight."""
        if self._digest is None:
            return []
        before, now = self._digest, self._now()
        return [name for name in {**before, **now} if before.get(name) != now.get(name)]

    def only_caches_grew(self) -> bool:
        """Whether all that has changed is buffers that are new or of another size, as those are that a model fills.

        What a model keeps for later calls is filled by the first call that needs it, whoever makes that call.
        """
        before, now = self._digest or {}, self._tensors()

        def is_cache(name: str) -> bool:
            tensor, known = now.get(name), before.get(name)
            if tensor is None or isinstance(tensor, nn.Parameter):
                return False
            return known is None or known[0] != _kind(tensor)

        changes = self.changes()
        return bool(changes) and all(map(is_cache, changes))

    def renew(self) -> None:
        """What they are now is what counts."""
        self._seen = [(tensor, _touch(tensor)) for tensor in self._tensors().values()]
        self._digest = None if self._digest is None else self._now()

    def _now(self) -> dict[str, tuple[Any, int]]:
        return {name: (_kind(tensor), _checksum(tensor)) for name, tensor in self._tensors().items()}


def _kind(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape


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


def named_tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module, each once, by name; none of a function."""
    root = next(iter(modules_of(model)), None)
    places = {} if root is None else dict(root.named_modules())
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for place, module in places.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), (f"{place}.{name}".lstrip("."), tensor))
    return dict(found.values())
