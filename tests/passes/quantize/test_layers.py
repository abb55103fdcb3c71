"""Which values are integers where layers are quantized, and who reads them so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import Residual, images
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.passes.quantize.layers import end_of, is_moved, layers_of, readers_of_integers

KERNEL = torch.randn(3, 3, 3, 3, generator=torch.Generator().manual_seed(0))


def readers(model, *inputs):
    """What is read as integers: op of the value -> ops of its readers."""
    program = tsopt.capture(model if isinstance(model, nn.Module) else Net(model), tsopt.example(*inputs))
    names = {node: "input" if node.op == "placeholder" else ops.name_of(node) for node in program.graph.nodes}
    found = readers_of_integers(layers_of(program))
    return {names[value]: [names[user] for user in users] for value, users in found.items()}


def test_a_layer_on_another_device_stays_as_it_is():
    """The meta device stands for any: the kernels of int8 are those of the CPU."""
    program = tsopt.capture(nn.Linear(3, 2).eval(), torch.randn(2, 3))
    assert len(layers_of(program)) == 1
    program.weights = {name: weight.to("meta") for name, weight in program.weights.items()}
    assert layers_of(program) == []


def test_a_layer_on_a_constant_stays_as_it_is():
    queries, weight = torch.randn(5, 3), torch.randn(2, 3)
    program = tsopt.capture(Net(lambda self, x: (F.linear(x, weight), F.linear(queries, weight))), torch.randn(4, 3))
    (layer,) = layers_of(program)
    assert ops.bind(layer)["input"].op == "placeholder"


def test_the_input_of_a_layer_is_read_by_it():
    assert readers(nn.Linear(3, 2).eval(), torch.randn(2, 3)) == {"input": ["aten.linear"]}


@pytest.mark.parametrize("bound", [F.relu, F.relu6, F.hardtanh, lambda y: y.clamp(0, 3), lambda y: y.clamp(max=1)])
def test_the_result_of_a_convolution_is_an_integer_after_its_activation(bound):
    found = readers(lambda self, x: F.avg_pool2d(bound(F.conv2d(x, KERNEL)), 2), images(1)[0])
    (first, *users), (activation, *last) = found.items()
    assert (first, users) == ("input", [["aten.conv2d"]])
    assert activation.startswith(("aten.relu", "aten.hardtanh", "aten.clamp"))
    assert last == [["aten.avg_pool2d"]]


def test_the_result_of_a_convolution_is_an_integer_before_an_activation_that_is_no_bound():
    found = readers(lambda self, x: F.silu(F.conv2d(x, KERNEL)), images(1)[0])
    assert found == {"input": ["aten.conv2d"], "aten.conv2d": ["aten.silu"]}


def test_what_is_returned_is_no_integer():
    assert readers(lambda self, x: F.conv2d(x, KERNEL), images(1)[0]) == {"input": ["aten.conv2d"]}


def test_both_operands_of_a_residual_sum_are_integers():
    found = readers(Residual().eval(), images(1)[0])
    assert found["aten.conv2d"] == ["aten.add.Tensor"]
    assert "aten.add.Tensor" in found["aten.relu"]


@pytest.mark.parametrize(
    "add",
    [lambda y: y + torch.ones(1), lambda y: y + y, lambda y: torch.add(y, torch.ones(1, 3, 6, 6), alpha=2)],
    ids=["broadcast", "itself", "scaled"],
)
def test_other_sums_read_what_they_read_before(add):
    program = tsopt.capture(Net(lambda self, x: add(F.conv2d(x, KERNEL))), images(1)[0])
    found = readers_of_integers(layers_of(program))
    assert [value.target for value in found if value.op != "placeholder"] == [aten.conv2d.default]


def test_an_activation_that_others_read_too_does_not_end_the_layer():
    def forward(self, x):
        y = F.conv2d(x, KERNEL)
        return y.relu() + y.sum()

    program = tsopt.capture(Net(forward), images(1)[0])
    (layer,) = layers_of(program)
    assert end_of(layer) is layer


def test_computed_bounds_do_not_end_the_layer():
    program = tsopt.capture(Net(lambda self, x: F.conv2d(x, KERNEL).clamp(x.min())), images(1)[0])
    (layer,) = layers_of(program)
    assert end_of(layer) is layer


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        (lambda x: F.max_pool2d(x, 2), True),
        (lambda x: x.permute(0, 2, 3, 1), True),
        (lambda x: F.pad(x, (1, 1)), True),
        (lambda x: F.pad(x, (1, 1), value=1.0), False),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), False),
        (lambda x: F.avg_pool2d(x, 2), False),
    ],
    ids=["max pool", "permute", "zeros", "ones", "reflected", "mean"],
)
def test_what_moves_values(change, moved):
    program = tsopt.capture(Net(lambda self, x: change(x)), images(1)[0])
    call = next(iter(program.calls()))
    assert is_moved(call) == moved
