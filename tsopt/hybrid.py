"""`hybridize`: the model itself, compiled behind its interface at the first call; eager where results would differ."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Container
from typing import Any, TypeVar, overload

import torch
from torch import nn

from tsopt.api import optimize
from tsopt.background.in_background import InBackground
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.protect import modules_of, protected
from tsopt.errors import CaptureError, TsoptError, UsageError
from tsopt.runtime.calling.ambient import objection, untraced
from tsopt.runtime.calling.audit import LOOK_AT, NEAR, SHARE, Audits, executable_difference
from tsopt.runtime.calling.fallback import InEager
from tsopt.runtime.calling.model_changes import Watch, tensors_of
from tsopt.runtime.calling.model_reads import HOOKS
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.calling.partitioned import Partitioned
from tsopt.runtime.calling.served import HybridReport
from tsopt.runtime.calling.signature_guard import watcher
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.report import Report

log = logging.getLogger("tsopt")
# Defaults: the first call blocks the caller, changes of the weights are detected here, and who calls a hybrid may be a
# library that makes many calls once.
OPTIONS: dict[str, Any] = {"seconds": 2.0, "share_weights": True, "warmup": 1}
CHANGES = 3  # times that the model may change between compiled calls before it stays in eager
# Queries whose answer depends on how code is called, not on its arguments.
MODES = frozenset({"is_grad_enabled", "is_inference_mode_enabled", "is_inference", "inference_mode"})
# Called on every call: a global of this module is looked up faster than an attribute of torch.
_interferes, _gradients, _default_dtype = watcher(), torch.is_grad_enabled, torch.get_default_dtype
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

    Args:
        model: an nn.Module or a function; None for use as a decorator with options.
        active: False returns the original model of a hybrid.
        background: compile in another process. Eager serves calls until the compiled form is ready; a later call then
            takes it over. The model is sent with cloudpickle. `tsopt.wait` blocks until it is ready.
        options: options of `optimize`; here `seconds` defaults to 2, and `warmup` to 1.

    Raises:
        UsageError: the model is neither a module nor a function.
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
    """The state behind a hybrid; None for anything else."""
    found = getattr(type(model) if isinstance(model, nn.Module) else model, "_tsopt_compiled", None)
    return found if isinstance(found, Compiled) else None


class Compiled:
    """The compiled form of a model, for as long as the model does not change.

    Attributes:
        fast: the result of `optimize`; None before the first call and while eager runs.
        why_eager: why eager runs for good.
    """

    def __init__(self, model: Callable[..., Any], background: bool, options: dict[str, Any]) -> None:
        self.model, self.background, self.options = model, background, OPTIONS | options
        self._is_module = isinstance(model, nn.Module)
        self.fast: Optimized | Partitioned | InBackground | None = None
        self.why_eager = ""
        self._audits = Audits(0)
        self._watch: Watch | InBackground | None = None
        self._ambient = _Ambient()
        self._refused_in: list[bool] | None = None  # the training flags with which it could not be captured
        self._changes = 0
        self._calls, self._seconds = 0, 0.0
        self._in_eager: Counter[str] = Counter()
        self._said: set[str] = set()
        self._lock = threading.RLock()

    @untraced
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]) -> Any:
        self._calls += 1
        audits = self._audits
        audits.left = left = audits.left - 1
        if left < 0:
            return self._looked_at(args, kwargs, eager)
        fast = self.fast
        if fast is None or self._reason(args, kwargs) or self._changed():
            fast = self._ready(args, kwargs)
        return eager(*args, **kwargs) if fast is None else fast(*args, **kwargs)

    def _looked_at(self, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]) -> Any:
        """A call that is timed, and audited where that is affordable."""
        self._calls -= 1  # it comes to `__call__` once more
        fast = self.fast
        served = fast is not None and not self._reason(args, kwargs) and not self._changed()
        if not served:
            self._audits.left = NEAR
            return self(args, kwargs, eager)
        with self._audits.turn() as audited:
            found = self._audit(fast, args, kwargs) if audited else ""
        if found:
            self._differs(found)
        return self._audits.timed(lambda: self(args, kwargs, eager))

    def _audit(self, fast: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if isinstance(fast, Partitioned):
            return fast.difference(args, kwargs)
        executable = fast.serving(args, kwargs)
        return None if executable is None else executable_difference(executable, self.model, Example(args, kwargs))

    def _differs(self, found: str) -> None:
        """After a difference in an audit: the model is optimized again in its current state."""
        with self._lock:
            self.fast, self._watch, self._changes = None, None, self._changes + 1
        self._warn(f": an audit found a difference ({found}); the model is optimized again; {LOOK_AT}")

    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimized | Partitioned | InBackground | None:
        if self.why_eager and self._other_flags():
            self.why_eager, self._refused_in = "", None
        reason = self.why_eager or self._reason(args, kwargs)
        if reason:
            self._declined(reason)
            return None
        with self._lock:
            if self.fast is not None and self._changed():
                if self._trains():
                    self._declined("a submodule is in training mode: call model.eval() first")
                    return None
                self.fast, self._watch, self._changes = None, None, self._changes + 1
                log.info("%s has changed and is optimized again", type(self.model).__name__)
            if self._changes > CHANGES:
                self.why_eager = "its weights, hooks, attributes or globals change between calls"
                self._declined(self.why_eager)
                return None
            if self.fast is None and not self.why_eager:
                self._begin() if self.background else self._optimize(Example(args, kwargs))
            return self.fast

    def _optimize(self, example: Example) -> None:
        self._ambient, audits = _Ambient(), Audits(self.options.get("audit", SHARE))
        start = time.perf_counter()
        try:
            fast = optimize(self.model, example, **self.options | {"audit": 0})
        except UsageError:
            raise
        except TsoptError as error:
            self.why_eager = "; ".join(filter(None, (error.what, error.where)))
            self._refused_in = [module.training for module in modules_of(self.model)]
            self._declined(self.why_eager)
            return
        finally:
            self._seconds += time.perf_counter() - start
        if isinstance(fast, InEager):
            self.why_eager = fast.report.why
            self._refused_in = [module.training for module in modules_of(self.model)]
            self._declined(self.why_eager)
            return
        fast.unwatched()
        watch = Watch(self.model, fast.program.state.values() if isinstance(fast, Optimized) else ())
        self._learn(watch, example)
        self._ambient.ask(watch.asks)
        if not _is_eager(fast):  # which is not audited
            self._audits = audits.warm(lambda: self._audit(fast, example.args, example.kwargs))
        self._watch, self.fast = watch, fast

    def _learn(self, watch: Watch, example: Example) -> None:
        """Ignores what the model itself changes when it is called."""
        with protected(self.model, written=watch.written), contextlib.suppress(Exception):
            call = InputSet("example", example).clone()
            self.model(*call.args, **call.kwargs)
            watch.leave_out_changes()
        watch.renew()

    def _begin(self) -> None:
        self._ambient = _Ambient()
        self.fast = self._watch = InBackground(self.model, self.options | {"audit": 0}, self._say)
        self._ambient.ask(self.fast.asks)
        self._audits = Audits(self.options.get("audit", SHARE))

    def _changed(self) -> bool:
        return self._watch is not None and self._watch.changed()

    def _trains(self) -> bool:
        """Whether a module was switched to training mode."""
        watch = self._watch
        flags = watch is not None and watch.training_changed()
        return flags and any(module.training for module in modules_of(self.model))

    def _other_flags(self) -> bool:
        """Whether training flags have changed since it could not be captured."""
        return self._refused_in is not None and self._refused_in != [m.training for m in modules_of(self.model)]

    def _reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why this call is served by eager."""
        if self._is_module and self.model.training:  # type: ignore[attr-defined]
            return "it is in training mode: call model.eval() first"
        if _interferes():
            return objection(())
        if _gradients() and self._wants_gradients(args, kwargs):
            return "gradients are required: call it under torch.no_grad() or torch.inference_mode()"
        return self._ambient.differs()

    def _wants_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if any(tensor.requires_grad for tensor in tensors_of(self.model)):
            return True
        try:
            leaves, _ = flatten((args, kwargs))
        except CaptureError:  # it contains itself: whatever it holds, it is a call for eager
            return True
        return any(getattr(leaf, "requires_grad", False) for leaf in leaves)

    def _declined(self, reason: str) -> None:
        """A call that the model itself serves."""
        self._in_eager[reason] += 1
        self._say(reason)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._warn(f" runs in eager mode: {reason}", stacklevel=7)

    def report(self) -> HybridReport:
        """Which calls are compiled, and why others are not."""
        fast, seconds, in_eager = self.fast, self._seconds, Counter(self._in_eager)
        name = getattr(self.model, "__name__", type(self.model).__name__)
        if isinstance(fast, InBackground):
            return HybridReport(name, self._calls, in_eager + fast.in_eager, fast.seconds, tuple(fast.reports))
        if isinstance(fast, Optimized):
            in_eager, seconds = in_eager + fast.in_eager, seconds + fast.seconds
        if fast is not None and _is_eager(fast):
            in_eager["no compiled form is faster"] += self._calls - in_eager.total()
        return HybridReport(name, self._calls, in_eager, seconds, () if fast is None else (fast.report,))

    def _warn(self, text: str, stacklevel: int = 5) -> None:
        name = getattr(self.model, "__name__", type(self.model).__name__)
        warnings.warn(f"tsopt: {name}{text}", stacklevel=stacklevel)


def _is_eager(fast: Optimized | Partitioned) -> bool:
    """Whether eager has won the race."""
    return fast.executable is None if isinstance(fast, Optimized) else fast.backend == "eager"


class _Ambient:
    """The process-wide settings that a model may query, as they are when it is compiled."""

    __slots__ = ("_asked", "_dtype", "_inference")

    def __init__(self) -> None:
        self._dtype, self._inference = torch.get_default_dtype(), torch.is_inference_mode_enabled()
        self._asked = False

    def ask(self, names: Container[str]) -> None:
        """Takes the names that a model reads: most models query no modes and behave the same in each."""
        self._asked = any(name in names for name in MODES)

    def differs(self) -> str:
        """Why this call is served by eager, if a process-wide setting has changed."""
        if _default_dtype() is not self._dtype:
            return "the default dtype has changed since it was compiled"
        if self._asked and (torch.is_grad_enabled() or torch.is_inference_mode_enabled() is not self._inference):
            return "it queries the grad mode, which has changed since it was compiled"
        return ""


class _Hybrid:
    """Mixin that intercepts the call of a module. Everything else is the module's own."""

    _tsopt_compiled: Compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._tsopt_compiled
        return compiled(args, kwargs, compiled.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        compiled = self._tsopt_compiled
        return hybridize(copy.deepcopy(compiled.model, memo), background=compiled.background, **compiled.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the original model: a compiled form belongs to its process."""
        return original_of, (self._tsopt_compiled.model,)


def _module(model: nn.Module, compiled: Compiled) -> nn.Module:
    cls = type(model)
    names = {
        "_tsopt_compiled": compiled,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "forward": _forward(cls),
    }
    made: nn.Module = object.__new__(type(cls.__name__, (_Hybrid, cls), names))
    made.__dict__ = model.__dict__  # shared: what is done to one is done to the other
    return made


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
