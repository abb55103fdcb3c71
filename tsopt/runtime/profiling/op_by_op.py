"""How long each op takes that torch runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.runtime.profiling.kernels import Timed, by_median, called


class _Clocked(fx.Interpreter):
    """Runs a program op by op, and keeps the milliseconds of each by the name of its value."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module())
        self.ms: dict[str, list[float]] = defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_module"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        start = time.perf_counter()
        result = getattr(self, n.op)(n.target, args, kwargs)
        self.ms[n.name].append((time.perf_counter() - start) * 1e3)
        return result


def timed(program: Program, inputs: Sequence[Any]) -> Timed:
    """The ops of a program as torch runs them, one after the other, on the CPU."""
    clocked = _Clocked(program)
    with torch.no_grad():
        spent = called(lambda: clocked.run(*inputs))
    nodes = {node.name: node for node in program.graph.nodes}
    kernels = [(ops.name_of(nodes[name]), (nodes[name],)) for name in clocked.ms]
    return Timed(by_median(kernels, [ms[-len(spent) :] for ms in clocked.ms.values()]), median(spent))
