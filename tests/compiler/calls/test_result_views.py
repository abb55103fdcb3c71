"""Which results are views of inputs and of each other, and what a file may say of that."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler.calls import signature_json
from tsopt.compiler.calls.result_views import INPUT, OUTPUT, View

X = torch.arange(8.0).reshape(2, 4)


def views(function, *inputs, dynamic=None):
    program = tsopt.capture(function, inputs, dynamic=dynamic)
    return [item.view for item in program.signature.returned]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x + 1, None),
        (lambda x: x.clone(), None),
        (lambda x: x, View(INPUT, 0, None)),
        (lambda x: x.contiguous(), View(INPUT, 0, ())),
        (lambda x: x.to(torch.float32), View(INPUT, 0, ())),
        (lambda x: x.add_(1), View(INPUT, 0, None)),
        (lambda x: x.t(), View(INPUT, 0, (), (4, 2), (1, 4), 0)),
        (lambda x: x[1, 1:3], View(INPUT, 0, (), (2,), (1,), 5)),
        (lambda x: x.conj(), View(INPUT, 0, ())),
        (lambda x: x[:, :0], None),  # nothing of it can be written
        (lambda x: x.view(torch.int32), None),  # of another dtype: a copy
    ],
)
def test_what_a_result_is_a_view_of(function, expected):
    assert views(function, X.clone()) == [expected]


def test_a_layout_other_than_contiguous_is_part_of_it():
    assert views(lambda x: x.t(), X.t()) == [View(INPUT, 0, (1, 4), (2, 4), (4, 1), 0)]


def test_of_several_inputs_it_is_the_right_one():
    assert views(lambda x, y: (x + y, y[0]), X, X + 1) == [None, View(INPUT, 1, (), (4,), (1,), 0)]


def test_results_are_views_of_the_one_that_reaches_furthest():
    def several(x):
        whole = x + 1
        return whole[0], whole, whole.t()

    found = views(several, X)
    assert found == [View(OUTPUT, 1, (), (4,), (1,), 0), None, View(OUTPUT, 1, (), (4, 2), (1, 4), 0)]
    assert views(lambda x: (x + 1).chunk(2), X) == [None, None], "they share no element"


def test_of_many_sizes_only_whole_inputs_are_known():
    dynamic = {"x": {0: "rows"}}
    assert views(lambda x: (x, x.t(), x * 2), X, dynamic=dynamic) == [View(INPUT, 0, None), None, None]


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("other", torch.zeros(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        return x * 2, self.count, self.count[1:], self.other


def test_a_buffer_that_is_written_stands_behind_the_inputs():
    found = views(Counter().eval(), X)
    assert found == [None, View(INPUT, 1, None), View(INPUT, 1, (), (2,), (1,), 1), None]


def test_what_cannot_be_called_without_values_has_none():
    assert views(_scripted, X) == [None]


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        x = x * 2
    return x


def test_another_layout_gets_a_copy():
    view = View(INPUT, 0, (), (4, 2), (1, 4), 0)
    value = X.t().clone()
    assert view.within(X, value).data_ptr() == X.data_ptr()
    assert view.within(X.t().contiguous().t(), value) is value
    whole = View(INPUT, 0, ())
    assert whole.within(X, value=X.clone()) is X
    other = X.t().contiguous().t()
    assert whole.within(other, value) is value
    assert View(INPUT, 0, None).within(other, X.clone()) is other


def test_a_signature_keeps_them_in_json():
    signature = tsopt.capture(Counter().eval(), X).signature
    again = signature_json.from_json(signature_json.to_json(signature))
    assert [item.view for item in again.outputs] == [item.view for item in signature.outputs]
    assert again.outputs == signature.outputs


@pytest.mark.parametrize(
    "stored",
    [
        ["input", 0, [], [64], [1], 0],  # more elements than the result has
        ["input", 0, [], [4, 2], [1, 4], 1],  # past the end
        ["input", 0, [], [4, 2], [1, 4], 2**60],
        ["input", 0, [], [4, 2], [1, 4], -1],
        ["input", 0, [], [4, 2], [1, 1000], 0],
        ["input", 0, [9, 9], [4, 2], [1, 40], 0],  # past the end of a tensor with such strides
        ["input", 0, None, [4, 2], [1, 4], 0],  # of any layout
        ["input", 1, []],  # no such input
        ["output", 0, []],  # a view of itself
        ["weight", 0, []],
        ["input", 0, [], [4, 2]],
        ["input", True, [], [4, 2], [1, 4], 0],
        ["input", 0, [], [4.0, 2], [1, 4], 0],
        "input",
        7,
        None,
    ],
)
def test_a_file_cannot_make_it_reach_further(stored):
    data = signature_json.to_json(tsopt.capture(lambda x: x.t(), X).signature)
    data["outputs"][0]["view"] = stored
    with pytest.raises(tsopt.BundleError, match="the stored signature is damaged"):
        signature_json.from_json(data)
