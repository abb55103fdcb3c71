"""Nestings in files that nobody vouches for."""

from __future__ import annotations

import enum
import json
import sys
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from tests.compiler.calls.test_structure import VALUES, A, Bag, Plain
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.calls.structure_json import from_json, to_json
from tsopt.errors import BackendError, BundleError


def test_classes_are_compared_by_identity_and_those_of_files_by_name():
    one, other = (flatten((A, type("Same", (), {"__module__": "m"})))[1] for _ in range(2))
    stored = from_json(to_json(one))
    assert one != other
    assert stored == one
    assert stored == other
    assert stored != flatten((A, int))[1]


@pytest.mark.parametrize("value", [v for v in VALUES if not isinstance(v, (Bag, SimpleNamespace))][:-1], ids=str)
def test_json_keeps_the_structure(value):
    leaves, structure = flatten(value)

    made = unflatten(from_json(json.loads(json.dumps(to_json(structure)))), leaves)
    if not isinstance(value, OrderedDict):
        assert type(made) is type(value)
    assert flatten(made)[0] == leaves


def test_json_keeps_constants_to_the_bit():
    values = [None, True, 1, -0.0, 1e-45, float("inf"), "text", torch.float16, torch.device("cpu")]
    made = unflatten(from_json(to_json(flatten(values)[1])), [])
    assert [repr(v) for v in made] == [repr(v) for v in values]


@pytest.mark.parametrize("value", [torch.strided, torch.channels_last, torch.int8, torch.device("cuda:1"), torch.Size])
def test_json_keeps_constants_of_torch(value):
    structure = flatten((A, value))[1]
    made = from_json(json.loads(json.dumps(to_json(structure))))
    assert made == structure
    if not isinstance(value, type):
        assert unflatten(made, [A])[1] == value
        assert made != flatten((A, torch.sparse_coo))[1]


@pytest.mark.parametrize("value", [torch.finfo(torch.float32), torch.Generator(), 1j], ids=["finfo", "generator", "1j"])
def test_other_constants_are_refused_when_they_are_written(value):
    with pytest.raises(BundleError, match="cannot be saved to a file"):
        to_json(flatten((A, value))[1])


def test_constants_of_torch_say_that_they_need_it(monkeypatch):
    stored = to_json(flatten((A, torch.float16))[1])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match="the bundle needs torch, which is not installed") as caught:
        from_json(stored)
    assert "torch.float16" in caught.value.why


class Two(tuple):
    __slots__ = ()


def test_a_tuple_of_another_class_is_compared_by_its_name():
    for value in (A.shape, Two((1, 2))):
        structure = flatten((A, value))[1]
        made = from_json(json.loads(json.dumps(to_json(structure))))
        assert made == structure
        assert made != flatten((A, tuple(value)))[1]
    assert type(unflatten(from_json(to_json(flatten((A, A.shape))[1])), [A])[1]) is torch.Size


def test_a_shape_is_a_tuple_where_torch_is_not_installed(monkeypatch):
    structure = flatten((A, A.shape))[1]
    stored, plain = to_json(structure), flatten((A, tuple(A.shape)))[1]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert from_json(stored) == plain


def test_keys_that_json_would_turn_into_others_are_refused():
    class Side(enum.IntEnum):
        LEFT = 0

    with pytest.raises(BundleError, match="a dict with a Side as key"):
        to_json(flatten({Side.LEFT: A})[1])
    keys = (0, "0", None, True, (1, ("a", 2)))
    assert from_json(json.loads(json.dumps(to_json(flatten({key: A for key in keys[:3]})[1])))).keys == keys[:3]
    assert from_json(json.loads(json.dumps(to_json(flatten({key: A for key in keys[3:]})[1])))).keys == keys[3:]


def test_a_class_nobody_imported_becomes_a_namespace():
    data = to_json(flatten(Plain(A))[1]) | {"class": "os:system"}
    made = unflatten(from_json(data), [A])
    assert type(made) is SimpleNamespace
    assert made.value is A


@pytest.mark.parametrize("name", ["subprocess:Popen", "builtins:eval", "nowhere:Thing", "", ":", "torch:nn.Linear"])
def test_classes_that_are_no_records_are_not_made(name):
    data = to_json(flatten(Plain(A))[1]) | {"class": name}
    assert type(unflatten(from_json(data), [A])) is SimpleNamespace


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        [],
        {},
        {"kind": "leaf"},
        {"kind": "leaf", "index": -1},
        {"kind": "leaf", "index": "0"},
        {"kind": "evil", "children": []},
        {"kind": "dict", "children": [{"kind": "leaf", "index": 0}], "keys": []},
        {"kind": "tuple", "children": 3},
        {"kind": "object", "children": [], "keys": [["attr", "x"]]},
        {"kind": "tuple", "children": [{"kind": "nothing"}]},
    ],
)
def test_damaged_structures_are_refused(data):
    with pytest.raises(BundleError, match="structure is damaged"):
        from_json(data)


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "shared", "index": 5},
        {"kind": "dict", "keys": [{"a": 1}], "children": [{"kind": "leaf", "index": 0}]},
        {"kind": "object", "keys": ["x"], "children": [{"kind": "leaf", "index": 0}]},
        {"kind": "object", "keys": [["attr", 3]], "children": [{"kind": "leaf", "index": 0}]},
        {"kind": "dict", "keys": 3, "children": []},
        {"kind": "const", "float": "not a number"},
        {"kind": "const", "torch": "device", "text": "moon"},
        {"kind": "const", "torch": "dtype", "text": "torch.strided"},
        {"kind": "const", "torch": "nn", "text": "torch.nn"},
    ],
    ids=["shared", "unhashable", "key", "name", "keys", "float", "device", "another constant", "no constant"],
)
def test_structures_that_cannot_be_built_are_refused_with_a_typed_error(data):
    with pytest.raises(BundleError):
        unflatten(from_json(data), [A])
