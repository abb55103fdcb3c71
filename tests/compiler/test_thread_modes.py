"""What a graph of TorchDynamo that raises has switched in its thread is switched back."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.amp import autocast_mode
from torch.autograd import grad_mode

from tsopt.compiler.thread_modes import modes_kept, switches_modes


def modes():
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled(), depth),
        *((torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda")),
    )


def autocast(x):
    mode = autocast_mode._enter_autocast("cpu", torch.float16, True, False)
    x = fails(x)
    autocast_mode._exit_autocast(mode)
    return x


def inference(x):
    mode = grad_mode._enter_inference_mode(True)
    x = fails(x)
    grad_mode._exit_inference_mode(mode)
    return x


def without_gradients(x):
    torch._C._set_grad_enabled(False)
    x = fails(x)
    torch._C._set_grad_enabled(True)
    return x


def both(x):
    mode = autocast_mode._enter_autocast("cpu", torch.bfloat16, True, None)
    x = inference(x)
    autocast_mode._exit_autocast(mode)
    return x


def fails(x):
    if isinstance(x, torch.Tensor):
        raise ValueError("stop")
    return x


@pytest.mark.parametrize("graph", [autocast, inference, without_gradients, both])
@pytest.mark.parametrize("outside", [torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_a_call_that_raises_leaves_the_modes_as_they_were(graph, outside):
    with outside():
        before, kept = modes(), []
        with torch.no_grad():
            try:
                with modes_kept():
                    graph(torch.ones(1))
            except ValueError as error:
                kept.append(error)  # and its frames, with all that these held
        assert modes() == before
    assert kept


@pytest.mark.parametrize(
    "function", [autocast_mode._enter_autocast, grad_mode._enter_inference_mode, torch._C._set_grad_enabled]
)
def test_which_graphs_switch_them(function):
    graph = fx.Graph()
    graph.output(graph.call_function(function, (True,)))
    inner = fx.GraphModule(torch.nn.Module(), graph)
    outer = fx.symbolic_trace(lambda x: x + 1)
    assert not switches_modes(outer)
    outer.branch = inner
    assert switches_modes(inner)
    assert switches_modes(outer)
