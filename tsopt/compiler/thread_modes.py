"""Modes of the thread that graphs of TorchDynamo switch by calls: autocast, gradients, inference mode.

Such a graph has one call where a `with` begins, and another where it ends, which is not made if anything in between
raises.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch.amp import autocast_mode
from torch.autograd import grad_mode

SWITCHES = (autocast_mode._enter_autocast, grad_mode._enter_inference_mode, torch._C._set_grad_enabled)
DEVICES = ("cpu", "cuda", "mps", "xpu")  # whose autocast is put back


def switches_modes(graph: fx.GraphModule) -> bool:
    """Whether calls of a graph switch any of these modes, in its branches and loops too."""
    inside = [item for item in graph.modules() if isinstance(item, fx.GraphModule)]
    return any(node.target in SWITCHES for item in inside for node in item.graph.nodes)


@contextmanager
def modes_kept() -> Iterator[None]:
    """Runs a block that calls such a graph. If it raises, the modes are what they were before it."""
    grad, cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    autocast = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in DEVICES]
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    except BaseException as error:
        # Inference mode lasts for as long as what the call that began it has returned, which the frames hold.
        traceback.clear_frames(error.__traceback__)
        torch._C._set_grad_enabled(grad)
        for name, enabled, dtype in autocast:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(cached)
        torch.autocast_increment_nesting()
        while (left := torch.autocast_decrement_nesting()) >= depth:
            pass
        if not left:
            torch.clear_autocast_cache()
        raise
