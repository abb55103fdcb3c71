"""`hybridize`: what a model's code has asked for in vain, and what wrappers and arrays hold."""

from __future__ import annotations

from array import array
from collections import ChainMap, UserDict, UserList
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest
import torch

from tests.hybrid.models import Holding, X, assert_follows
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.watched_places import ARRAYS


def of_what_its_class_has_not():
    class Gaining(Holding):
        pass

    return Gaining(None, lambda self, x: x * getattr(type(self), "gain", 1.0)), Gaining


def of_what_a_base_has_not():
    class Base(Holding):
        pass

    class Derived(Base):
        pass

    return Derived(None, lambda self, x: x * 2.0 if hasattr(self, "gain") else x), Base


def of_a_view():
    behind = {"gain": 1.0, "deep": {"bias": 1.0}}
    held = MappingProxyType(behind)
    return Holding(held, lambda self, x: x * self.held["gain"] + self.held["deep"]["bias"]), behind


def of_a_dict_in_an_object():
    held = UserDict(gain=1.0)
    return Holding(held, lambda self, x: x * self.held["gain"]), held


def of_a_list_in_an_object():
    held = UserList([1.0, 2.0])
    return Holding(held, lambda self, x: x * self.held[1]), held


def of_a_chain():
    first = {"gain": 1.0}
    return Holding(ChainMap(first, {"gain": 2.0}), lambda self, x: x * self.held["gain"]), first


def of_an_array():
    held = np.ones(8, dtype=np.float32)
    return Holding(held, lambda self, x: x * float(self.held[1]) + torch.from_numpy(self.held)), held


def of_a_partial():
    held = partial(torch.add, alpha=1.0)
    return Holding(held, lambda self, x: self.held(x, x)), held.keywords


def of_numbers():
    held = array("d", [1.0, 2.0])
    return Holding(held, lambda self, x: x * self.held[1] + len(self.held)), held


def of_bytes():
    held = bytearray([1, 2])
    return Holding(held, lambda self, x: x * self.held[1]), held


CASES = {
    "an attribute that its class gains": (of_what_its_class_has_not, lambda cls: setattr(cls, "gain", 3.0)),
    "an attribute that a base gains": (of_what_a_base_has_not, lambda cls: setattr(cls, "gain", 3.0)),
    "a value behind a view": (of_a_view, lambda held: held.update(gain=3.0)),
    "a value in a dict behind a view": (of_a_view, lambda held: held["deep"].update(bias=3.0)),
    "a value in a UserDict": (of_a_dict_in_an_object, lambda held: held.update(gain=3.0)),
    "a value in a UserList": (of_a_list_in_an_object, lambda held: held.append(held.pop() + 1)),
    "a value in a ChainMap": (of_a_chain, dict.clear),
    "a value in an array": (of_an_array, lambda held: held.__setitem__(1, 3.0)),
    "an argument of a partial": (of_a_partial, lambda held: held.update(alpha=3.0)),
    "a number in an array": (of_numbers, lambda held: held.__setitem__(1, 3.0)),
    "a number more in an array": (of_numbers, lambda held: held.append(3.0)),
    "a byte": (of_bytes, lambda held: held.__setitem__(1, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_it_may_change_between_calls(always_faster, case):
    make, change = CASES[case]
    model, held = make()
    assert_follows(model, lambda: change(held))


def test_few_bytes_of_arrays_are_compared_at_each_call():
    arrays = [np.zeros(ARRAYS // 2, dtype=np.uint8), np.array([None]), np.zeros(ARRAYS, dtype=np.uint8), np.ones(2)]
    watch = Watch(Holding(arrays, lambda self, x: x * float(self.held[3][0])))
    arrays[1][0], arrays[2][0] = 1, 1
    assert not watch.changed()
    arrays[3][0] = 2
    assert watch.changed()


def test_an_array_that_calls_write_is_told_from_what_only_others_write():
    count = np.zeros(1)

    def counts(self, x):
        count[0] += 1
        self.held[0] += 1
        return x

    model = Holding(np.zeros(1), counts)
    watch = Watch(model)
    model(X)
    assert watch.changed()
    found = watch.changes_of(lambda: model(X), kept=lambda: torch.no_grad())
    assert found == (["a numpy array"], ["a numpy array"])
