"""What an optimizer has to leave as it was: the model, its inputs, and the state of the process."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import tsopt

State = dict[str, Any]  # what it is -> its value, in a form that `==` compares by bits
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def state_of(model: Callable[..., Any], example: tsopt.Example) -> State:
    """The state of a model that is about to be optimized. Plain attributes count by value, however deep."""
    found = state_of_the_process()
    found["inputs"] = _described((example.args, example.kwargs), {})
    if not isinstance(model, nn.Module):
        return found | {"function": _described(vars(model), {})} if hasattr(model, "__dict__") else found
    if isinstance(model, torch.jit.ScriptModule):
        tensors = {name: _described(value, {}) for name, value in model.state_dict().items()}
        return found | {"tensors": tensors, "training": model.training}
    seen: dict[int, int] = {id(module): number for number, module in enumerate(model.modules())}
    for name, module in model.named_modules():
        at = name or "model"
        found[f"{at}: class"] = id(type(module)), _names_of(type(module))
        for key, value in vars(module).items():
            found[f"{at}.{key}"] = _described(value, seen)
    return found


def _names_of(cls: type) -> dict[str, int]:
    # Python makes a class's empty annotations when somebody asks for them.
    return {key: id(value) for key, value in vars(cls).items() if value or key != "__annotations__"}


def state_of_the_process() -> State:
    """The switches that a library may turn, and what it may leave lying about."""
    return {
        "random state": (
            *(_digest(torch.get_rng_state().numpy().tobytes()), repr(random.getstate())),
            repr([_digest(x.tobytes()) if isinstance(x, np.ndarray) else x for x in np.random.get_state()]),
        ),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "warning filters": (list(warnings.filters), id(warnings.showwarning)),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        "flags of libraries": (
            *(torch.backends.mkldnn.is_available(), torch._C._get_mkldnn_enabled()),
            *(torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
        ),
        "streams": (id(sys.stdout), id(sys.stderr), id(sys.stdin)),
        "signals": [signal.getsignal(number) for number in SIGNALS],
        "hooks": (id(sys.excepthook), id(sys.settrace), sys.gettrace(), id(threading.excepthook)),
        "recursion limit": sys.getrecursionlimit(),
        "import path": list(sys.path),
        "logging": (logging.root.level, len(logging.root.handlers), logging.root.manager.disable),
    }


def changed(before: State, after: State) -> list[str]:
    """What is not as it was, by name."""
    gone = before.keys() ^ after.keys()
    return sorted(gone | {key for key in before.keys() & after.keys() if before[key] != after[key]})


def _described(value: Any, seen: dict[int, int]) -> Any:
    """A value by its bits and by what it holds; what was met before, modules among it, by its number."""
    if value is None or isinstance(value, (bool, int, str, bytes, torch.dtype, torch.device, type)):
        return value
    if isinstance(value, (float, complex)):
        return repr(value)
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.strides, _digest(value.tobytes())
    if isinstance(value, dict):
        items = [(_described(key, seen), _described(item, seen)) for key, item in value.items()]
        return type(value).__name__, items, _held(value, seen)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_described(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, value))
    return f"{type(value).__module__}.{type(value).__qualname__}", _held(value, seen)


def _held(value: Any, seen: dict[int, int]) -> Any:
    plain = callable(value) and not isinstance(value, nn.Module)
    return None if plain else {key: _described(item, seen) for key, item in getattr(value, "__dict__", {}).items()}


def _tensor(value: torch.Tensor) -> Any:
    kind = type(value).__name__, value.dtype, tuple(value.shape), value.requires_grad, value.is_leaf, value.grad is None
    if value.layout != torch.strided or value.device.type == "meta":
        return kind
    return *kind, value.stride(), _digest(value.detach().contiguous().reshape(-1).view(torch.uint8))


def _digest(data: Any) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else data.numpy(force=True).tobytes()).hexdigest()[:16]
