"""Common subexpression elimination: identical pure calls on the same values are computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import shares_new_memory
from tsopt.compiler.graph.origin import origin_of, record_merge
from tsopt.compiler.graph.program import Program, format_value
from tsopt.compiler.rewriting.pass_base import Changes, Declined, Done, Limits, Pass
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS
from tsopt.compiler.tensor_bytes import bytes_in

COMPARED_ELEMENTS = 1  # elements: larger weights are the same only when they are the same memory


@dataclass(frozen=True, slots=True)
class CommonSubexpressions(Pass):
    """Merges calls with the same overload and the same arguments by type and bits; random and writing calls never.

    Equal scalars (the `eps` and `-inf` that tracing makes one of for each use) are merged as well.
    """

    name: str = "cse"

    def run(self, program: Program, limits: Limits) -> Changes:
        first: dict[object, fx.Node] = {}
        ids: dict[fx.Node, str] = {}
        done: list[Done] = []
        declined: list[Declined] = []
        for number, node in enumerate(list(program.graph.nodes)):
            ids[node] = f"%{number}"
            key = key_of(program, node, ids)
            if key is None:
                continue
            earlier = first.setdefault(key, node)
            if earlier is node:
                continue
            if shares_new_memory(program, node, earlier):
                declined.append(Declined("same_call", origin_of(node), NEW_ALIAS))
                continue
            if not limits.take():
                break
            done.append(Done("same_call" if ops.is_call(node) else "same_weight", origin_of(node) or str(node.target)))
            record_merge(earlier, node)
            node.replace_all_uses_with(earlier)
            program.graph.erase_node(node)
        return Changes(tuple(done), tuple(declined))


def key_of(program: Program, node: fx.Node, ids: Mapping[fx.Node, str]) -> object:
    """What equal weights, and equal calls on equal values, have in common; None for what is never equal.

    Args:
        ids: names of values, the same for equal ones.
    """
    if node.op == "get_attr":
        return _weight_key(program.weights[str(node.target)])
    if not ops.is_pure(node):
        return None
    bound = ops.bind(node)
    arguments = tuple((name, format_value(value, ids), type(value).__name__) for name, value in bound.items())
    return node.target, arguments


def _weight_key(weight: torch.Tensor) -> object:
    lazy = weight.is_conj(), weight.is_neg()  # as in capture: the same memory has other values
    kind = (weight.dtype, tuple(weight.shape), weight.stride(), weight.device, *lazy)
    if weight.numel() > COMPARED_ELEMENTS:
        return (*kind, weight.data_ptr())
    plain = weight.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return (*kind, bytes(bytes_in(plain).tolist()))
