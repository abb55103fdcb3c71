"""A lower bound for the time of a call: its multiplications, on a core faster than any that exists."""

from __future__ import annotations

import torch
from torch import fx

from tsopt.compiler.analysis.ranged_call import Values, base_name
from tsopt.compiler.graph.program import Program

FLOPS = 2e11  # in a second and a thread: faster than any core is
PRODUCTS = frozenset({"linear", "addmm", "mm", "matmul", "bmm", "baddbmm"})


def least_seconds(program: Program, values: Values, threads: int) -> float:
    """A lower bound on any machine, from the multiplications."""
    return sum(_flops(node, values) for node in program.calls()) / (FLOPS * (threads or torch.get_num_threads()))


def _flops(node: fx.Node, values: Values) -> float:
    name, made = base_name(node), values.get(node)
    if not isinstance(made, torch.Tensor) or not node.all_input_nodes:
        return 0
    taken = [values[n] for n in node.all_input_nodes if isinstance(values.get(n), torch.Tensor)]
    if name in PRODUCTS:
        return 2.0 * made.numel() * max((t.shape[-1] for t in taken[:1] if t.dim()), default=1)
    if name.startswith("conv") and len(taken) > 1:
        return 2.0 * made.numel() * taken[1][0].numel() if len(taken[1]) else 0
    if name == "scaled_dot_product_attention":
        return 4.0 * made.numel() * max(tensor.shape[-2] for tensor in taken if tensor.dim() > 1)
    return 0
