"""How a user says which sizes differ from call to call, and what is told when that is no answer."""

from __future__ import annotations

import pytest
import torch

from tsopt.compiler.calls.example import example
from tsopt.compiler.calls.signature import Dim
from tsopt.compiler.sizes.dims import dim, dynamic_of, from_examples, from_mapping, resized, sampled
from tsopt.errors import UsageError

X = torch.arange(6.0).reshape(2, 3)
Y = X.clone()


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("batch", Dim("batch", 1, None)),
        (" batch[1..32] ", Dim("batch", 1, 32)),
        ("n[4..]", Dim("n", 4, None)),
        ("n[..8]", Dim("n", 1, 8)),
        (Dim("n", 2, 6, 2), Dim("n", 2, 6, 2)),
    ],
)
def test_a_dimension_is_read(text, made):
    assert dim(text) == made


@pytest.mark.parametrize("text", ["", "1", "ba tch", "n[1-3]", "n[a..b]", "n[", 3, None])
def test_what_is_no_dimension_is_told_how_to_write_one(text):
    with pytest.raises(UsageError, match=r"(?s)invalid dimension.*fix: write name"):
        dim(text)


@pytest.mark.parametrize("text", ["n[5..4]", "n[1..1]", "n[0..1]"])
def test_a_range_holds_at_least_two_sizes(text):
    with pytest.raises(UsageError, match="invalid range"):
        dim(text)


def test_a_mapping_is_by_input_and_axis():
    found = from_mapping({"y": {-1: "n"}, "x": {0: "b[1..4]"}}, ["x", "y"], example(X, Y))
    assert found == {1: {1: Dim("n")}, 0: {0: Dim("b", 1, 4)}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"z": {0: "b"}}, r"there is no input 'z'\n.*x, y"),
        ({"x": {2: "b"}}, "has no axis 2"),
        ({"x": {"0": "b"}}, "has no axis '0'"),
        ({"x": "b"}, "must map axes to names"),
        ({}, "does not name an axis"),
        ({"x": {0: "b[1..4]"}, "y": {0: "b[1..5]"}}, "b has two different ranges"),
    ],
)
def test_mappings_that_fit_no_call(given, words):
    with pytest.raises(UsageError, match=words) as caught:
        from_mapping(given, ["x", "y"], example(X, Y))
    assert caught.value.fix


def test_what_differs_between_examples_is_dynamic():
    assert from_examples([example(X, Y), example(X[:1], Y), example(X, Y[:, :2])]) == {0: {0: None}, 1: {1: None}}


@pytest.mark.parametrize("other", [example(X.int()), example(X[0]), example(X, 1), example([X])])
def test_examples_that_differ_in_more_than_sizes_are_refused(other):
    with pytest.raises(UsageError, match=r"(?s)differ in more than their sizes.*a tuple: \(x, y\)"):
        from_examples([example(X), other])


def test_examples_of_the_same_sizes_are_refused():
    with pytest.raises(UsageError, match="the same sizes"):
        from_examples([example(X), example(X + 1)])


def test_the_largest_example_is_traced_and_never_with_a_size_of_one():
    calls = [example(X[:1, :1]), example(X[:1])]
    found = dynamic_of(calls, {0: {0: Dim("b"), 1: None}})
    assert found.trace.args[0].shape == (2, 3)
    assert found.seen == {(0, 0): (1, 1), (0, 1): (1, 3)}


@pytest.mark.parametrize(
    ("calls", "axes", "shapes"),
    [
        ([example(X[:, :0], Y[:, :1])], {0: {1: Dim("past", 0)}, 1: {1: Dim("mask")}}, [(2, 2), (2, 3)]),
        ([example(X[:, :1], Y[:, :2]), example(X[:, :0], Y[:, :1])], {0: {1: None}, 1: {1: None}}, [(2, 2), (2, 3)]),
        ([example(X[:, :0], Y[:, :1])], {0: {1: Dim("past", 0)}, 1: {1: Dim("mask", 1, 2)}}, [(2, 2), (2, 2)]),
        ([example(X[:1], Y)], {0: {0: Dim("batch")}, 1: {1: Dim("width")}}, [(2, 3), (2, 3)]),
    ],
)
def test_sizes_that_grow_for_the_trace_stay_as_far_apart(calls, axes, shapes):
    found = dynamic_of(calls, axes)
    assert [tuple(tensor.shape) for tensor in found.trace.args] == shapes
    assert found.traced == {(place, axis): shapes[place][axis] for place in axes for axis in axes[place]}


def test_axes_of_one_name_have_one_size_in_the_example():
    with pytest.raises(UsageError, match=r"(?s)n = 2 at one axis, and 1 at another.*fix: give these axes different"):
        dynamic_of([example(X, Y[:1])], {0: {0: Dim("n")}, 1: {0: Dim("n")}})


def test_a_resized_call_repeats_its_values():
    made = resized(example(X, k=Y), {(0, 0): 3, (1, 1): 2})
    assert torch.equal(made.args[0], X[[0, 1, 0]])
    assert torch.equal(made.kwargs["k"], X[:, :2])
    assert resized(example(X[:0]), {(0, 0): 2}).args[0].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_resized_image_keeps_its_memory_format():
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert resized(example(image), {(0, 0): 3}).args[0].is_contiguous(memory_format=torch.channels_last)


def test_sampled_sizes_are_near_the_usual_ones_and_all_different():
    dims = [Dim("batch", 1, 100), Dim("length", 4, None, 4)]
    found = sampled(dims, {"batch": 20, "length": 16}, 16, seed=0)
    assert len(found) == 7, "lengths 4 to 32 in steps of 4, without 16"
    assert len({choice["batch"] for choice in found}) == 7
    for choice in found:
        assert 1 <= choice["batch"] <= 40
        assert choice["batch"] != 20
        assert choice["length"] % 4 == 0
        assert choice["length"] != 16
    assert len(sampled([Dim("samples")], {"samples": 10**12}, 16, seed=0)) == 16, "without a list of them all"
    assert found == sampled(dims, {"batch": 20, "length": 16}, 16, seed=0)
    assert sampled([], {}, 16, seed=0) == []
