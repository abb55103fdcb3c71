"""A small program, and mistakes that a pass may make in it."""

from __future__ import annotations

import torch
from torch import nn

from tests.passes.helpers import aten, capture, find
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.infer import infer


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        z = torch.sub(x, y)
        return z * self.w, z.sum(0)


def tiny():
    return capture(Tiny().eval(), (torch.randn(2, 3), torch.randn(2, 3)))


def drop_the_sum(program):
    """The output has another shape."""
    node = find(program, "sum.dim_IntList")
    node.replace_all_uses_with(node.args[0])
    program.graph.erase_node(node)


def keep_the_dimension(program):
    """In place: the inputs of the call stay the same, a literal changes."""
    node = find(program, "sum.dim_IntList")
    node.args = (node.args[0], node.args[1], True)


def another_axis(program):
    node = find(program, "sum.dim_IntList")
    node.args = (node.args[0], [1])


def lie_about_the_type(program):
    node = find(program, "mul.Tensor")
    made = new_call(program, node, node, aten.mul.Tensor, node.args, {})
    made.meta["val"] = infer(program, aten.sum.default, (node.args[0],), {})
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)


def lie_about_an_old_type(program):
    node = find(program, "sub.Tensor")
    node.meta = {**node.meta, "val": find(program, "sum.dim_IntList").meta["val"]}


def use_before_definition(program):
    node = find(program, "sub.Tensor")
    program.output_node.prepend(node)


def cycle(program):
    """The difference is computed from the product that is computed from it."""
    find(program, "sub.Tensor").replace_input_with(
        next(node for node in program.graph.nodes if node.op == "placeholder"), find(program, "mul.Tensor")
    )


def write(program):
    node = find(program, "mul.Tensor")
    made = new_call(program, node, node, aten.mul.Tensor, node.args, {})
    made.target = aten.mul_.Tensor
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)


def call_python(program):
    node = find(program, "mul.Tensor")
    with program.graph.inserting_before(node):
        made = program.graph.call_function(torch.mul, node.args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)


def call_a_method(program):
    node = find(program, "mul.Tensor")
    with program.graph.inserting_before(node):
        made = program.graph.call_method("relu", (node.args[0],))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)


def unknown_weight(program):
    node = next(node for node in program.graph.nodes if node.op == "get_attr")
    node.target = "nowhere"


def another_weight(program):
    program.weights["w"] = torch.randn(4)
    product = find(program, "mul.Tensor")
    new_call(program, program.output_node, product, aten.relu.default, (product,), {})


def another_input(program):
    first = next(iter(program.graph.nodes))
    with program.graph.inserting_before(first):
        made = program.graph.placeholder("more")
    made.meta = dict(first.meta)


def drop_an_output(program):
    program.output_node.args = (tuple(program.outputs[:1]),)


def swap_outputs(program):
    program.output_node.args = (tuple(reversed(program.outputs)),)


def return_a_literal(program):
    program.output_node.args = ((program.outputs[0], 3),)


def transpose_an_output(program):
    """The shape is square, the strides give it away."""
    first = program.outputs[0]
    made = new_call(program, program.output_node, first, aten.t.default, (first,), {})
    program.output_node.args = ((made, program.outputs[1]),)


def return_the_input(program):
    program.output_node.args = ((next(iter(program.graph.nodes)), program.outputs[1]),)


def impossible_call(program):
    node = find(program, "mul.Tensor")
    with program.graph.inserting_before(node):
        made = program.graph.call_function(aten.mm.default, node.args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)


MISTAKES = {
    drop_the_sum: 6,
    keep_the_dimension: 3,
    another_axis: 3,
    lie_about_the_type: 3,
    lie_about_an_old_type: 3,
    use_before_definition: 1,
    cycle: 1,
    call_a_method: 1,
    write: 2,
    call_python: 2,
    impossible_call: 3,
    unknown_weight: 4,
    another_weight: 4,
    another_input: 5,
    drop_an_output: 6,
    swap_outputs: 6,
    return_a_literal: 6,
    return_the_input: 7,
}


# What the types cannot tell, and the numbers must.


def drop_a_node(program):
    node = find(program, "mul.Tensor")
    weight = node.args[1]
    node.replace_all_uses_with(node.args[0])
    program.graph.erase_node(node)
    program.graph.erase_node(weight)


def swap_operands(program):
    node = find(program, "sub.Tensor")
    node.args = (node.args[1], node.args[0])


def other_literal(program):
    node = find(program, "sum.dim_IntList")
    node.replace_all_uses_with(new_call(program, node, node, aten.amax.default, (node.args[0], [0]), {}))
    program.graph.erase_node(node)
