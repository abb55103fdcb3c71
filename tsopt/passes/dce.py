"""Dead-code elimination: calls without effect that nobody uses, and checks that the types have already answered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from tsopt.compiler import ops
from tsopt.compiler.pipeline import Changes, Done, Limits
from tsopt.compiler.program import Program, origin_of, type_of
from tsopt.compiler.types import TensorType


@dataclass(frozen=True, slots=True)
class DeadCode:
    """One sweep from the outputs up. A `torch._assert` on values stays: it can still fail."""

    name: str = "dce"

    def run(self, program: Program, limits: Limits) -> Changes:
        done: list[Done] = []
        for node in reversed(program.graph.nodes):
            if node.users or not ops.is_call(node):
                continue
            if ops.has_effect(node) and not _already_answered(node):
                continue
            done.append(Done("dead_code", origin_of(node)))
            program.graph.erase_node(node)
        for node in reversed(program.graph.nodes):
            if node.op == "get_attr" and not node.users:
                done.append(Done("dead_weight", str(node.target)))
                program.graph.erase_node(node)
        return Changes(tuple(done))


def _already_answered(node: fx.Node) -> bool:
    """A check of dtype, shape or device that holds by the recorded type, whatever the values."""
    if ops.name_of(node) != "aten._assert_tensor_metadata":
        return False
    claim = ops.bind(node)
    found = type_of(claim["a"])
    if not isinstance(found, TensorType):
        return False
    return (
        (claim["dtype"] is None or str(claim["dtype"]).removeprefix("torch.") == found.dtype)
        and (claim["size"] is None or tuple(claim["size"]) == found.shape)
        and (claim["stride"] is None or tuple(claim["stride"]) == found.stride)
        and (claim.get("device") is None or str(claim["device"]) == found.device)
    )
