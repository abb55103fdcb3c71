"""What an exported model says of where its nodes come from."""

from __future__ import annotations

import onnx
import torch
from torch import nn

import tsopt
from tsopt.runtime.onnx.export import to_onnx
from tsopt.runtime.onnx.places import VALUE, with_unknown_ones


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        return torch.softmax(self.body(x), -1) + 1


def test_nodes_in_a_file_are_grouped_by_module_and_say_nothing_else(tmp_path):
    to_onnx(tsopt.capture(Net().eval(), torch.ones(2, 4))).save(tmp_path / "m.onnx")
    nodes = onnx.load(tmp_path / "m.onnx").graph.node
    said = {node.op_type: {item.key: item.value for item in node.metadata_props} for node in nodes}
    assert said["Gelu"] == {"namespace": "body/1"}
    assert said["Softmax"] == {}
    assert {item.value for node in nodes for item in node.metadata_props} == {"body/0", "body/1", "body/2"}


def test_each_node_knows_its_value():
    program = tsopt.capture(Net().eval(), torch.ones(2, 4))
    found = [node.meta[VALUE] for node in to_onnx(program).model.graph]
    assert {node.meta.get("module") for node in found} == {None, "body.0", "body.1", "body.2"}
    assert {str(node.target) for node in found} == {str(node.target) for node in program.calls()}


def test_an_unknown_kernel_belongs_to_the_one_that_reads_it():
    a, b = ((node,) for node in list(tsopt.capture(Net().eval(), torch.ones(2, 4)).calls())[:2])
    assert with_unknown_ones([(), (), a], [{1}, {2}, set()]) == [a, a, a]
    assert with_unknown_ones([(), a, b], [{1, 2}, set(), set()]) == [(), a, b], "two layers read it"
    assert with_unknown_ones([a, ()], [{1}, set()]) == [a, ()]
