"""Patterns match by schema, type and bits; a value used elsewhere is no part of a pattern."""

from __future__ import annotations

import math

import pytest
import torch

from tests.passes.helpers import aten, capture, find
from tsopt.compiler.rewriting.match import match, pattern, same
from tsopt.errors import RuleError

X = torch.ones(2, 3)


def root(model, name, given=X):
    return find(capture(model, given), name)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (math.nan, math.nan, True),
        ([1, 2], (1, 2), True),
        ([1, 2], [1, 2.0], False),
        ([1], [1, 1], False),
        (None, 0, False),
        ("a", "a", True),
        (torch.float32, torch.float32, True),
        (torch.float32, torch.float64, False),
        ([[1], 2], [[1], 2], True),
        (0, False, False),
    ],
)
def test_arguments_are_equal_by_type_and_bits(a, b, equal):
    assert same(a, b) is equal
    assert same(b, a) is equal


def test_holes_take_values_literals_and_lists():
    wanted = pattern(lambda x, p: aten.permute.default(x, p))
    found = match(wanted, root(lambda x: x.permute(1, 0), "permute"))
    assert list(found.holes) == ["x", "p"]
    assert found.holes["p"] == [1, 0]
    assert found.holes["x"].op == "placeholder"


def test_defaults_are_filled_in_on_both_sides():
    written = pattern(lambda x, y: aten.add.Tensor(x, y, alpha=1))
    silent = pattern(lambda x, y: aten.add.Tensor(x, y))
    node = root(lambda x: aten.add.Tensor(x, x, alpha=1), "add.Tensor")
    assert match(written, node)
    assert match(silent, node)
    assert not match(silent, root(lambda x: torch.add(x, x, alpha=2), "add.Tensor"))


def test_keywords_and_positions_are_one():
    wanted = pattern(lambda x: aten.sum.dim_IntList(x, [0], keepdim=True))
    assert match(wanted, root(lambda x: x.sum(0, True), "sum.dim_IntList"))
    assert not match(wanted, root(lambda x: x.sum(0), "sum.dim_IntList"))


def test_the_same_hole_twice_is_the_same_value():
    wanted = pattern(lambda x: aten.mul.Tensor(x, x))
    assert match(wanted, root(lambda x: x * x, "mul.Tensor"))
    assert not match(wanted, root(lambda x, y: x * y, "mul.Tensor", (X, X)))


def test_the_same_inner_call_twice_is_the_same_node():
    def twice(x):
        y = aten.sin.default(x)
        return aten.mul.Tensor(y, y)

    assert match(pattern(twice), root(lambda x: (lambda y: y * y)(x.sin()), "mul.Tensor"))
    assert not match(pattern(twice), root(lambda x: x.sin() * x.sin(), "mul.Tensor"))


def test_lists_of_values_match_by_length():
    wanted = pattern(lambda x, y: aten.cat.default([x, y], 0))
    found = match(wanted, root(lambda x: torch.cat([x, x + 1]), "cat"))
    assert found.holes["y"].target is aten.add.Tensor
    assert not match(wanted, root(lambda x: torch.cat([x, x, x]), "cat"))


def test_another_overload_does_not_match():
    assert not match(pattern(lambda x: aten.add.Scalar(x, 1)), root(lambda x: aten.add.Tensor(x, 1), "add.Tensor"))


def test_the_match_lists_what_it_covers_root_first():
    found = match(pattern(lambda x: aten.neg.default(aten.sin.default(x))), root(lambda x: -(x.sin()), "neg"))
    assert [node.target for node in found.nodes] == [aten.neg.default, aten.sin.default]


def test_a_pattern_counts_its_calls_and_must_return_one():
    assert pattern(lambda x: aten.neg.default(aten.neg.default(x))).size == 2
    with pytest.raises(RuleError, match="must return the result of a call"):
        pattern(lambda x: x)


@pytest.mark.parametrize("function", [lambda *x: aten.neg.default(x[0]), lambda x, *, y: aten.add.Tensor(x, y)])
def test_holes_are_positional(function):
    with pytest.raises(RuleError, match="positional parameters only"):
        pattern(function)


@pytest.mark.parametrize(
    ("function", "what", "fix"),
    [
        (lambda x: aten.relu(x), "calls aten.relu, which is not an overload", "write aten.relu.default"),
        (lambda x: torch.relu(x), "calls torch.relu, which is not an overload", "write aten.relu.default"),
        (lambda x: x.relu(), "calls relu, which is not an overload", "write aten.relu.default"),
        (lambda x: torch.nn.functional.gelu(x), "calls .*gelu, which", "write aten.gelu.default"),
        (lambda x: aten.neg.default(x + 1), "calls .*add, which", "write one of: aten.add.Tensor, aten.add.Scalar"),
        (lambda x: math.sqrt(x), "a pattern raises an error", "write calls"),
        (lambda x: aten.no_such_op.default(x), "a pattern raises an error", "write calls"),
        (lambda x: aten.neg.default(x) if x else x, "a pattern raises an error", "write calls"),
        (lambda x: aten.add.Tensor(x), "with other arguments than it has", "self, other, alpha"),
        (lambda x: aten.neg.default(x, 1), "with other arguments than it has", "parameters: self"),
        (lambda x: aten.add.Tensor(x, x, beta=2), "with other arguments than it has", "self, other, alpha"),
        (lambda x: aten.add.Tensor(x, x, other=x), "with other arguments than it has", "self, other, alpha"),
    ],
)
def test_a_pattern_that_could_never_match_is_refused_with_what_to_write(function, what, fix):
    with pytest.raises(RuleError, match=what) as caught:
        pattern(function)
    assert fix in caught.value.fix
    assert "test_match.py" in caught.value.where
