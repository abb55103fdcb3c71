"""Which results are views of inputs and of each other, and what a file may say of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tsopt
from tsopt.compiler.calls import signature_json
from tsopt.compiler.calls.conditions import Places
from tsopt.compiler.calls.result_views import INPUT, JOINT, OUTPUT, WEIGHT, View
from tsopt.compiler.calls.signature import Dim

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


@pytest.mark.parametrize(
    "part",
    [
        lambda x: x.t(),
        lambda x: x[1:, 1:],
        lambda x: x[-1],
        lambda x: x.flatten()[3:],
        lambda x: x[:, ::2],
        lambda x: x[x.shape[0] // 2],
        lambda x: x.unsqueeze(1).expand(-1, 3, -1),
    ],
)
def test_of_many_sizes_parts_lie_where_they_do_in_eager(part):
    view = views(lambda x: (x + 1, part(x)), torch.ones(6, 5), dynamic={"x": {0: "rows", 1: "columns"}})[1]
    for rows, columns in ((2, 4), (5, 3), (3, 3), (4, 7), (9, 8)):
        x = torch.arange(1.0 * rows * columns).reshape(rows, columns)
        expected = part(x)
        sizes = {"rows": rows, "columns": columns}
        found = view.at(sizes, tuple(expected.shape)).within(x, expected.clone())
        assert (found.data_ptr(), found.stride()) == (expected.data_ptr(), expected.stride()), sizes
        assert torch.equal(found, expected)


def test_of_many_sizes_the_rest_are_whole_inputs_or_copies():
    dynamic = {"x": {0: "rows"}}
    assert views(lambda x: (x, x * 2), X, dynamic=dynamic) == [View(INPUT, 0, None), None]
    overlapping = views(lambda x: ((x + 1)[:2], (x + 1)[1:]), torch.ones(3, 4), dynamic=dynamic)
    assert overlapping == [None, None]
    assert views(lambda x: x[0], X.t().contiguous().t(), dynamic=dynamic) == [None], "of another layout"


@pytest.mark.parametrize(
    "part",
    [
        lambda h: h.transpose(0, 1).reshape(h.shape[1], -1),
        lambda h: h.transpose(0, 1).contiguous(),
        lambda h: h.transpose(0, 1).flatten(),
    ],
)
@pytest.mark.parametrize("of", [lambda x: x + 1, lambda x: x])
@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_a_view_only_of_one_row_is_one_there_and_a_copy_of_more(of, part, rows):
    def model(x):
        h = of(x)
        return h, part(h)

    program = tsopt.capture(model, torch.ones(rows, 4, 3), dynamic={"x": {0: "rows"}})
    assert program.signature.returned[1].view.where == (("rows", 1),)
    again = signature_json.from_json(signature_json.to_json(program.signature))
    assert again.outputs == program.signature.outputs
    fast = tsopt.compile(program, "eager")
    for count in (1, 3, 1, 2):
        x = torch.arange(count * 12.0).reshape(count, 4, 3)
        for found, expected in zip(fast(x), model(x), strict=True):
            assert torch.equal(found, expected)
        for called in (fast, model):
            whole, moved = called(x.clone())
            moved.add_(1)
            is_view = bool(whole.sum() != of(x).sum())
            assert is_view == (count == 1)


@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_a_copy_of_one_row_as_well_is_one(rows):
    found = views(lambda x: x.mT.transpose(0, 1).flatten(), torch.ones(rows, 4, 3), dynamic={"x": {0: "rows"}})
    assert found == [None]


def test_sizes_that_are_one_are_one_in_its_places():
    def last(x, y):
        return x + y, x[-1]

    signature = tsopt.capture(last, (X, X + 1), dynamic={"x": {0: "n"}, "y": {0: "n"}}).signature
    a, b = Dim("n", 1, None), Dim("m", 1, None)
    places = Places(("s0",), "s0 * s1", ("n", "m"))
    item = replace(signature.outputs[1], view=View(INPUT, 0, (), (4,), (1,), 4, places))
    tied = replace(signature, dims=(b, a), outputs=(signature.outputs[0], item)).tied(b, a)
    assert tied.outputs[1].view.places.dims == ("m", "m")


@pytest.mark.parametrize(
    ("places", "sizes"),
    [
        (Places(("1",), "s0 - 3", ("n",)), {"n": 2}),  # before its first element
        (Places(("1",), "4 // s0", ("n",)), {"n": 0}),
        (Places(("s0 / 2",), "0", ("n",)), {"n": 3}),  # not a whole number
    ],
)
def test_places_that_there_cannot_be_are_an_error(places, sizes):
    with pytest.raises(ValueError):  # noqa: PT011 - with the words of Python
        places.at(sizes)


def test_a_part_that_reaches_past_its_tensor_is_a_copy():
    view, value = View(INPUT, 0, (), (4,), (1,), 4, Places(("1",), "s0 * 4", ("n",))), torch.zeros(4)
    assert view.at({"n": 1}, (4,)).within(X, value).data_ptr() == X[1].data_ptr()
    assert view.at({"n": 2}, (4,)).within(X, value) is value


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("other", torch.zeros(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        return x * 2, self.count, self.count[1:], self.other


def test_a_buffer_that_is_written_stands_behind_the_inputs_and_another_one_among_the_weights():
    found = views(Counter().eval(), X)
    assert found == [None, View(INPUT, 1, None), View(INPUT, 1, (), (2,), (1,), 1), View(WEIGHT, 0, None)]


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


@pytest.mark.parametrize("dynamic", [None, {"x": {0: "rows"}}])
def test_a_signature_keeps_them_in_json(dynamic):
    signature = tsopt.capture(Counter().eval() if dynamic is None else lambda x: x[-1], X, dynamic=dynamic).signature
    again = signature_json.from_json(signature_json.to_json(signature))
    assert again.outputs == tuple(
        replace(item, view=None) if item.view is not None and item.view.kind == WEIGHT else item
        for item in signature.outputs
    )
    assert any(item.view is not None for item in again.outputs)


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
        ["input", 0, [], [4, 2], [1, 4], 0, [["1"], "0", []]],  # not a stride for each axis
        ["input", 0, [], [4, 2], [1, 4], 0, [["1", "4"], "open('f')", []]],
        ["input", 0, [], [4, 2], [1, 4], 0, [["1", "4"], "s0", []]],
        ["input", 0, [], [4, 2], [1, 4], 0, [["1", "4"], "s0", ["rows"]]],  # no such size
        ["input", 0, [], [4, 2], [1, 4], 0, [["1", 4], "0", []]],
        ["input", 0, [], [4, 2], [1, 4], 0, {"rows": 1}],  # no such size
        ["input", 0, [], [4, 2], [1, 4], 0, {"rows": "1"}],
        ["input", 0, [], {"rows": -1}],
        ["input", 0, [], [4, 2], [1, 4], 0, 3],
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


def test_results_that_overlap_lie_in_memory_for_them_all():
    def several(x):
        whole = x + 1
        return whole[0, :3], whole[0, 1:], whole[1]

    place = View(JOINT, 0, (4,), (3,), (1,), 0)
    assert views(several, X) == [place, replace(place, offset=1), None]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[:, :2], x[:, 2:]),
        lambda x: (x[:, ::2], x[:, 1::2]),
        lambda x: x.unbind(1),
        lambda x: (x[:1], x[1:]),
    ],
)
def test_results_that_lie_side_by_side_have_memory_of_their_own(function):
    assert not any(views(lambda x: function(x + 1), X))


def test_results_are_grouped_by_the_elements_they_share():
    def several(x):
        whole = x + 1
        return whole[0, :2], whole[1], whole[0, 2:], whole[0, 1:3]

    assert [view and view.of for view in views(several, X)] == [0, None, 0, 0]


def test_what_is_repeated_is_moved_as_well():
    view = View(JOINT, 0, (6,), (3, 2), (0, 1), 2)
    memory = torch.zeros(6)
    assert view.moved(memory, torch.tensor([[1.0, 2.0]] * 3)).tolist() == [[1.0, 2.0]] * 3
    assert memory.tolist() == [0, 0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    "damage",
    [
        {"layout": (2,)},
        {"offset": 2},
        {"shape": (2,)},
        {"of": 2},
        {"layout": (5,)},
        {"kind": OUTPUT},
    ],
)
def test_damaged_places_in_joint_memory_are_refused(damage):
    made = tsopt.capture(lambda x: ((x + 1)[0, :3], (x + 1)[0, 1:], x * 2), X).signature
    place = View(JOINT, 0, (4,), (3,), (1,), 0)
    given = (place, replace(place, offset=1), None)
    outputs = tuple(replace(item, view=view) for item, view in zip(made.outputs, given, strict=True))
    whole = replace(made, outputs=outputs)
    assert signature_json.from_json(signature_json.to_json(whole)) == whole
    bad = replace(whole, outputs=(outputs[0], replace(outputs[1], view=replace(given[1], **damage)), outputs[2]))
    with pytest.raises(tsopt.BundleError):
        signature_json.from_json(signature_json.to_json(bad))
