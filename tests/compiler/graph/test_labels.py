"""Names for reading: of modules, and the same from pass to pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.labels import Labels
from tsopt.compiler.graph.ops import aten
from tsopt.transforms import transform_with_records

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


def test_a_call_between_an_input_and_its_reader_does_not_take_its_name():
    program, labels = tsopt.capture(lambda x: x.sin(), torch.ones(2)), Labels()
    labels.of(program)
    (sin,) = program.calls()
    made = new_call(program, sin, sin, aten.neg.default, sin.args, {})
    sin.replace_input_with(sin.args[0], made)
    assert sorted(labels.of(program)[node] for node in program.calls()) == ["%neg", "%sin"]


def test_other_names_know_those_that_a_program_has():
    program = blocks()
    named(program)
    first, *_ = program.calls()
    made = new_call(program, first, first, aten.relu.default, (first.args[0],), {})
    made.meta["module"] = "0"
    first.replace_input_with(first.args[0], made)
    names = named(program)
    assert len(set(names)) == len(names)


def test_an_op_of_a_library_is_named_by_itself():
    @torch.library.custom_op("labels_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    assert named(tsopt.capture(lambda x: twice(x), torch.ones(2))) == ["%twice"]


def test_many_alike_have_a_name_each():
    def many(x):
        for _ in range(300):
            x = x + 1
        return x

    names = named(tsopt.capture(many, torch.ones(2)))
    assert (names[0], names[-1], len(set(names))) == ("%add", "%add_300", 300)


def kept_names(program):
    """Those of the calls in the last text of the standard passes."""
    _, records = transform_with_records(program, keep_text=True)
    text = [record.text for record in records if record.changed][-1]
    return [line.split(":")[0].strip() for line in text.splitlines() if " = aten." in line]


def test_passes_keep_the_names_of_what_they_do_not_change():
    program = blocks()
    names, kept = named(program), kept_names(program)
    assert "%0.norm" in kept, "the folded convolution stands where the norm stood"
    assert set(kept) - set(names) == set()
    assert [name for name in names if name in kept] == kept


def test_names_last_where_sizes_are_dynamic():
    program = tsopt.capture(nn.Sequential(Block(), Block()).eval(), [IMAGE, torch.ones(2, 3, 8, 8)])
    names = named(program)
    made, _ = transform_with_records(program, keep_text=True)
    kept = named(made)
    assert "%0.norm" in kept
    assert [name for name in names if name in kept] == kept
