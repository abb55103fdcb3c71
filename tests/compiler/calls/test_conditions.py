"""Conditions on sizes: read from text that may be hostile, asked of calls, kept in bundles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tsopt
from tsopt.compiler.calls import signature_json
from tsopt.compiler.calls.conditions import Condition, function_of
from tsopt.errors import BundleError, SignatureError

WANTED = {"x": {0: "h", 1: "w"}}


def by_area(x):
    return x * 2 if x.shape[0] * x.shape[1] == 24 else x * 3


@pytest.fixture(scope="module")
def signature():
    return tsopt.capture(by_area, torch.randn(5, 7), dynamic=WANTED).signature


@pytest.mark.parametrize(
    ("text", "sizes", "holds"),
    [
        ("s0*s1 != 24", (4, 6), False),
        ("s0*s1 != 24", (1, 24), False),
        ("s0*s1 != 24", (5, 6), True),
        ("s0 // 2 % 3 == 1 and not s0 > 9", (8,), True),
        ("max(s0, 4) - abs(s1 - 8) >= 0", (2, 13), False),
        ("math.floor(float(s0) / 2) < 3 or math.sqrt(s0) == 4", (16,), True),
        ("(4 if s0 < 3 else 6) == s0", (6,), True),
        ("1 // (s0 - 5) <= 1", (5,), False),  # cannot be evaluated
        ("math.sqrt(s0 - 5) <= 1", (2,), False),
        ("math.pow(s0, 9999) > 1", (9,), False),
        ("s0 > 1", (1,), True),  # whether the program is right at 0 and 1 is found out by running it
    ],
)
def test_a_condition_holds_or_does_not(text, sizes, holds):
    assert Condition(text, tuple("hw"[: len(sizes)])).holds(*sizes) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "s0.__class__",
        "math.__loader__",
        "[s0 for s0 in (1,)]",
        "(lambda: 1)()",
        "s0 ** s0 ** s0",
        "s0 << 99999999",
        "'a' * s0",
        "s2 > 1",
        "max(s0, key=s0)",
        "max(*s0)",
        "round(s0, -999999999) >= 0",
        "s0 > 1) or (s0",
        "s0 := 3",
        "s0 >",
        "(" * 999 + "s0" + ")" * 999,
        "s0" + "+s0" * 2000,
    ],
)
def test_anything_but_arithmetic_is_refused(text):
    with pytest.raises(ValueError, match="condition on sizes"):
        function_of(text, 2)
    assert not Condition(text, ("h", "w")).holds(3, 4)


def test_it_reads_with_the_names_of_the_sizes():
    assert str(Condition("s1 % 4 == s10", (*"abcdefghij", "k"))) == "b % 4 == k"
    assert str(Condition("s0*s1 != 24", ("h", "w")).renamed("h", "n")) == "n*w != 24"


def test_calls_are_asked_and_told(signature):
    assert signature.bind((torch.ones(5, 6),), {})
    with pytest.raises(SignatureError, match=r"(?s)do not satisfy h \* w != 24.*where: .*test_conditions.py:\d+"):
        signature.bind((torch.ones(4, 6),), {})


def test_json_keeps_them(signature):
    again = signature_json.from_json(signature_json.to_json(signature))
    assert again.conditions == signature.conditions
    assert again.conditions


@pytest.mark.parametrize(
    "damage",
    [
        ["s0*s1 != 24"],
        ["s0.real", ["h"], ""],
        ["s0 > 1", ["n"], ""],
        ["s0 > 1", [], ""],
        [3, ["h"], ""],
        ["s0 > s1", ["h"] * 65, ""],
    ],
)
def test_damaged_ones_are_refused(signature, damage):
    with pytest.raises(BundleError, match="the stored signature is damaged"):
        signature_json.from_json(signature_json.to_json(signature) | {"conditions": [damage]})


def test_two_sizes_that_become_one_are_one_in_conditions(signature):
    first, second = signature.dims
    tied = signature.tied(first, second)
    assert [str(item) for item in tied.conditions] == ["h * h != 24"]
    assert tied.unmet({"h": 5}) is None
    assert signature_json.from_json(signature_json.to_json(tied)) == tied
    assert replace(tied, conditions=(Condition("s0 != 5", ("h",)),)).unmet({"h": 5}) is not None


@pytest.mark.parametrize(
    ("text", "ranges", "where", "told"),
    [
        ("s0 // 2 != 4", [range(2, 8)], "", False),
        ("s0 // 2 != 4", [range(2, 9)], "", True),
        ("s0 // 2 != 4", [range(2, 8)], "model.py:1", False),
        ("s0 != 16000", [range(2, 1 << 48)], "model.py:1", True),
        ("s0 // 2 != 1", [range(4, 1 << 48)], "", False),  # a condition of torch's own that hardly any size fails
        ("s0*s1 != 24", [range(2, 8), range(2, 8)], "model.py:1", True),
    ],
)
def test_users_are_told_of_those_that_may_fail(text, ranges, where, told):
    assert Condition(text, tuple("hw"[: len(ranges)]), where).may_fail(ranges) is told
