"""What a call does to tensors as objects while it is traced: a program computes values, and writes in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.capture.export_errors import unflatten_clones
from tsopt.compiler.protect import modules_of, protected
from tsopt.errors import GraphBreakError

_GET_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
WHY = "a program writes the tensors of a model in place, and never replaces one"
Tables = list[tuple[dict[str, Any], dict[str, Any]]]  # of parameters and buffers, and what they held


@contextmanager
def noted(model: Callable[..., Any]) -> Iterator[list[str]]:
    """A block in which a tracer calls the model: `x.data` is `x.detach()` there.

    Yields:
        After the block, the names of parameters and buffers that other tensors have taken the place of.

    Raises:
        GraphBreakError: the model gives a tensor other contents (`x.data = ...`).
    """
    before, replaced = _tables(model), list[str]()
    with _Data():
        yield replaced
    replaced += _replaced(before)


def check_replaced(model: Callable[..., Any], example: Example) -> None:
    """Refuses a model whose parameters or buffers are other tensors after each call, not only after the first one.

    Raises:
        GraphBreakError: it is one.
    """
    names: list[str] = []
    with protected(model), contextlib.suppress(Exception):  # one that fails here is explained by who calls it next
        for _ in range(2):
            before = _tables(model)
            args, kwargs = unflatten_clones(example)
            outcome_of(model, args, kwargs)
        names = _replaced(before)
    if not names:
        return
    raise GraphBreakError(
        f"the model replaces {names[0]!r}, one of its own tensors, while it runs",
        why=WHY,
        fix=f"write to it instead: self.{names[0]}.copy_(...)",
    )


def _tables(model: Callable[..., Any]) -> Tables:
    tables = (table for module in modules_of(model) for table in (module._parameters, module._buffers))
    return [(table, dict(table)) for table in tables]


def _replaced(before: Tables) -> list[str]:
    """The names of tensors that are not what they were; one where there was none is none of them."""
    pairs = ((table.get(name), name, old) for table, held in before for name, old in held.items())
    return [name for value, name, old in pairs if old is not None and value is not old]


class _Data(TorchFunctionMode):
    """Tracers lose what `x.data` returns. It is `x.detach()`, but for the version that writes to it are counted by."""

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
    """Whether a tensor gets its own values, maybe in another dtype, as by `module.to(dtype)`.

    Where tensors have no values, torch says itself that it cannot.
    """
    if value is tensor:
        return True
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and type(value) in (torch.Tensor, torch.nn.Parameter)
    return known and value.dtype != tensor.dtype and bool(torch.equal(value, tensor.to(value.dtype)))
