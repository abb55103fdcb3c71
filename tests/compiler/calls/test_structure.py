"""Nestings as flat tensors and back, and from files that nobody vouches for."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tsopt.compiler.calls.structure import Structure, flatten, same_but_for_sharing, unflatten, with_own_leaves
from tsopt.errors import CaptureError

A, B = torch.ones(1), torch.zeros(2)
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Plain:
    value: Any
    note: str = "kept"


@dataclass
class Picky:
    value: Any

    def __post_init__(self) -> None:
        self.made = True


class Bag(dict):
    pass


VALUES = [
    A,
    (),
    (A,),
    [A, [B, A]],
    {"a": A, 2: (B, None)},
    OrderedDict(b=A, a=B),
    Pair(A, 3),
    Plain(A, "other"),
    Picky((A, B)),
    Bag(a=A, b=1),
    SimpleNamespace(x=A, y=[1.5, "text"]),
    (A, True, 1, 1.0, None, "s", torch.float32, torch.device("cpu"), b"x", ...),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_unflatten_is_the_inverse_of_flatten(value):
    leaves, structure = flatten(value)
    made = unflatten(structure, leaves)
    assert type(made) is type(value)
    assert repr(made) == repr(value)
    again, same = flatten(made)
    assert same == structure
    assert all(x is y for x, y in zip(again, leaves, strict=True))


def test_constructors_are_not_run_again(monkeypatch):
    leaves, structure = flatten(Picky(A))
    monkeypatch.setattr(Picky, "__post_init__", lambda self: pytest.fail("ran again"))
    assert unflatten(structure, leaves).made is True


class Scaled(namedtuple("Scaled", ["first", "second"])):
    def __new__(cls, first, second):
        return super().__new__(cls, first * 2, second)


class Two(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


@pytest.mark.parametrize(
    "made", [Scaled(A, B), Two(A, B), torch.max(torch.ones(2, 2), 0)], ids=["named", "own", "torch"]
)
def test_tuples_are_not_constructed_again(made):
    leaves, structure = flatten(made)
    again = unflatten(structure, leaves)
    assert type(again) is type(made)
    assert all(mine is theirs for mine, theirs in zip(again, made, strict=True))


def test_a_tuple_with_attributes_is_a_constant_with_what_it_holds():
    value = Two(A, B)
    assert len(flatten(value)[0]) == 2
    value.scale = 2.0
    leaves, before = flatten(value)
    assert leaves == []
    value.scale = 3.0
    assert flatten(value)[1] != before


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((A, 1), (A, 1.0)),
        ((A, 1), (A, True)),
        ((A, 0), (A, None)),
        ((A, "x"), (A, "y")),
        ([A], (A,)),
        ({"a": A}, {"b": A}),
        ({"a": A, "b": B}, {"b": A, "a": B}),
        ({1: A}, {1.0: A}),
        ({1: A}, {True: A}),
        ({(1, "a"): A}, {(1.0, "a"): A}),
        ({0.0: A}, {-0.0: A}),
        (Pair(A, B), (A, B)),
        (Plain(A, "x"), Plain(A, "y")),
        ((A, None), (A, B)),
        ((A, 0.0), (A, -0.0)),
        ((A, (0.0,)), (A, (-0.0,))),
    ],
)
def test_calls_that_differ_have_other_structures(a, b):
    assert flatten(a)[1] != flatten(b)[1]


@pytest.mark.parametrize("value", [(A, 1), [A, {"a": 2.5}], Plain(A, "x"), (A, float("nan"))])
def test_calls_that_are_equal_have_equal_structures(value):
    import copy

    again = copy.deepcopy(value)
    if isinstance(value, tuple) and isinstance(value[1], float):
        again = (A, float("nan"))
    assert flatten(value)[1] == flatten(again)[1]


def test_a_shared_tensor_is_one_leaf_unless_each_place_is_to_be_its_own():
    assert len(flatten((A, A), share=False)[0]) == 2
    leaves, structure = flatten((A, [A]))
    assert len(leaves) == structure.leaf_count == 1


def test_a_shared_object_comes_back_shared():
    value = Plain(A)
    leaves, structure = flatten((value, [value]), share=True)
    made = unflatten(structure, leaves)
    assert made[0] is made[1][0]


def test_paths_are_readable():
    _, structure = flatten({"a": [A, (B,)], "b": Pair(A, None), "c": Plain(B)})
    assert [path for _, path in structure.paths("x")] == ["x.a.0", "x.a.1.0", "x.b.first", "x.c.value"]


@pytest.mark.parametrize("make", [lambda: [], lambda: {}, lambda: Bag()])
def test_what_contains_itself_is_refused(make):
    value = make()
    value.append(value) if isinstance(value, list) else value.update(me=value)
    with pytest.raises(CaptureError, match="contains itself"):
        flatten(value)


class Slots:
    __slots__ = ("x",)


class Checked:
    def __new__(cls, x):
        return object.__new__(cls)


class Reduced:
    def __reduce__(self):
        return Reduced, ()


def test_objects_without_tensors_that_outlive_the_call_are_themselves():
    value = SimpleNamespace(x=1)
    leaves, structure = flatten((A, value), share=True, held={id(value)})
    assert unflatten(structure, leaves)[1] is value


def test_objects_without_tensors_are_copied():
    value = SimpleNamespace(x=1, inner={"y": [None, torch.float32, int]}, empty=Bag())
    leaves, structure = flatten((A, value))
    made = unflatten(structure, leaves)[1]
    assert made is not value
    assert made.inner is not value.inner
    assert (made.x, made.inner, type(made.empty)) == (value.x, value.inner, Bag)
    assert flatten((A, made))[1] == structure


@pytest.mark.parametrize("value", [Slots(), Checked(1), Reduced()])
def test_objects_that_are_more_than_plain_attributes_are_constants(value):
    assert flatten((A, value))[1].children[1].kind == "const"


def test_texts_are_those_of_calls():
    assert str(flatten((A, [1, {"a": B}], Plain(A)))[1]) == "(*, [1, {a: *}], Plain{value: *, note: 'kept'})"
    assert str(Structure("leaf", index=0)) == "*"


def test_each_place_can_have_a_leaf_of_its_own():
    shared, apart = flatten((A, [A], {"k": A}))[1], flatten((A, [A], {"k": A}), share=False)[1]
    assert shared != apart
    assert with_own_leaves(shared) == apart
    assert same_but_for_sharing(shared, apart)
    assert not same_but_for_sharing(shared, flatten((A, [A], {"other": A}))[1])
    assert not same_but_for_sharing(flatten((A, 1))[1], flatten((A, 2))[1])


def test_leaves_are_not_held_until_garbage_is_collected():
    """Outputs of a call in a loop would pile up: they are large, and a collector counts objects, not bytes."""
    gc.collect()
    gc.disable()
    try:
        tensor = torch.zeros(3)
        flatten({"a": [tensor, (tensor, {"b": tensor})]})
        gone = weakref.ref(tensor)
        del tensor
        assert gone() is None
    finally:
        gc.enable()


class Answers(dict):
    __getattr__ = dict.__getitem__


def test_a_dict_whose_items_are_attributes_is_one_of_its_items():
    leaves, structure = flatten(Answers(a=A, b=1))
    assert leaves == [A]
    made = unflatten(structure, [B])
    assert type(made) is Answers
    assert (made.a, made.b) == (B, 1)


@pytest.mark.parametrize("value", [partial(torch.mul, A), (i for i in [A]), ValueError(A)])
def test_what_cannot_be_made_of_its_attributes_is_kept(value):
    leaves, structure = flatten([value])
    assert leaves == []
    assert unflatten(structure, [])[0] is value
