"""Whether the weights of a model are what they were when something was made of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Watch:
    """The parameters, buffers and modules of a model, of a function none, as they are now.

    Args:
        written: tensors that the model writes itself, whose values do not count.
    """

    def __init__(self, model: Any, written: Iterable[torch.Tensor] = ()) -> None:
        modules = list(model.modules()) if isinstance(model, nn.Module) else []
        # Where each is held, so that one that is replaced is missed without a walk through the model.
        places = [held for m in modules for held in (m._parameters, m._buffers, m._modules)]
        self._held = [(held, name, value) for held in places for name, value in held.items()]
        self._seen = [(tensor, tensor._version, tensor.data_ptr()) for tensor in tensors_of(model)]
        self.leave_out(written)

    def leave_out(self, written: Iterable[torch.Tensor]) -> None:
        out = set(map(id, written))
        self._seen = [seen for seen in self._seen if id(seen[0]) not in out]

    def changed(self) -> bool:
        if any(tensor._version != version or tensor.data_ptr() != at for tensor, version, at in self._seen):
            return True
        return any(held.get(name) is not value for held, name, value in self._held)


def tensors_of(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
