"""What a message is made of."""

from __future__ import annotations

import pickle

import tsopt
from tsopt.errors import LONGEST


def test_a_message_says_what_where_why_and_how_to_go_on():
    error = tsopt.UsageError("unknown backend 'x'", where="model.py:3", why="a typo", fix="onnxruntime")
    assert str(error) == "unknown backend 'x'\n  where: model.py:3\n  why: a typo\n  fix: onnxruntime"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_keeps_what_else_it_knows_from_one_process_to_another():
    error = pickle.loads(pickle.dumps(tsopt.RuleError("it raises", rule="broken", why="a typo")))
    assert (error.rule, str(error)) == ("broken", "it raises\n  why: a typo")


def test_a_name_of_any_length_does_not_fill_the_screen():
    error = tsopt.BundleError(f"the output {'x' * 100_000} is unknown", why="y" * 100_000)
    assert len(error.what) < LONGEST + 10
    assert len(str(error)) < 2 * LONGEST + 100
    assert error.what.startswith("the output xxx")
    assert error.what.endswith("xxx is unknown")
