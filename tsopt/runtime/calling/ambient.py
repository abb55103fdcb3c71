"""Ambient state that a compiled form does not support: gradients, transforms, tracing, autocast, CUDA graphs.

While one of these is active, either the model itself is called or the call is refused. Can be imported without torch.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsopt.compiler.calls.structure import flatten
from tsopt.errors import CaptureError, SignatureError

POLICIES = ("eager", "error")

# As a guard checks them, in the order of what they cost: an expression that is true where one is on.
FAST = "transforms() is not None or tracing() is not None or dispatching() or autocasting() or (modes() and mode())"
FAST_ON_GPU = "recording()"  # for tensors on a GPU, besides
RECORDING = "a CUDA graph is recording the call"


@functools.cache
def fast_names() -> dict[str, Callable[[], Any]]:
    """What the names in FAST and FAST_ON_GPU stand for. Needs torch."""
    import torch

    return {
        "transforms": torch._C._functorch.peek_interpreter_stack,
        "tracing": torch._C._get_tracing_state,
        "dispatching": torch._C._len_torch_dispatch_stack,
        "autocasting": torch._C._is_any_autocast_enabled,
        "modes": torch._C._len_torch_function_stack,
        "mode": _function_mode,
        "gradients": torch.is_grad_enabled,
        "recording": _is_recording,
    }


def _is_recording() -> bool:
    """Whether a CUDA graph records what is called on the current stream. Never initializes CUDA, nor needs it."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _function_mode() -> str:
    """The innermost mode that overrides torch's functions; empty if there are only default devices."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    others = [type(mode).__name__ for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
    return others[-1] if others else ""


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes torch.compile skip a function and everything it calls: there is nothing to trace in it.

    Like `torch.compiler.disable`, but without a wrapper around each call. Needs torch.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def objection(values: Sequence[Any]) -> str:
    """Why no compiled form can serve a call; empty if one can.

    Args:
        values: the tensors of the call.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    names = fast_names()
    if names["transforms"]() is not None:
        return "a torch.func transform (grad, jacrev, vmap, ...) is active"
    if names["tracing"]() is not None:
        return "torch.jit.trace is recording the call"
    if names["dispatching"]():
        return f"{_innermost(torch)} intercepts the ops of the call"
    if names["modes"]() and (mode := names["mode"]()):
        return f"{mode} intercepts the functions of the call"
    if names["autocasting"]():
        return "autocast is enabled and chooses the dtype of each op"
    if any(getattr(value, "is_cuda", False) for value in values) and names["recording"]():
        return RECORDING
    if torch.autograd.forward_ad._current_level >= 0 and any(map(_is_dual, values)):
        return "forward-mode gradients are required"
    if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in values):
        return "gradients are required for an input"
    return ""


def objection_to(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """`objection`, for the tensors of a call."""
    try:
        leaves, _ = flatten((args, kwargs))
    except CaptureError:  # a call that contains itself: what is wrong with it is not this
        leaves = []
    return objection(leaves)


class Unserved:
    """Calls that only the model itself can serve, in the caller's modes: made with one warning, or refused.

    Args:
        model: what is called.
        name: of the model, for the warning.
        policy: one of POLICIES.
    """

    def __init__(self, model: Callable[..., Any], name: str, policy: str) -> None:
        self.model, self.name, self.policy = model, name, policy
        self._said: set[str] = set()

    def __call__(self, reason: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Raises SignatureError where the policy is `error`."""
        if self.policy == "error":
            raise SignatureError(
                "only the model itself can serve this call",
                why=reason,
                fix="call the model itself, or use optimize(..., on_gradients='eager')",
            )
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"tsopt: {self.name} runs in eager mode: {reason}", stacklevel=4)
        return self.model(*args, **kwargs)


def _innermost(torch: Any) -> str:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return type(modes[-1]).__name__ if modes else "a dispatch mode"


def _is_dual(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(value).tangent is not None
