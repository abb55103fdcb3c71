"""The state of a machine: how long its threads take to meet.

On virtual machines two threads can take twice as long to meet for minutes at a time. An engine whose threads meet after
each layer is slower then, and eager, which computes small layers with one thread, is not: nothing about a model.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F

from tsopt.compiler.capture.capture import capture
from tsopt.errors import TsoptError
from tsopt.runtime.backends.backend import compile

LAYERS, WIDTH = 4, 256  # so small that threads mostly wait for each other
SAMPLES, CALLS = 60, 50
UNDISTURBED = 10  # percentile: another process may have a core for half of the time


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
