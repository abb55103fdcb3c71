"""A GPU that is played: records the calls of ops and makes them again in the same memory, as a CUDA graph does."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tsopt
from tsopt.runtime.backends import cudagraph
from tsopt.runtime.backends import recorded as recorded_functions
from tsopt.runtime.backends.cudagraph import CudaGraphBackend

IMAGE = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Stream:
    """Keeps what it waits for."""

    def __init__(self, *_) -> None:
        self.waited = []

    def wait_stream(self, other) -> None:
        self.waited.append(other)

    wait_event = wait_stream


class Event:
    """Keeps where it was recorded last."""

    def record(self, stream) -> None:
        self.stream = stream


class Graph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        self.calls.append((func, args, kwargs or {}, found))
        return found

    def instantiate(self) -> None:
        """It can be replayed as it is."""

    def replay(self) -> None:
        for func, args, kwargs, found in self.calls:
            for mine, value in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                if mine.data_ptr() != value.data_ptr():
                    mine.copy_(value)


def imitate(monkeypatch) -> SimpleNamespace:
    """Replaces torch.cuda with the imitation, and returns it so that a test can change it."""
    made = SimpleNamespace(
        Stream=Stream,
        Event=Event,
        CUDAGraph=lambda keep_graph: Graph(),
        caller=Stream(),
        current_stream=lambda device=None: made.caller,
        device=lambda device: contextlib.nullcontext(),
        stream=lambda stream: contextlib.nullcontext(),
        graph=lambda graph, stream, capture_error_mode: graph,
        is_available=lambda: True,
        synchronize=lambda device=None: None,
    )
    for module in (cudagraph, recorded_functions):
        monkeypatch.setattr(module, "cuda", made)
    monkeypatch.setattr(recorded_functions, "_clear_workspaces", lambda: None)
    return made


def recorded(model, *args):
    return CudaGraphBackend().compile(tsopt.capture(model, args))


class Convolutions(nn.Module):
    """Ends in an image, which the caller sees."""

    def __init__(self, end=lambda y: y) -> None:
        super().__init__()
        self.first, self.second, self.end = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), end
        self.eval()

    def forward(self, x):
        return self.end(self.second(self.first(x).relu()))


class Block(nn.Module):
    """Convolutions with what can follow them: a residual sum, a ReLU with and without an upper end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1, bias=False)
        self.end, self.depthwise = nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 4, 3, groups=4)
        self.eval()

    def forward(self, x):
        y = (self.last(self.first(x).relu()) + x).relu()
        return self.depthwise(F.relu6(self.end(y))).relu()
