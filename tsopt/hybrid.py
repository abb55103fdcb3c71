"""`hybridize`: the model itself, compiled behind its interface at the first call; eager where that is not the same."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import nn

from tsopt.api import optimize
from tsopt.background import InBackground
from tsopt.compiler.example import Example
from tsopt.compiler.structure import flatten
from tsopt.errors import CaptureError, TsoptError, UsageError
from tsopt.runtime.dispatch import Optimized
from tsopt.runtime.fallback import InEager
from tsopt.runtime.parts import InParts
from tsopt.runtime.watch import Watch, tensors_of

log = logging.getLogger("tsopt")
SECONDS = 2.0  # of timing, where the caller does not say: somebody waits for the first call
CHANGES = 3  # times that weights may change between compiled calls before it is eager for good
Model = TypeVar("Model", bound=Callable[..., Any])


@overload
def hybridize(model: Model, *, active: bool = True, background: bool = False, **options: Any) -> Model: ...


@overload
def hybridize(*, active: bool = True, background: bool = False, **options: Any) -> Callable[[Model], Model]: ...


def hybridize(model: Any = None, *, active: bool = True, background: bool = False, **options: Any) -> Any:
    """The same model or function, optimized at its first call and verified before it is used.

    A module comes back as an object of its own class that shares everything with it: attributes, parameters, hooks,
    `state_dict`, `train`, `to`. What is compiled holds for the weights as they are; when they change, it is made anew.
    Eager runs, and a warning says so once: in training mode, where gradients are wanted (call it under
    `torch.no_grad()`), and where the model cannot be captured.

    Args:
        model: an nn.Module or a function; None: for use as a decorator with options.
        active: False gives back what a hybrid was made from.
        background: compile in another process; eager runs until that is ready, and a call takes over what it has made.
            The model is sent there by cloudpickle. `tsopt.wait` waits for it.
        options: of `optimize`; about 2 seconds of timing are the default here.

    Raises:
        UsageError: it is neither a module nor a function.
    """
    if model is None:
        return functools.partial(hybridize, active=active, background=background, **options)
    original = original_of(model)
    if not active:
        return original
    if isinstance(original, nn.Module):
        return _module(original, Compiled(original, background, options))
    if not callable(original):
        raise UsageError(f"a {type(original).__name__} cannot be hybridized", fix="pass an nn.Module or a function")
    return _function(original, Compiled(original, background, options))


def wait(model: Any, seconds: float | None = None) -> bool:
    """Waits for what a hybrid compiles in the background.

    Args:
        seconds: to wait at most; None: until it is ready.

    Returns:
        Whether nothing is on its way any more: from then on calls are served by what was made, or by eager for good.

    Raises:
        UsageError: the model is no hybrid, or an option of it is not what it must be.
    """
    compiled = compiled_of(model)
    if compiled is None:
        raise UsageError(f"a {type(model).__name__} compiles nothing", fix="tsopt.hybridize(model, background=True)")
    return compiled.fast.wait(seconds) if isinstance(compiled.fast, InBackground) else True


def original_of(model: Any) -> Any:
    """What a hybrid was made from; the model itself where it is none."""
    compiled = compiled_of(model)
    return model if compiled is None else compiled.model


def compiled_of(model: Any) -> Compiled | None:
    """The state behind a hybrid; None for anything else."""
    found = getattr(type(model) if isinstance(model, nn.Module) else model, "_tsopt_compiled", None)
    return found if isinstance(found, Compiled) else None


class Compiled:
    """The compiled form of a model, for as long as its weights are what they were.

    Attributes:
        fast: what `optimize` made; None before the first call and where eager runs.
        why_eager: why eager runs for good.
    """

    def __init__(self, model: Callable[..., Any], background: bool, options: dict[str, Any]) -> None:
        self.model, self.background, self.options = model, background, {"seconds": SECONDS} | options
        self.fast: Optimized | InParts | InBackground | None = None
        self.why_eager = ""
        self._watch: Watch | InBackground | None = None
        self._changes = 0
        self._said: set[str] = set()
        self._lock = threading.RLock()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]) -> Any:
        fast = self.fast
        if fast is None or self._reason(args, kwargs) or self._changed():
            fast = self._ready(args, kwargs)
        return eager(*args, **kwargs) if fast is None else fast(*args, **kwargs)

    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimized | InParts | InBackground | None:
        reason = self.why_eager or self._reason(args, kwargs)
        if reason:
            self._say(reason)
            return None
        with self._lock:
            if self.fast is not None and self._changed():
                self.fast, self._changes = None, self._changes + 1
                log.info("the weights of %s have changed: it is optimized anew", type(self.model).__name__)
            if self._changes > CHANGES:
                self.why_eager = "its weights change between calls"
                self._say(self.why_eager)
                return None
            if self.fast is None and not self.why_eager:
                self._begin() if self.background else self._optimize(Example(args, kwargs))
            return self.fast

    def _optimize(self, example: Example) -> None:
        try:
            fast = optimize(self.model, example, **self.options)
        except UsageError:
            raise
        except TsoptError as error:
            self.why_eager = "; ".join(filter(None, (error.what, error.where)))
            self._say(self.why_eager)
            return
        if isinstance(fast, InEager):
            self.why_eager = fast.report.why
            self._say(self.why_eager)
            return
        self._watch = Watch(self.model, fast.program.state.values() if isinstance(fast, Optimized) else ())
        self.fast = fast

    def _begin(self) -> None:
        self.fast = self._watch = InBackground(self.model, self.options, self._say)

    def _changed(self) -> bool:
        return self._watch is not None and self._watch.changed()

    def _reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why this call is eager's."""
        model = self.model
        if isinstance(model, nn.Module) and model.training:
            return "it is in training mode: model.eval() first"
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return "autocast is on, and decides in the call what it computes in"
        if torch.is_grad_enabled() and self._wants_gradients(args, kwargs):
            return "gradients are wanted: call it under torch.no_grad() or torch.inference_mode()"
        return ""

    def _wants_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if any(tensor.requires_grad for tensor in tensors_of(self.model)):
            return True
        try:
            leaves, _ = flatten((args, kwargs))
        except CaptureError:  # it contains itself: whatever it holds, it is a call for eager
            return True
        return any(getattr(leaf, "requires_grad", False) for leaf in leaves)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            name = getattr(self.model, "__name__", type(self.model).__name__)
            warnings.warn(f"tsopt: {name} runs eager: {reason}", stacklevel=5)


class _Hybrid:
    """What a module's class gets in front: the call. The rest is the module's own."""

    _tsopt_compiled: Compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._tsopt_compiled
        return compiled(args, kwargs, compiled.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        compiled = self._tsopt_compiled
        return hybridize(copy.deepcopy(compiled.model, memo), background=compiled.background, **compiled.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as what it was made from: compiled forms belong to a process."""
        return original_of, (self._tsopt_compiled.model,)


def _module(model: nn.Module, compiled: Compiled) -> nn.Module:
    cls = type(model)
    names = {"_tsopt_compiled": compiled, "__module__": cls.__module__, "__doc__": cls.__doc__}
    made: nn.Module = object.__new__(type(cls.__name__, (_Hybrid, cls), names))
    made.__dict__ = model.__dict__  # shared: what is done to one is done to the other
    return made


def _function(function: Callable[..., Any], compiled: Compiled) -> Callable[..., Any]:
    @functools.wraps(function)
    def hybrid(*args: Any, **kwargs: Any) -> Any:
        return compiled(args, kwargs, function)

    hybrid._tsopt_compiled = compiled  # type: ignore[attr-defined]
    return hybrid
