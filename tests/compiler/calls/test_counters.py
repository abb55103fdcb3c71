"""Integers of a call that change together with a size."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import tsopt
from tests.compiler.helpers import Net
from tsopt.compiler.calls import signature_json
from tsopt.compiler.calls.counters import as_called, counted, holds_sizes, without_integers
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.errors import BundleError, SignatureError, UsageError


def calls(*values):
    return [flatten(((value,), {})) for value in values]


def test_an_integer_that_goes_along_with_a_size_is_one():
    flat = calls(*({"x": torch.ones(2, n), "seen": n - 1, "fixed": 4} for n in (5, 7)))
    found = counted(flat)
    assert holds_sizes(found)
    for leaves, structure in flat:
        assert as_called(found, leaves) == structure
    (value,), _ = unflatten(found, [torch.ones(2, 30)])
    assert (value["seen"], value["fixed"]) == (29, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": torch.ones(5), "n": 5}, {"x": torch.ones(5), "n": 6}),
        ({"x": torch.ones(5), "n": 5}, {"x": torch.ones(6), "n": 7}),
        ({"x": torch.ones(5), "n": True}, {"x": torch.ones(6), "n": 2}),
        ({"x": torch.ones(5), "n": 5.0}, {"x": torch.ones(6), "n": 6.0}),
        ({"x": torch.ones(5), "n": "5"}, {"x": torch.ones(6), "n": "6"}),
        ({"x": torch.ones(5), "n": 5}, {"x": torch.ones(6, 1), "n": 6}),
        ({"x": torch.ones(5), "n": 5}, {"x": torch.ones(6), "m": 6}),
        ({"x": torch.ones(5), "n": 5}, {"x": 5, "n": torch.ones(5)}),
    ],
    ids=["no size differs", "by another amount", "bool", "float", "text", "another rank", "another key", "swapped"],
)
def test_calls_that_differ_otherwise_have_nothing_in_common(one, other):
    assert counted(calls(one, other)) is None


def test_calls_with_the_same_integers_are_as_they_are():
    one, other = calls({"x": torch.ones(5), "n": 5}, {"x": torch.ones(6), "n": 5})
    assert counted([one, other]) == one[1]
    assert not holds_sizes(counted([one, other]))


def test_the_nearest_tensor_gives_the_size():
    flat = calls(*([torch.ones(n), {"keys": torch.ones(1, n), "seen": n}] for n in (3, 4)))
    (value,), _ = unflatten(counted(flat), [torch.ones(10), torch.ones(1, 20)])
    assert value[1]["seen"] == 20


def test_forms_differ_in_anything_but_integers():
    same = [without_integers(structure) for _, structure in calls([1, "a"], [2, "a"], [2, "b"], [True, "a"])]
    assert same[0] == same[1]
    assert same[0] != same[2]
    assert same[0] != same[3]


def attend(self, x, cache):
    """A layer that keeps what it has seen, and how much of it there was."""
    cache.keys = torch.cat([cache.keys, x], 1)[:, -8:]
    cache.seen += x.shape[1]
    return (cache.keys.sum(1) + self.y) / cache.seen, cache.seen


def cache_of(size: int, seen: int):
    return SimpleNamespace(keys=torch.arange(1.0, size * 3 + 1).reshape(1, size, 3), seen=seen)


def step(size: int, seen: int | None = None):
    return tsopt.example(torch.ones(1, 1, 3), cache_of(size, size if seen is None else seen))


@pytest.fixture(scope="module")
def model():
    return Net(attend, y=torch.ones(3))


@pytest.fixture(scope="module")
def program(model):
    return tsopt.capture(model, [step(3), step(5)])


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_program_takes_any_such_integer_and_leaves_the_next_one(backend, model, program):
    run = tsopt.compile(program, backend)
    for size in (2, 3, 6):
        mine, theirs = step(size), step(size)
        found, wanted = run(*mine.args), model(*theirs.args)
        torch.testing.assert_close(found[0], wanted[0])
        assert found[1] == wanted[1] == size + 1
        assert type(found[1]) is int
        assert mine.args[1].seen == theirs.args[1].seen == size + 1
        torch.testing.assert_close(mine.args[1].keys, theirs.args[1].keys)


@pytest.mark.parametrize("seen", [3, 5, 4.0, True, None, "4"])
def test_a_call_with_another_integer_is_another_call(seen, program):
    call = tsopt.example(torch.ones(1, 1, 3), SimpleNamespace(keys=torch.ones(1, 4, 3), seen=seen))
    run = tsopt.compile(program, "eager")
    assert run.accepts(call.args, call.kwargs) is None
    with pytest.raises(SignatureError, match="does not match"):
        run.bind(call.args, call.kwargs)
    call.args[1].seen = 4
    assert run.accepts(call.args, call.kwargs) is not None
    assert len(run.bind(call.args, call.kwargs)) == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_call_with_what_is_no_tensor_is_a_message(program):
    cache = cache_of(4, 4)
    cache.keys = torch.nested.nested_tensor([torch.ones(2, 3)])
    with pytest.raises(SignatureError):
        program.signature.bind((torch.ones(1, 1, 3), cache), {})


def test_where_the_integer_decides_the_program_ends(model, program):
    """Past 8 rows the model drops the oldest."""
    with pytest.raises(SignatureError, match="arg1_1 is 8"):
        program.signature.bind(step(8).args, {})


def test_examples_whose_integers_are_unrelated_are_refused(model):
    with pytest.raises(UsageError, match="differ in more than their sizes"):
        tsopt.capture(model, [step(3), step(5, 9)])


def test_a_bundle_keeps_it(tmp_path, model):
    options = {"backends": ["onnxruntime"], "seconds": 0.05, "isolate": False, "cache": False}
    fast = tsopt.optimize(model, [step(3), step(5)], **options)
    fast.save(tmp_path / "bundle")
    loaded = tsopt.load(tmp_path / "bundle")
    for size in (2, 5, 6):
        mine, theirs = step(size), step(size)
        torch.testing.assert_close(loaded(*mine.args)[0], model(*theirs.args)[0])
        assert mine.args[1].seen == size + 1


def test_json_keeps_it(program):
    again = signature_json.from_json(json.loads(json.dumps(signature_json.to_json(program.signature))))
    assert again.outer == program.signature.outer
    assert again.result == program.signature.result
    assert [effect.parts for effect in again.effects] == [effect.parts for effect in program.signature.effects]


def sizes_in(data):
    found = [data] if isinstance(data, dict) and data.get("kind") == "size" else []
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return found + [size for part in parts for size in sizes_in(part)]


@pytest.mark.parametrize(
    "change",
    [
        {"value": [9, 0]},
        {"value": [-1, 0]},
        {"value": [1]},
        {"value": [1, "x"]},
        {"value": None},
        {"index": 0},
        {"index": 7},
        {"index": -1},
        {"keys": []},
        {"keys": [["item", {"a": 1}]]},
        {"keys": [["item", 0.0], ["item", 1.0], ["attr", "keys"]]},
        {"keys": [["item", 0], ["item", 1]]},
        {"keys": [["item", 0], ["item", 1], ["attr", "__class__"]]},
        {"keys": [["item", 0], ["item", 1], ["attr", "seen"]]},
    ],
    ids=str,
)
@pytest.mark.parametrize("which", [0, -1])
def test_a_size_in_a_file_is_one_of_an_input(program, change, which):
    data = json.loads(json.dumps(signature_json.to_json(program.signature)))
    sizes_in(data)[which].update(change)
    with pytest.raises(BundleError, match="damaged"):
        signature_json.from_json(data)
