"""Constants of a call: which are the same, and when what they hold is not what it was."""

from __future__ import annotations

import pickle
import types
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import PurePosixPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tsopt.compiler.calls.constants import Told, equal, same, told


class Name(str):
    pass


def named(scale):
    made = Name("k")
    made.scale = scale
    return made


SAME = [
    (1.5, 1.5),
    (float("nan"), float("nan")),
    ("text", "te" + "xt"),
    (torch.float32, torch.float32),
    (torch.device("cpu"), torch.device("cpu")),
    (range(0, 4, 2), range(0, 4, 2)),
    (slice(1, None), slice(1, None)),
    (frozenset({1, "a"}), frozenset({"a", 1})),
    (Decimal("1.0"), Decimal("1.0")),
    (np.float32(1.5), np.float32(1.5)),
    (PurePosixPath("a"), PurePosixPath("a")),
    (Name("k"), Name("k")),
]
OTHERS = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    (np.float32(0.0), np.float32(-0.0)),
    (Decimal("1.0"), Decimal("1.00")),
    (frozenset({2}), frozenset({2.0})),
    (range(0, 3, 2), range(0, 4, 2)),
    (slice(1, 2), slice(1.0, 2)),
    (slice(0, torch.tensor(3)), slice(0, torch.tensor(3))),
    (named(2.0), named(3.0)),
    (named(2.0), Name("k")),
    (deque(), deque()),
]


@pytest.mark.parametrize("pair", SAME, ids=lambda pair: repr(pair[0])[:20])
def test_constants_that_are_written_alike_are_one(pair):
    assert same(*pair)
    assert told(pair[0]) == told(pair[1])


@pytest.mark.parametrize("pair", OTHERS, ids=lambda pair: repr(pair[1])[:20])
def test_constants_that_are_only_equal_are_two(pair):
    assert not same(*pair)


def test_keys_are_compared_in_all_their_parts():
    assert equal(("a", (1, 2.0)), ("a", (1, 2.0)))
    assert not equal(("a", (1, 2.0)), ("a", (True, 2.0)))


@dataclass
class Holds:
    act: object


class Slots:
    __slots__ = ("act",)


class State:
    shared = 1

    def __init__(self):
        self.scale = 2.0

    def act(self, x):
        return x * self.scale


SCALE = [2.0]
SETTINGS = SimpleNamespace(scale=2.0)


def slots(act):
    made = Slots()
    made.act = act
    return made


def enclosed(box):
    return lambda x: x * box[0]


def by_global(x):
    return x * SETTINGS.scale * sum(SCALE)


def module(**values):
    made = types.ModuleType("settings_of_a_test")
    vars(made).update(values)
    return made


def config(**values):
    return type("Config", (), values)


def set_data(linear):
    linear.weight.data = linear.weight.data + 1


CHANGES = {
    "tensor": (lambda: deque([torch.ones(2)]), lambda d: d[0].add_(1)),
    "memory": (lambda: nn.Linear(2, 2), set_data),
    "strides": (lambda: deque([torch.ones(2, 2)]), lambda d: setattr(d[0], "data", d[0].data.t())),
    "array": (lambda: deque([np.ones(2)]), lambda d: d[0].fill(2)),
    "window": (lambda: deque([torch.ones(2)], maxlen=1), lambda d: d.append(torch.ones(2))),
    "default dict": (lambda: defaultdict(list), lambda d: d.update(k=1)),
    "parameter": (lambda: nn.Linear(2, 2), lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach()))),
    "class": (lambda: config(scale=2.0), lambda c: setattr(c, "scale", 3.0)),
    "list of a class": (lambda: config(scales=[2.0]), lambda c: c.scales.append(3.0)),
    "module": (lambda: module(scale=2.0), lambda m: setattr(m, "scale", 3.0)),
    "closure": (lambda: enclosed([2.0]), lambda f: f.__closure__[0].cell_contents.append(1)),
    "closure in slots": (lambda: slots(enclosed([2.0])), lambda s: s.act.__closure__[0].cell_contents.append(1)),
    "method": (lambda: slots(State().act), lambda s: setattr(s.act.__self__, "scale", 3.0)),
    "partial": (lambda: slots(partial(torch.mul, [2.0])), lambda s: s.act.args[0].append(1)),
    "code": (lambda: slots(lambda x: x), lambda s: setattr(s, "act", lambda x: x)),
    "class of a constant": (lambda: deque([State()]), lambda d: setattr(type(d[0]), "shared", type(d[0]).shared + 1)),
    "attribute of a text": (lambda: named(2.0), lambda n: setattr(n, "scale", 3.0)),
    "attribute of a text inside": (lambda: [named(2.0)], lambda n: setattr(n[0], "scale", 3.0)),
    "slice": (lambda: slice(0, torch.ones(1)), lambda s: s.stop.add_(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told(name):
    make, change = CHANGES[name]
    item = make()
    before = told(item)
    assert told(item) == before
    change(item)
    assert told(item) != before


def test_globals_that_a_function_reads_are_told(monkeypatch):
    before = told(by_global)
    assert told(by_global) == before
    monkeypatch.setattr(SETTINGS, "scale", 3.0)
    changed = told(by_global)
    assert changed != before
    monkeypatch.setitem(globals(), "SCALE", [3.0])
    assert told(by_global) != changed


def test_what_no_code_reads_is_not_told(monkeypatch):
    before = told(by_global)
    monkeypatch.setattr(SETTINGS, "other", 3.0, raising=False)
    assert told(by_global) == before


def test_equal_contents_are_told_alike():
    assert Told({"a": [1, {2}]}) == Told({"a": [1, {2}]})
    assert Told([1]) != Told([True])


def test_what_is_gone_is_not_taken_for_what_has_its_address():
    held = deque([torch.ones(2)], maxlen=1)
    before = told(held)
    assert all((held.append(torch.ones(2)), told(held) != before)[1] for _ in range(10))
    linear = nn.Linear(2, 2)
    before = told(linear)
    for _ in range(10):
        linear.weight.data = torch.ones(2, 2)
        assert told(linear) != before


def test_what_was_told_is_not_kept_alive():
    held = deque([torch.ones(2)])
    kept, gone = told(held), weakref.ref(held[0])
    held.clear()
    assert gone() is None
    assert told(held) != kept


def test_tensors_of_inference_mode_and_sparse_ones_are_told():
    with torch.inference_mode():
        held = deque([torch.ones(2)])
    assert told(held) == told(held)
    assert told([torch.eye(2).to_sparse()]) is not None


def test_in_another_process_it_is_another_one():
    held = deque([torch.ones(2)])
    there = pickle.loads(pickle.dumps(told(held)))
    assert str(there) == str(told(held))
    assert there != told(held)


def test_plain_values_hold_nothing():
    assert [told(value) for value in (1, "a", None, torch.float32, len, range(3))] == [None] * 6
