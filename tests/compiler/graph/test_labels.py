"""Names for reading: of modules, and the same from pass to pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.labels import Labels
from tsopt.compiler.graph.ops import aten

IMAGE = torch.ones(1, 3, 8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        y = self.norm(self.conv(x))
        return F.relu(y + x) * 2 + y


class Named(nn.Module):
    """An input and a weight are called like ops."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("add", torch.ones(2))

    def forward(self, relu):
        return relu.relu() + self.add


def named(program, labels=None):
    """The names of the calls of a program, in order."""
    names = (labels or Labels()).of(program)
    return [names[node] for node in program.calls()]


def blocks():
    return tsopt.capture(nn.Sequential(Block(), Block()).eval(), IMAGE)


def test_a_module_with_one_call_names_it_and_others_by_op():
    assert named(blocks())[:7] == ["%0.conv", "%0.norm", "%0.add", "%0.relu", "%0.mul", "%0.add_2", "%1.conv"]


def test_without_a_module_the_op_is_the_name():
    program = tsopt.capture(lambda x: x.relu() + x.sin().relu(), torch.ones(2))
    assert named(program) == ["%relu", "%sin", "%relu_2", "%add"]


def test_inputs_and_weights_keep_their_names_and_no_call_takes_one():
    program = tsopt.capture(Named().eval(), torch.ones(2))
    text = Labels().text(program)
    assert "%relu: f32[2] = input" in text
    assert "%add: f32[2] = weight" in text
    assert named(program) == ["%relu_2", "%add_2"]


def test_what_is_removed_renames_nothing():
    program, labels = tsopt.capture(lambda x: ((x + 1).relu() + 2).relu(), torch.ones(2)), Labels()
    assert named(program, labels) == ["%add", "%relu", "%add_2", "%relu_2"]
    first, second, *_ = program.calls()
    second.replace_input_with(first, first.args[0])
    program.graph.erase_node(first)
    assert named(program, labels) == ["%relu", "%add_2", "%relu_2"]


def test_what_takes_the_place_of_a_value_takes_its_name():
    program, labels = tsopt.capture(lambda x: (x.sin() + 1).relu() * 2, torch.ones(2)), Labels()
    labels.of(program)
    _, total, relu, _ = program.calls()
    made = new_call(program, relu, relu, aten.neg.default, (total.args[0],), {})
    made = new_call(program, relu, relu, aten.exp.default, (made,), {})
    relu.replace_input_with(total, made)
    program.graph.erase_node(total)
    assert named(program, labels) == ["%sin", "%neg", "%add", "%relu", "%mul"]


def test_what_is_returned_in_the_place_of_a_value_takes_its_name():
    program, labels = tsopt.capture(lambda x: x.sin().relu(), torch.ones(2)), Labels()
    labels.of(program)
    _, relu = program.calls()
    made = new_call(program, program.output_node, relu, aten.neg.default, relu.args, {})
    relu.replace_all_uses_with(made)
    program.graph.erase_node(relu)
    assert named(program, labels) == ["%sin", "%relu"]


def test_a_name_that_is_gone_is_not_given_again():
    program, labels = tsopt.capture(lambda x: (x.relu() + 1).sin(), torch.ones(2)), Labels()
    labels.of(program)
    first, add, sin = program.calls()
    add.replace_input_with(first, first.args[0])
    program.graph.erase_node(first)
    made = new_call(program, sin, sin, aten.relu.default, (add,), {})
    sin.replace_input_with(add, made)
    assert named(program, labels)[1:] == ["%relu_2", "%sin"]


def test_copies_of_a_program_have_the_same_names():
    program = blocks()
    names = named(program)
    assert named(program.copy()) == names
    assert program.text == blocks().text, "the text that is compared has numbers"


def test_passes_keep_the_names_of_what_they_do_not_change():
    program = blocks()
    names = named(program)
    made = tsopt.transform(program)
    kept = named(made)
    assert "%0.norm" in kept, "the folded convolution stands where the norm stood"
    assert set(kept) - set(names) == set()
    assert [name for name in names if name in kept] == kept
