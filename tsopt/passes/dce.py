"""Dead code elimination: unused calls without side effects, and checks that the types already prove.

Random numbers that nobody uses are drawn all the same: those that are drawn after them would be others.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass


@dataclass(frozen=True, slots=True)
class DeadCode(Pass):
    """One sweep from the outputs up. A `torch._assert` on values stays: it can still fail."""

    name: str = "dce"

    def run(self, program: Program, limits: Limits) -> Changes:
        done: list[Done] = []
        for node in reversed(program.graph.nodes):
            if node.users or not ops.is_call(node):
                continue
            if ops.draws(node) or (ops.has_effect(node) and not ops.is_settled_check(node)):
                continue
            done.append(Done("dead_code", origin_of(node)))
            program.graph.erase_node(node)
        for node in reversed(program.graph.nodes):
            if node.op == "get_attr" and not node.users:
                done.append(Done("dead_weight", str(node.target)))
                program.graph.erase_node(node)
        return Changes(tuple(done))
