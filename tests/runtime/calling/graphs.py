"""Graphs that take as long as is said, on a clock that only they move."""

from __future__ import annotations

import torch
from torch import fx, nn

from tsopt.errors import CaptureError
from tsopt.runtime.calling.graph_parts import Graph

X = torch.ones(4)


class Clock:
    now = 0.0

    @classmethod
    def perf_counter(cls):
        return cls.now


def taking(seconds, optimized):
    """A graph that takes so many seconds, and notes when it is optimized."""

    class Slow(nn.Module):
        def forward(self, x):
            return x * 2

    made = Graph(fx.symbolic_trace(Slow()), lambda *_: optimized.append(seconds) or refuse())
    as_it_is = made._as_it_is

    def run(*args):
        Clock.now += seconds
        return as_it_is(*args)

    made._as_it_is = run
    return made


def refuse():
    raise CaptureError("not here")


def call(graphs, seconds=0.0):
    start = Clock.now
    for graph in graphs:
        assert torch.equal(graph(X), 2 * X)
    Clock.now += seconds
    return Clock.now - start
