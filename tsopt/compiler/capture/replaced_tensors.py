"""What a call does to tensors as objects while it is traced: a program computes values, and writes in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tsopt.compiler.protect import modules_of
from tsopt.errors import GraphBreakError

_GET_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
WHY = "a program writes the tensors of a model in place, and never replaces one"


@contextmanager
def none_replaced(model: Callable[..., Any]) -> Iterator[None]:
    """A block that calls a model, which reads `.data`.

    Raises:
        GraphBreakError: it replaces a parameter or a buffer, or what a tensor holds (`x.data = ...`).
    """
    modules = modules_of(model)
    before = [(table, dict(table)) for module in modules for table in (module._parameters, module._buffers)]
    with _Data():
        yield
    for table, held in before:
        for name, old in held.items():
            if old is None or table.get(name) is old:
                continue
            raise GraphBreakError(
                f"the model replaces {name!r}, one of its own tensors, while it runs",
                why=WHY,
                fix=f"write to it instead: self.{name}.copy_(...)",
            )


class _Data(TorchFunctionMode):
    """Makes `x.data` the `x.detach()` that it is but for versions: tracers lose what it returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides`."""
        if func == _GET_DATA:
            return args[0].detach()
        if func == _SET_DATA and not _is_converted(*args[:2]):
            raise GraphBreakError(
                "the model replaces what a tensor holds (x.data = ...) while it runs",
                why=WHY,
                fix="write to it instead: x.copy_(...)",
            )
        return func(*args, **(kwargs or {}))


def _is_converted(tensor: torch.Tensor, value: Any) -> bool:
    """Whether a tensor gets its own values, maybe in another dtype, as by `module.to(dtype)`: once and no more."""
    if value is tensor:
        return True
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and type(value) in (torch.Tensor, torch.nn.Parameter)
    return known and value.dtype != tensor.dtype and bool(torch.equal(value, tensor.to(value.dtype)))
