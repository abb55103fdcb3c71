"""Nestings in files that nobody vouches for."""

from __future__ import annotations

import json
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from tests.compiler.calls.test_structure import VALUES, A, Bag, Plain
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.calls.structure_json import from_json, to_json
from tsopt.errors import BundleError


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
    ],
    ids=["shared", "unhashable", "key", "name", "keys", "float", "device"],
)
def test_structures_that_cannot_be_built_are_refused_with_a_typed_error(data):
    with pytest.raises(BundleError):
        unflatten(from_json(data), [A])
