"""Whether the weights of a model are what they were when something was made of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Watch:
    """The parameters and buffers of a model, of a function none, as they are now.

    Args:
        written: those that the model writes itself, which do not count.
    """

    def __init__(self, model: Any, written: Iterable[torch.Tensor] = ()) -> None:
        self._seen = [(tensor, tensor._version, tensor.data_ptr()) for tensor in tensors_of(model)]
        self.leave_out(written)

    def leave_out(self, written: Iterable[torch.Tensor]) -> None:
        out = set(map(id, written))
        self._seen = [seen for seen in self._seen if id(seen[0]) not in out]

    def changed(self) -> bool:
        return any(tensor._version != version or tensor.data_ptr() != at for tensor, version, at in self._seen)


def tensors_of(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
