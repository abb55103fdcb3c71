"""`hybridize`: the model itself, compiled behind its interface at the first call; eager where results would differ."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any, TypeVar, overload

import torch
from torch import nn

from tsopt.background.in_background import InBackground
from tsopt.compiler.calls.snapshot import slot_names
from tsopt.compiler.model_reads import HOOKS
from tsopt.errors import UsageError
from tsopt.hybrid_state import Compiled
from tsopt.pipelines import model_in, with_model
from tsopt.runtime.calling.served import HybridReport
from tsopt.runtime.report import Report

Model = TypeVar("Model", bound=Callable[..., Any])


@overload
def hybridize(model: Model, *, active: bool = True, background: bool = False, **options: Any) -> Model: ...


@overload
def hybridize(*, active: bool = True, background: bool = False, **options: Any) -> Callable[[Model], Model]: ...


def hybridize(model: Any = None, *, active: bool = True, background: bool = False, **options: Any) -> Any:
    """Returns the same model or function, optimized at its first call and verified before it is used.

    A module is returned as an object of the same class that shares everything with the original: attributes,
    parameters, hooks, `state_dict`, `train`, `to`. The compiled form is valid for the current state of the model: its
    weights, modules, hooks and flags, and the attributes and globals that its code reads. A change to any of them is
    detected at the next call, and the model is compiled again; audits find what cannot be detected this way (see
    `audit` of `optimize`). The model runs in eager, with one warning, in training mode, when gradients are required
    (call it under `torch.no_grad()`), under another default dtype, and if it cannot be captured.

    A pipeline of transformers is returned as a pipeline whose model is a hybrid.

    Args:
        model: an nn.Module, a function or a pipeline; None for use as a decorator with options.
        active: False returns the original model of a hybrid.
        background: compile in another process. Eager serves calls until the compiled form is ready; a later call then
            takes it over. The model is sent with cloudpickle. `tsopt.wait` blocks until it is ready.
        options: options of `optimize`; here `seconds` defaults to 2, and `warmup` to 1.

    Raises:
        UsageError: the model is neither a module nor a function, or it is TorchScript.
    """
    if model is None:
        return functools.partial(hybridize, active=active, background=background, **options)
    inside = model_in(model)
    if inside is not None:
        return with_model(model, hybridize(inside, active=active, background=background, **options))
    original = original_of(model)
    if not active:
        return original
    if isinstance(original, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        kind = "ScriptModule" if isinstance(original, nn.Module) else "ScriptFunction"
        raise UsageError(f"a {kind} cannot be hybridized", fix="use tsopt.optimize(model, example_input)")
    if isinstance(original, nn.Module):
        return _module(original, Compiled(original, background, options))
    if not callable(original):
        raise UsageError(f"a {type(original).__name__} cannot be hybridized", fix="pass an nn.Module or a function")
    return _function(original, Compiled(original, background, options))


def wait(model: Any, seconds: float | None = None) -> bool:
    """Waits for the background compilation of a hybrid.

    Args:
        seconds: timeout; None waits until it is ready.

    Returns:
        Whether nothing is being compiled any more. Calls are then served by the compiled form, or by eager for good.

    Raises:
        UsageError: the model is not a hybrid, or one of its options is invalid.
    """
    compiled = compiled_of(model)
    if compiled is None:
        raise UsageError(f"a {type(model).__name__} is not a hybrid", fix="tsopt.hybridize(model, background=True)")
    return compiled.fast.wait(seconds) if isinstance(compiled.fast, InBackground) else True


def report(model: Any) -> Report | HybridReport:
    """The report of something optimized; of a hybrid, which of its calls are compiled, and why others are not.

    A function, because a hybrid has the attributes of the model.

    Raises:
        UsageError: the model is neither.
    """
    compiled = compiled_of(model)
    if compiled is not None:
        return compiled.report()
    found = getattr(model, "report", None)
    if isinstance(found, Report):
        return found
    raise UsageError(
        f"a {type(model).__name__} has no report",
        fix="pass what tsopt.optimize or tsopt.hybridize returned",
    )


def original_of(model: Any) -> Any:
    """The original model of a hybrid; the model itself if it is not a hybrid."""
    compiled = compiled_of(model)
    return model if compiled is None else compiled.model


def compiled_of(model: Any) -> Compiled | None:
    """The state behind a hybrid, or behind the model of a pipeline; None for anything else."""
    inside = model_in(model)
    model = model if inside is None else inside
    found = getattr(type(model) if isinstance(model, nn.Module) else model, "_tsopt_compiled", None)
    return found if isinstance(found, Compiled) else None


class _Hybrid:
    """Mixin that intercepts the call of a module. Everything else is the module's own."""

    _tsopt_compiled: Compiled

    def __init_subclass__(cls) -> None:
        """Nothing: the model's class may require arguments here, or register what is derived from it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._tsopt_compiled
        return compiled(args, kwargs, compiled.model)

    def __copy__(self) -> Any:
        compiled = self._tsopt_compiled
        return hybridize(copy.copy(compiled.model), background=compiled.background, **compiled.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        compiled = self._tsopt_compiled
        return hybridize(copy.deepcopy(compiled.model, memo), background=compiled.background, **compiled.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the original model: a compiled form belongs to its process."""
        return original_of, (self._tsopt_compiled.model,)


def _module(model: nn.Module, compiled: Compiled) -> nn.Module:
    cls = type(model)
    names = {"_tsopt_compiled": compiled, "__module__": cls.__module__, "__doc__": cls.__doc__}
    if cls.__call__ is nn.Module.__call__ and cls._call_impl is nn.Module._call_impl:  # else the two differ
        names["forward"] = _forward(cls)
    slots = {name: getattr(cls, name) for name in slot_names(cls)}
    names |= {name: _shared(slot, model) for name, slot in slots.items() if isinstance(slot, MemberDescriptorType)}
    made: nn.Module = object.__new__(type(cls.__name__, (_Hybrid, cls), names))
    made.__dict__ = model.__dict__  # shared: what is done to one is done to the other
    return made


def _shared(slot: Any, model: nn.Module) -> property:
    """What `__slots__` has laid out, which is not in the `__dict__` that the two share."""

    def write(_: Any, value: Any) -> None:
        slot.__set__(model, value)

    return property(lambda _: slot.__get__(model), write, lambda _: slot.__delete__(model), slot.__doc__)


def _forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """The `forward` of a hybrid, for code that calls it past `__call__`, and therefore past the model's hooks."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = self._tsopt_compiled
        eager = compiled.model.forward
        hooked = any(getattr(self, name, None) for name in HOOKS) or torch.nn.modules.module._has_any_global_hook()
        return eager(*args, **kwargs) if hooked else compiled(args, kwargs, eager)

    return forward


def _function(function: Callable[..., Any], compiled: Compiled) -> Callable[..., Any]:
    @functools.wraps(function)
    def hybrid(*args: Any, **kwargs: Any) -> Any:
        return compiled(args, kwargs, function)

    hybrid._tsopt_compiled = compiled  # type: ignore[attr-defined]
    return hybrid
