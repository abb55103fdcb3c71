"""Which results of a program are the same in every call, so that an engine may cache and return them."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program


def with_lasting(program: Program) -> Program:
    """The same program, whose signature names the results that do not depend on the call, or may be weights.

    What the caller writes to such a result must not reach the next call.
    """
    given: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" or ops.is_random(node) or any(source in given for source in node.all_input_nodes):
            given.add(node)
    roots = ops.storage_roots(program.graph.nodes)
    outputs = tuple(
        replace(item, lasting=value not in given or any(root[0].op == "get_attr" for root in roots[value]))
        for item, value in zip(program.signature.outputs, program.outputs, strict=True)
    )
    if outputs == program.signature.outputs:
        return program
    return replace(program, signature=replace(program.signature, outputs=outputs))
