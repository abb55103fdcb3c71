"""The captured program and the model in float64: values without rounding."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.compiler.random_state import RandomState
from tsopt.compiler.watching_mode import WatchingMode
from tsopt.runtime.checking.compare import TOLERANCES, bit_equal, size_of
from tsopt.runtime.checking.decisions import values_behind
from tsopt.runtime.checking.time_limits import at_most

log = logging.getLogger("tsopt")


class Reference64:
    """The captured program in float64, node by node; the values behind discrete outputs are kept."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, leaves: Sequence[torch.Tensor]) -> dict[fx.Node, Any] | None:
        """The value of every node that an output or a decision needs; None when an op has no float64."""
        signature = self.program.signature
        inputs = iter([*leaves, *[self.program.state[i.name] for i in signature.state_inputs]])
        keep = set(self.program.output_node.all_input_nodes)
        keep |= {source for node in list(keep) for source in values_behind(node)}
        values: dict[fx.Node, Any] = {}
        uses = {node: len(node.users) for node in self.program.graph.nodes}
        try:
            with torch.no_grad():
                for node in self.program.graph.nodes:
                    self._step(node, values, inputs)
                    for source in node.all_input_nodes:
                        uses[source] -= 1
                        if not uses[source] and source not in keep:
                            values.pop(source, None)
        except (RuntimeError, NotImplementedError, TypeError, IndexError, TimeoutError):
            return (
                None  # no float64 kernel, a value that float64 takes elsewhere, or no time left: eager is the reference
            )
        return values

    def _step(self, node: fx.Node, values: dict[fx.Node, Any], inputs: Any) -> None:
        if node.op == "placeholder":
            values[node] = _widen(next(inputs))
        elif node.op == "get_attr":
            values[node] = _widen(self.program.weights[str(node.target)])
        elif ops.is_call(node) and not ops.is_check(node):  # what is checked are dtypes, which are others here
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            target: Any = node.target
            values[node] = target(*map(_widen_dtype, args), **{k: _widen_dtype(v) for k, v in kwargs.items()})


def called_in_float64(model: Callable[..., Any], call: Example) -> list[torch.Tensor] | None:
    """The outputs of the model where each op computes in float64; None where that is not what it can do.

    The weights stay as they are, because other threads may be calling the model: each op widens what it is given.
    """
    try:
        with torch.no_grad(), _Wide():
            leaves, _, _ = outcome_of(model, *_wide((call.args, dict(call.kwargs))))
    except Exception as error:  # the model's own code, with dtypes that it was not written for
        log.debug("the model does not compute in float64: %s: %s", type(error).__name__, error)
        return None
    return list(leaves)


def rounded_from_float64(called: Callable[..., Any], args: Sequence[Any], seconds: float) -> Any:
    """What a function returns for tensors, with each number computed in float64 and rounded once where that is near it.

    What is further away than the element test allows stays: more than rounding is behind it. So does all of it where
    the function draws random numbers, or does not compute in float64 in so many seconds.
    """
    before, wide = RandomState.now(), None
    try:
        with torch.no_grad(), at_most(seconds), _Wide():
            wide = called(*[_widened_input(value) for value in args])
    except Exception as error:  # see `called_in_float64`
        log.debug("a part of the model does not compute in float64: %s: %s", type(error).__name__, error)
    draws = not before.is_current()
    before.restore()
    found = called(*args)
    for value, exact in zip(tree_leaves(found), tree_leaves(wide), strict=False) if not draws else ():
        if _is_narrow(value) and isinstance(exact, torch.Tensor) and exact.shape == value.shape:
            _approach(value, exact.to(value.dtype))
    return found


def _widened_input(value: Any) -> Any:
    """Of parameters, each op widens its own: all at once would take twice their memory. A call may write to others."""
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return value
    return _widen(value) if _is_narrow(value) else value.detach().clone()


def _approach(value: torch.Tensor, exact: torch.Tensor) -> None:
    """Gives numbers other values that are near them: in place, for the sake of views.

    Not where nothing is to be changed, as of a weight that is returned as it is.
    """
    if value.dtype in TOLERANCES and not bit_equal(exact, value) and 0 not in value.stride():
        rtol, atol, _ = TOLERANCES[value.dtype]
        size = size_of(torch.view_as_real(value) if value.is_complex() else value)
        value.copy_(exact.where(exact.isclose(value, rtol, atol * size), value))


class _Wide(WatchingMode):
    """Ops on float64 where they would be on other floating-point types. Writes to what the model holds are refused."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[weakref.ref[torch.Tensor]] = []  # of tensors of the model, and views of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise TypeError(f"{func} may write to what it is given")
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written = [given.get(argument.name) for argument in arguments if argument.is_write]
        if any(_is_narrow(leaf) or self._is_copy(leaf) for leaf in tree_leaves(written)):
            raise TypeError(f"{func} writes to a tensor that is not float64")
        wide_args, wide_kwargs = _wide((args, kwargs))
        found = tree_map(lambda value: _widen(value) if _is_narrow(value) else value, func(*wide_args, **wide_kwargs))
        viewed = [given.get(argument.name) for argument in arguments if argument.alias_info is not None]
        if not written and any(_is_narrow(leaf) or self._is_copy(leaf) for leaf in tree_leaves(viewed)):
            self._copies += [weakref.ref(leaf) for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        return found

    def _is_copy(self, value: Any) -> bool:
        """Whether a write would reach a copy of the model's memory only."""
        if not isinstance(value, torch.Tensor):
            return False
        copies = (copy() for copy in self._copies)
        memory = value.untyped_storage()._cdata
        return any(copy is not None and copy.untyped_storage()._cdata == memory for copy in copies)


def _is_narrow(value: Any) -> bool:
    wide = (torch.float64, torch.complex128)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype not in wide
        and (value.is_floating_point() or value.is_complex())
    )


def _wide(arguments: Any) -> Any:
    return tree_map(lambda value: _widen(value) if _is_narrow(value) else _widen_dtype(value), arguments)


def _widen(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point():
        return value.detach().double()
    return value.detach().to(torch.complex128) if value.is_complex() else value.detach()


def _widen_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value
    return value
