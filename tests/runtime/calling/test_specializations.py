"""What was compiled for further signatures, while calls look for it."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.runtime.calling.specializations import Specializations, call_key


class Compared(str):
    """A constant of a call that calls a function whenever it is compared."""

    __slots__ = ()
    then = staticmethod(lambda: None)

    def __eq__(self, other):
        self.then()
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def model(*args):
    return args


def key_of(count, *, transposed):
    x = torch.zeros(count, count)
    return call_key((x.mT if transposed else x, Compared("mean")), {}, aliasing=False)


def test_calls_may_be_looked_for_while_another_one_is_kept(monkeypatch):
    kept, found = Specializations(), []
    keys = [key_of(count, transposed=True) for count in (2, 3, 4)]
    for key in keys:
        kept.keep(key, model, by_layout=True)

    def look():
        if len(found) < 9:
            found.append(len(found))
            kept.get(keys[len(found) % 3])

    monkeypatch.setattr(Compared, "then", staticmethod(look))
    kept.keep(key_of(4, transposed=False), model, by_layout=True)
    assert found
    assert len(kept) == 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_served_by_none():
    kept, x = Specializations(), torch.ones(3, 4)
    run = tsopt.compile(tsopt.capture(torch.nn.Linear(4, 2).eval(), x), "eager")
    kept.used(run, (x,), {})
    assert kept.accepting((x,), {}) is not None
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    assert kept.accepting((nested,), {}) is None
    kept.used(run, (nested,), {})
