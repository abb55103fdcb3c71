"""What a picture of a program shows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tsopt.compiler.graph import drawing
from tsopt.compiler.graph.drawing import drawing_of
from tsopt.compiler.graph.labels import Labels


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, image):
        y = self.norm(self.conv(image))
        return F.relu(y + image), y


IMAGE = torch.ones(1, 3, 8, 8)


def test_it_has_the_inputs_the_calls_and_the_output():
    program = tsopt.capture(Net().eval(), IMAGE)
    found = {item.name: item for item in drawing_of(program)}
    assert list(found) == ["image", "conv", "norm", "add", "relu", "output"]
    assert found["image"].op == drawing.INPUT
    assert found["conv"].op.startswith("aten.conv2d")
    assert found["conv"].module == "conv"
    assert found["conv"].type == "f32[1, 3, 8, 8]"
    assert "test_drawing.py" in found["conv"].origins[0]
    assert set(found["conv"].weights) == {"conv.weight", "conv.bias"}
    assert found["add"].reads == (2, 0)
    assert set(found["output"].reads) == {2, 4}
    assert found["conv"].rule == ""


def test_what_a_rule_has_made_stands_for_what_it_replaced_and_keeps_its_name():
    program = tsopt.capture(Net().eval(), IMAGE)
    before = drawing_of(program)
    after = drawing_of(tsopt.transform(program))
    (made,) = [item for item in after if item.rule == "conv_batch_norm"]
    assert {origin.partition(",")[0] for origin in made.origins} == {"conv", "norm"}
    assert {item.name for item in after} <= {item.name for item in before} | {made.name}


def test_names_are_those_of_the_text():
    program = tsopt.capture(Net().eval(), IMAGE)
    text = Labels().text(program)
    assert all(f"%{item.name}" in text for item in drawing_of(program) if item.op != drawing.OUTPUT)


def test_of_many_origins_a_few_are_named(monkeypatch):
    monkeypatch.setattr(drawing, "ORIGINS", 1)
    (made,) = [
        item for item in drawing_of(tsopt.transform(tsopt.capture(Net().eval(), IMAGE))) if len(item.origins) > 1
    ]
    assert made.origins[1:] == ("and 1 more",)


def test_a_number_is_a_value_too():
    def sizes(x):
        return x.reshape(x.shape[0] * 2, -1)

    program = tsopt.capture(sizes, torch.ones(4, 6), dynamic={"x": {0: "rows"}})
    assert "int" in {item.type for item in drawing_of(program)}
