"""How much work the ops of a program are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.values import flat_inputs
from tsopt.runtime.profiling.work import OpWork, macs_of_call

CASES = {
    "linear": (lambda self, x: F.linear(x, self.w), (8, 64), (32, 64), 8 * 64 * 32),
    "conv2d": (lambda self, x: F.conv2d(x, self.w, padding=1), (2, 8, 16, 16), (4, 8, 3, 3), 2 * 4 * 256 * 8 * 9),
    "conv2d of groups": (
        lambda self, x: F.conv2d(x, self.w, padding=1, groups=8),
        (2, 8, 16, 16),
        (8, 1, 3, 3),
        2 * 8 * 256 * 9,
    ),
    "matmul": (lambda self, x: x @ self.w, (3, 5, 7), (3, 7, 2), 3 * 5 * 7 * 2),
    "relu": (lambda self, x: x.relu() * self.w, (4, 4), (4, 4), 0),
}


def work_of(model, *inputs, **options):
    program = tsopt.capture(model, inputs, **options)
    return OpWork(program, flat_inputs(program, tsopt.example(*inputs)))


def whole(model, *inputs):
    made = work_of(model, *inputs)
    return made.of(list(made))


@pytest.mark.parametrize("name", CASES)
def test_macs_are_those_of_the_formula(name):
    forward, shape, weight, macs = CASES[name]
    assert whole(Net(forward, w=torch.randn(weight)), torch.randn(shape)).macs == macs


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_two_products(masked):
    q, k, v = torch.randn(2, 4, 10, 16), torch.randn(2, 4, 12, 16), torch.randn(2, 4, 12, 16)
    mask = torch.ones(10, 12, dtype=torch.bool) if masked else None
    work = whole(Net(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), q, k, v)
    assert work.macs == 2 * (2 * 4 * 10 * 12 * 16)
    assert work.inputs == q.nbytes + k.nbytes + v.nbytes


def test_an_lstm_is_its_products():
    made = whole(nn.LSTM(8, 16, num_layers=2, batch_first=True).eval(), torch.randn(3, 5, 8))
    assert made.macs == 3 * 5 * (4 * 16 * (8 + 16) + 4 * 16 * (16 + 16))


def test_products_with_a_vector_count():
    x = torch.randn(7)
    assert whole(Net(lambda self, x: self.w @ x, w=torch.randn(5, 7)), x).macs == 5 * 7
    assert whole(Net(lambda self, x: torch.dot(self.w, x), w=torch.randn(7)), x).macs == 7


def test_products_of_three_tensors_count():
    model, x, y = nn.Bilinear(16, 8, 4), torch.randn(5, 16), torch.randn(5, 8)
    macs = 5 * 4 * 8 * (16 + 1)
    assert whole(model, x, y).macs == macs
    assert macs_of_call(model, x, y) == macs


def test_sums_with_products_count():
    matrix, other = torch.randn(6, 5, 7), torch.randn(6, 7, 3)
    assert macs_of_call(lambda: torch.addmv(torch.ones(5), matrix[0], other[0, :, 0])) == 5 * 7
    assert macs_of_call(lambda: torch.addbmm(torch.ones(5, 3), matrix, other)) == 6 * 5 * 7 * 3
    assert macs_of_call(lambda: torch.vdot(matrix[0, 0], matrix[0, 1])) == 7
    assert macs_of_call(lambda: torch.cdist(matrix, torch.randn(4, 7), p=1)) == 6 * 5 * 4 * 7


def test_bytes_are_those_of_inputs_weights_and_outputs():
    x, w = torch.randn(8, 64), torch.randn(32, 64)
    work = whole(Net(lambda self, x: F.linear(x, self.w), w=w), x)
    assert (work.inputs, work.weights, work.outputs) == (x.nbytes, w.nbytes, 8 * 32 * 4)
    assert work.bytes == x.nbytes + w.nbytes + 8 * 32 * 4
    assert work.intensity == work.macs / work.bytes


def test_what_ops_make_for_each_other_is_not_counted_where_they_are_one_layer():
    x = torch.randn(8, 64)
    made = work_of(Net(lambda self, x: (x.t().sin() * 2).cos() + x.t()), x)
    together = made.of(list(made))
    assert (together.inputs, together.outputs) == (x.nbytes, x.nbytes)
    assert sum(made.of([node]).bytes for node in made) > together.bytes


def test_a_view_moves_nothing_and_an_expanded_tensor_is_read_once():
    made = work_of(Net(lambda self, x: x.t().expand(100, 4, 4) * 2), torch.randn(4, 4))
    by_op = {ops.name_of(node).split(".")[1]: made.of([node]) for node in made}
    assert by_op["mul"].inputs == 4 * 4 * 4
    assert by_op["mul"].outputs == 100 * 4 * 4 * 4
    assert by_op["expand"].bytes == 0
    assert by_op["expand"].intensity is None


def test_a_weight_that_is_read_through_a_view_is_a_weight():
    work = whole(Net(lambda self, x: x @ self.w.t(), w=torch.randn(5, 7)), torch.randn(3, 7))
    assert work.weights == 5 * 7 * 4


def test_of_a_table_only_the_rows_are_read_that_are_asked_for():
    work = whole(Net(lambda self, i: F.embedding(i, self.w), w=torch.randn(1000, 8)), torch.arange(5))
    assert work.weights == work.outputs == 5 * 8 * 4


def test_a_program_for_many_sizes_is_counted_at_those_of_the_inputs():
    program = tsopt.capture(nn.Linear(8, 8).eval(), torch.randn(4, 8), dynamic={"input": {0: "batch"}})
    made = OpWork(program, [torch.randn(9, 8)])
    assert made.of(list(made)).macs == 9 * 8 * 8
