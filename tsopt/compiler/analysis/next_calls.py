"""What later calls of a model read: what a call writes to an input or to a state, the next one finds there."""

from __future__ import annotations

from torch import fx

from tsopt.compiler.graph.program import Program


def read_again(program: Program, value: fx.Node) -> list[fx.Node]:
    """The inputs that a value is written to, in which the next call reads it."""
    if program.output_node not in value.users:
        return []
    outputs = zip(program.outputs, program.signature.outputs, strict=True)
    written = {item.writes for node, item in outputs if node is value and item.writes is not None}
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"] if written else []
    return [node for node, item in zip(inputs, program.signature.inputs, strict=False) if item.name in written]
