"""The state of a machine: how long its threads take to meet, and how long layers take that are always the same.

On virtual machines two threads can take twice as long to meet for minutes at a time. An engine whose threads meet after
each layer is slower then, and eager, which computes small layers with one thread, is not: nothing about a model. Other
processes do not slow eager and an engine down equally, so the time of fixed layers is a second yardstick.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tsopt.compiler.capture.capture import capture
from tsopt.errors import TsoptError
from tsopt.runtime.backends.backend import compile

LAYERS, WIDTH = 4, 256  # so small that threads mostly wait for each other
SAMPLES, CALLS = 60, 50
UNDISTURBED = 10  # percentile: another process may have a core for half of the time
# Of fixed layers: convolutions of 3x3 pixels in ONNX Runtime, and a product of two square matrices in torch.
CHANNELS, PIXELS, CONVOLUTIONS, SIDE = 64, 28, 4, 384
SECONDS, FEWEST_CALLS = 0.25, 6  # for each
# Of small layers: a call is mostly what an engine and Python add to any call, and waits for no other thread.
SMALL_LAYERS, SMALL_WIDTH = 3, 128
# Percent of the calls, whose times are compared: what nothing else on the machine has disturbed. Where another process
# runs half of the time, calls on several threads take either as long as alone, or twice as long: medians of sessions of
# the same engine then differ by 25 %, these by 1 to 3 % (see Chen and Revels 2016, arXiv:1608.04295).
QUICKEST = 5


class Meeting:
    """Layers of ONNX Runtime after each of which its threads meet."""

    def __init__(self) -> None:
        weight, self._x = torch.eye(WIDTH, device="cpu"), torch.ones(1, WIDTH, device="cpu")

        def layers(x: torch.Tensor) -> torch.Tensor:
            for _ in range(LAYERS):
                x = F.linear(x, weight)
            return x

        self._call = None
        if torch.get_num_threads() > 1:
            try:
                self._call = compile(capture(layers, self._x), "onnxruntime")
            except TsoptError:  # the machine's state is not known then
                self._call = None

    def microseconds(self) -> float | None:
        """Of a call now; None if there is a single thread, or no ONNX Runtime."""
        if self._call is None:
            return None
        spent = []
        for _ in range(SAMPLES):
            start = time.perf_counter()
            for _ in range(CALLS):
                self._call(self._x)
            spent.append((time.perf_counter() - start) / CALLS * 1e6)
        return float(np.percentile(spent, UNDISTURBED))


class SmallLayers:
    """Layers in ONNX Runtime of which a call takes about ten microseconds, the same for all models."""

    def __init__(self) -> None:
        weight, self._x = torch.eye(SMALL_WIDTH, device="cpu"), torch.ones(1, SMALL_WIDTH, device="cpu")

        def layers(x: torch.Tensor) -> torch.Tensor:
            for _ in range(SMALL_LAYERS):
                x = F.linear(x, weight).relu()
            return x

        self._program = capture(layers, self._x)

    def opened(self) -> Callable[..., Any] | None:
        """A freshly compiled callable that ignores its arguments; None without ONNX Runtime."""
        try:
            call = compile(self._program, "onnxruntime")
        except TsoptError:
            return None
        return lambda *args, **kwargs: call(self._x)


class FixedLayers:
    """Layers that are the same for all models. Their time is that of the machine."""

    def __init__(self) -> None:
        weight, self._x = torch.eye(CHANNELS, device="cpu"), torch.ones(1, CHANNELS, PIXELS, PIXELS, device="cpu")
        weight = weight[:, :, None, None].expand(-1, -1, 3, 3).contiguous() / 9
        self._matrix = torch.eye(SIDE, device="cpu")

        def layers(x: torch.Tensor) -> torch.Tensor:
            for _ in range(CONVOLUTIONS):
                x = F.conv2d(x, weight, padding=1).relu()
            return x

        self._program = capture(layers, self._x) if torch.get_num_threads() > 1 else None

    def milliseconds(self) -> float | None:
        """Of a call now: the geometric mean of the convolutions and of the product.

        None with a single thread, or without ONNX Runtime. Compiles each time, because the speed of an engine differs
        from one session of it to the next.
        """
        if self._program is None:
            return None
        try:
            convolutions = compile(self._program, "onnxruntime")
        except TsoptError:
            return None
        with torch.inference_mode():
            both = (_quickest(lambda: convolutions(self._x)), _quickest(lambda: self._matrix @ self._matrix))
        return float(np.sqrt(np.prod(both)) * 1e3)


def _quickest(call: Callable[[], object]) -> float:
    """Seconds of an undisturbed call."""
    spent: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(spent) < FEWEST_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return float(np.percentile(spent, QUICKEST))
