"""Bounds on the values of a call: what they admit, what is raised or run beyond them, and how a bundle keeps them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tsopt
from tsopt.errors import IndexOutOfRange, IndexRefused
from tsopt.runtime.calling.value_checks import (
    BELOW_INFINITY,
    FINITE,
    INDEX,
    NOT_NAN,
    REFUSED,
    Bound,
    from_options,
    guarded,
    to_options,
)


@pytest.fixture(scope="module")
def signature():
    return tsopt.capture(lambda i, x: x[i], (torch.tensor([1, 0]), torch.ones(4, 3))).signature


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
@pytest.mark.parametrize(
    ("values", "admitted"), [([0, 9], True), ([-1, 3], False), ([3, 10], False), ([], True), ([-100, 4], True)]
)
def test_both_ends_and_one_number_more_are_admitted(kind, values, admitted):
    assert Bound(0, 0, 9, INDEX, also=-100).admits([kind(values)]) is admitted


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("make", [torch.tensor, np.array, lambda values: torch.tensor(values, dtype=torch.bfloat16)])
@pytest.mark.parametrize(
    ("kind", "refused"), [(FINITE, (NAN, INF, -INF)), (BELOW_INFINITY, (NAN, INF)), (NOT_NAN, (NAN,))]
)
def test_what_floats_are_admitted(make, kind, refused):
    bound = Bound(0, kind=kind)
    for value in (NAN, INF, -INF, 3e38):
        assert bound.admits([make([[0.0, value], [1.0, -1.0]])]) is (value not in refused)
    assert bound.admits([make([])])


def test_a_tensor_with_a_gradient_is_looked_at():
    assert not Bound(0, kind=FINITE).admits([torch.tensor([NAN], requires_grad=True)])


def test_the_error_names_the_input_and_what_is_in_it(signature):
    run = guarded(lambda values: values, [Bound(1, kind=NOT_NAN)], signature)
    with pytest.raises(tsopt.BackendError, match="input 'x' contains NaN"):
        run([torch.tensor([1]), torch.full((4, 3), NAN)])


def test_ends_move_with_a_size_of_the_call():
    bound = Bound(0, 0, -1, INDEX, of=1, axis=0, below=-1, above=1)
    index = torch.tensor([-4, 3])
    assert bound.admits([index, torch.ones(4, 2)])
    assert not bound.admits([index, torch.ones(3, 2)])


@pytest.mark.parametrize(
    ("kind", "cls", "builtin"),
    [
        (INDEX, IndexOutOfRange, IndexError),
        (REFUSED, IndexRefused, RuntimeError),
        ("range", tsopt.BackendError, Exception),
    ],
)
def test_without_torch_beyond_is_an_error_of_the_kind_that_eager_raises(kind, cls, builtin, signature):
    run = guarded(lambda values: values, [Bound(0, 0, 3, kind)], signature)
    assert run([torch.tensor([3])]) == [torch.tensor([3])]
    with pytest.raises(cls, match="'i'") as caught:
        run([torch.tensor([4])])
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, tsopt.TsoptError)


def test_with_torch_beyond_is_run_by_it_and_made_once(signature):
    made = []

    def otherwise():
        made.append(1)
        return lambda values: ["torch"]

    run = guarded(lambda values: ["engine"], [Bound(0, 0, 3)], signature, otherwise)
    assert [run([torch.tensor(n)])[0] for n in (3, 4, 5)] == ["engine", "torch", "torch"]
    assert made == [1]


def test_without_bounds_nothing_is_wrapped(signature):
    def run(values):
        return values

    assert guarded(run, [], signature) is run


def test_a_bundle_keeps_bounds(signature):
    bounds = [Bound(0, 0, 3, INDEX), Bound(0, -1, 3, of=1, axis=1, above=1), Bound(1, kind=FINITE)]
    assert from_options(to_options(bounds), signature) == bounds
    assert to_options([]) == {}
    assert from_options({}, signature) == []


@pytest.mark.parametrize(
    "change",
    [{"input": 5}, {"input": -1}, {"of": 2}, {"low": "0"}, {"high": True}, {"kind": "other"}, {"also": 1.5},
     {"more": 1}, {"axis": 2, "above": 1}, {"axis": -1, "above": 1}],
)  # fmt: skip
def test_bounds_of_a_hostile_bundle_are_refused(change, signature):
    (bound,) = to_options([Bound(0, 0, 3, of=1)])["bounds"]
    with pytest.raises(tsopt.BundleError, match="bounds"):
        from_options({"bounds": [bound | change]}, signature)


@pytest.mark.parametrize("options", [{"bounds": {}}, {"bounds": [3]}, {"bounds": "x"}])
def test_bounds_that_are_no_list_are_refused(options, signature):
    with pytest.raises(tsopt.BundleError, match="damaged"):
        from_options(options, signature)
