"""`hybridize`: the model itself, compiled behind its interface at the first call; eager where results would differ."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import BuiltinFunctionType, MemberDescriptorType
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.fx import Proxy, _symbolic_trace
from torch.utils._pytree import tree_leaves

from tsopt.background.in_background import InBackground
from tsopt.compiler.calls.snapshot import Wrapper, slot_names
from tsopt.compiler.model_reads import HOOKS
from tsopt.errors import UsageError
from tsopt.hybrid_state import Compiled
from tsopt.originals import behind, class_of_model, compiled_of, original_of
from tsopt.pipelines import model_in, with_model
from tsopt.runtime.calling.drop_in import DropIn
from tsopt.runtime.calling.served import HybridReport
from tsopt.runtime.report import Report

Model = TypeVar("Model", bound=Callable[..., Any])
STATELESS = (BuiltinFunctionType, functools.partial, type)  # besides functions and methods, which are descriptors
CLASS: Any = vars(object)["__class__"]  # past what hybrids tell


@overload
def hybridize(model: Model, *, active: bool = True, background: bool = False, **options: Any) -> Model: ...


@overload
def hybridize(*, active: bool = True, background: bool = False, **options: Any) -> Callable[[Model], Model]: ...


def hybridize(model: Any = None, *, active: bool = True, background: bool = False, **options: Any) -> Any:
    """Returns the same model or function, optimized at its first call and verified before it is used.

    A module is returned as an object of the same class that shares everything with the original: attributes,
    parameters, hooks, `state_dict`, `train`, `to`. The compiled form is valid for the current state of the model: its
    weights, modules, hooks and flags, and the attributes and globals that its code reads. A change to any of them is
    detected at the next call, and the model is compiled again, unless it has returned to one of its last two states;
    audits find what cannot be detected this way (see `audit` of `optimize`). The model runs in eager, with one warning,
    in training mode, when gradients are required (call it under `torch.no_grad()`), under another default dtype, if
    it cannot be captured, and if eager, which serves a few calls now and then, turns out to be faster in service.

    A pipeline of transformers is returned as a pipeline whose model is a hybrid.

    Args:
        model: an nn.Module, a function or a pipeline; None for use as a decorator with options.
        active: False returns the original model of a hybrid.
        background: compile in another process. Eager serves calls until the compiled form is ready; a later call then
            takes it over. The model is sent with cloudpickle. `tsopt.wait` blocks until it is ready.
        options: options of `optimize`; here `seconds` defaults to 2, and `warmup` to 1.

    Raises:
        UsageError: the model is neither a module nor a function, or it is TorchScript, or what `optimize` has returned.
    """
    if model is None:
        return functools.partial(hybridize, active=active, background=background, **options)
    inside = model_in(model)
    if inside is not None:
        return with_model(model, hybridize(inside, active=active, background=background, **options))
    original = original_of(model)
    if not active:
        return original
    if isinstance(original, DropIn):
        raise UsageError("an optimized model cannot be hybridized", fix="pass the original model")
    if isinstance(original, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        kind = "ScriptModule" if isinstance(original, nn.Module) else "ScriptFunction"
        raise UsageError(f"a {kind} cannot be hybridized", fix="use tsopt.optimize(model, example_input)")
    if isinstance(original, nn.Module):
        return _module(original, Compiled(original, background, options))
    if not callable(original):
        raise UsageError(f"a {type(original).__name__} cannot be hybridized", fix="pass an nn.Module or a function")
    if isinstance(original, STATELESS) or hasattr(type(original), "__get__"):
        return _function(original, Compiled(original, background, options))
    return _Callable(original, Compiled(original, background, options))


def wait(model: Any, seconds: float | None = None) -> bool:
    """Waits for the background compilation of a hybrid.

    Args:
        seconds: timeout; None waits until it is ready.

    Returns:
        Whether nothing is being compiled any more. Calls are then served by the compiled form, or by eager for good.

    Raises:
        UsageError: the model is not a hybrid, or one of its options is invalid.
    """
    compiled: Compiled | None = compiled_of(model)
    if compiled is None:
        raise UsageError(f"a {type(model).__name__} is not a hybrid", fix="tsopt.hybridize(model, background=True)")
    return compiled.fast.wait(seconds) if isinstance(compiled.fast, InBackground) else True


def report(model: Any) -> Report | HybridReport:
    """The report of something optimized; of a hybrid, which of its calls are compiled, and why others are not.

    A function, because a hybrid has the attributes of the model.

    Raises:
        UsageError: the model is neither.
    """
    compiled: Compiled | None = compiled_of(model)
    if compiled is not None:
        return compiled.report()
    found = getattr(model, "report", None)
    if isinstance(found, Report):
        return found
    raise UsageError(
        f"a {type(model).__name__} has no report",
        fix="pass what tsopt.optimize or tsopt.hybridize returned",
    )


def _told_class(module: Any) -> type:
    """The class of the model. Code that replaces `forward` or puts a property on a class asks for it."""
    compiled = behind(module)
    return class_of_model(type(module)) if compiled is None else type(compiled.model)


def _give_class(module: Any, cls: type) -> None:
    """Gives the model another class, as parametrizations do, and with it the hybrid."""
    compiled = behind(module)
    if compiled is None:
        CLASS.__set__(module, cls)
        return
    model: Any = compiled.model
    model.__class__ = class_of_model(cls)
    CLASS.__set__(module, _class(model, compiled))


class _AsModel:
    """A base class of its own: one whose methods call `super()` cannot name its `__class__`."""

    __class__ = property(_told_class, _give_class)  # type: ignore[assignment]


class _Hybrid(_AsModel):
    """Mixin that intercepts the call of a module. Everything else is the module's own.

    Other objects of its class, which `type(hybrid)(...)` and class methods make, are as those of the model's class.
    """

    _tsopt_compiled: Compiled

    def __init_subclass__(cls) -> None:
        """Nothing: the model's class may require arguments here, or register what is derived from it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._tsopt_compiled
        # torch.fx looks for what is called among the modules of what it traces: there it is the hybrid.
        if _is_traced(args, kwargs) or self.__dict__ is not compiled.model.__dict__:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return compiled(args, kwargs, compiled.model)

    def __prepare_scriptable__(self) -> Any:
        """What torch.jit.script compiles: it reads source, and that of the model is in the model's class."""
        compiled = behind(self)
        return self if compiled is None else compiled.model

    def __copy__(self) -> Any:
        compiled = behind(self)
        if compiled is None:
            own = getattr(super(), "__copy__", None)
            return _copied(self) if own is None else own()
        return hybridize(copy.copy(compiled.model), background=compiled.background, **compiled.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        compiled = behind(self)
        if compiled is None:
            own = getattr(super(), "__deepcopy__", None)
            return _copied(self, memo) if own is None else own(memo)
        return hybridize(copy.deepcopy(compiled.model, memo), background=compiled.background, **compiled.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the original model: a compiled form belongs to its process."""
        compiled = behind(self)
        if compiled is not None:
            return original_of, (compiled.model,)
        found: Any = super().__reduce_ex__(protocol)
        if isinstance(found, str):  # the name of a global
            return found
        make, arguments, *state = found
        cls = type(self)  # which nobody can import
        return _called, tuple(class_of_model(cls) if item is cls else item for item in (make, *arguments)), *state


def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch.fx calls it to see what it computes."""
    traces = getattr(_symbolic_trace, "_is_fx_tracing_flag", False)
    return bool(traces) and any(isinstance(value, Proxy) for value in tree_leaves((args, kwargs)))


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a pickle names instead of the function: of some, pickle checks the arguments."""
    return function(*arguments)


def _copied(module: Any, memo: dict[int, Any] | None = None) -> Any:
    """What `copy` makes of an object whose class has no method for it: what is pickled of it, made again.

    Args:
        memo: of a deep copy.
    """
    found = module.__reduce_ex__(4)
    return module if isinstance(found, str) else copy._reconstruct(module, memo, *found)  # type: ignore[attr-defined]


def _module(model: nn.Module, compiled: Compiled) -> nn.Module:
    made: nn.Module = object.__new__(_class(model, compiled))
    made.__dict__ = model.__dict__  # shared: what is done to one is done to the other
    return made


def _class(model: nn.Module, compiled: Compiled) -> type:
    """The class of a hybrid of this model."""
    cls = type(model)
    names = {"_tsopt_compiled": compiled, "__module__": cls.__module__, "__doc__": cls.__doc__}
    if cls.__call__ is nn.Module.__call__ and cls._call_impl is nn.Module._call_impl:  # else the two differ
        names["forward"] = _forward(cls)
    slots = {name: getattr(cls, name) for name in slot_names(cls)}
    names |= {name: _shared(slot, model) for name, slot in slots.items() if isinstance(slot, MemberDescriptorType)}
    return type(cls.__name__, (cls,) if issubclass(cls, _Hybrid) else (_Hybrid, cls), names)


def _shared(slot: Any, model: nn.Module) -> property:
    """What `__slots__` has laid out, which is not in the `__dict__` that the two share."""

    def owner(module: Any) -> Any:
        return model if module.__dict__ is model.__dict__ else module  # another object of the class has its own

    def write(module: Any, value: Any) -> None:
        slot.__set__(owner(module), value)

    def delete(module: Any) -> None:
        slot.__delete__(owner(module))

    return property(lambda module: slot.__get__(owner(module)), write, delete, slot.__doc__)


def _forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """The `forward` of a hybrid, for code that calls it past `__call__`, and therefore past the model's hooks."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = self._tsopt_compiled
        if _is_traced(args, kwargs) or self.__dict__ is not compiled.model.__dict__:
            return cls.forward(self, *args, **kwargs)
        if "forward" in self.__dict__:  # what is compiled then: it may call the class's own, which is this one
            return type(compiled.model).forward(compiled.model, *args, **kwargs)
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


class _Callable(Wrapper):
    """A callable object whose calls are compiled. Its attributes and methods are the object's own."""

    def __init__(self, wrapped: Callable[..., Any], compiled: Compiled) -> None:
        vars(self).update(__wrapped__=wrapped, _tsopt_compiled=compiled, __doc__=wrapped.__doc__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tsopt_compiled(args, kwargs, self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["__wrapped__"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__wrapped__, name)

    def __dir__(self) -> list[str]:
        return dir(self.__wrapped__)

    def __copy__(self) -> Any:
        return self._again(copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._again(copy.deepcopy(self.__wrapped__, memo))

    def _again(self, wrapped: Callable[..., Any]) -> Any:
        compiled = self._tsopt_compiled
        return hybridize(wrapped, background=compiled.background, **compiled.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the original: a compiled form belongs to its process."""
        return original_of, (self.__wrapped__,)
