"""What a model memoizes outside of itself is real after a capture, and as in eager."""

from __future__ import annotations

import functools
import gc
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import tsopt
from tsopt.compiler.outside import Outside

TABLE: dict[int, torch.Tensor] = {}
NESTED: dict[str, dict[int, tuple[torch.Tensor, ...]]] = {"tables": {}}


@functools.lru_cache(maxsize=4)
def cached(size):
    return torch.arange(size, dtype=torch.float32)


@functools.cache
def pair(size):
    return torch.arange(size), torch.ones(size)


def by_dict(size):
    if size not in TABLE:
        TABLE[size] = torch.arange(size, dtype=torch.float32)
    return TABLE[size]


def by_nested_dict(size):
    tables = NESTED["tables"]
    if size not in tables:
        tables[size] = (torch.arange(size, dtype=torch.float32), torch.ones(size))
    return tables[size][0]


WAYS = {
    "lru_cache": cached,
    "cache of tuples": lambda size: pair(size)[0] * pair(size)[1],
    "dict": by_dict,
    "dict of dicts": by_nested_dict,
}


class Positions(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x):
        return self.linear(x) + WAYS[self.way](x.shape[-1])


@pytest.fixture(autouse=True)
def _empty():
    def clear():
        cached.cache_clear()
        pair.cache_clear()
        TABLE.clear()
        NESTED["tables"].clear()

    clear()
    yield
    clear()


@pytest.mark.sliced(1)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_memoized_is_real_and_the_model_is_what_it_was(way):
    model, x = Positions(way).eval(), torch.randn(2, 4)
    program = tsopt.capture(model, x)
    found = model(x)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, model.linear(x) + torch.arange(4.0))
    torch.testing.assert_close(program.module()(x)[0], found)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_it_is_optimized_as_one_graph(way):
    model, x = Positions(way).eval(), torch.randn(2, 4)
    fast = tsopt.optimize(model, x, backends=("torchscript",), seconds=0.05)
    assert isinstance(fast, tsopt.Optimized)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.sliced(1)
@pytest.mark.parametrize("way", WAYS)
def test_caches_that_a_server_has_frozen_before_it_forks_are_found(way):
    """`gc.freeze()` hides them from the garbage collector's list of objects and of what refers to them."""
    TABLE[-1] = NESTED["tables"][-1] = (torch.ones(1),)  # an empty dict would not be hidden
    gc.freeze()
    model, x = Positions(way).eval(), torch.randn(2, 4)
    program = tsopt.capture(model, x)
    torch.testing.assert_close(program.module()(x)[0], model.linear(x) + torch.arange(4.0))
    torch.testing.assert_close(model(x), program.module()(x)[0])


class Table:
    """What a model keeps in an attribute of a class, which has none at first."""


class FromAClass(nn.Module):
    def forward(self, x):
        if not hasattr(Table, "values"):
            Table.values = torch.arange(4.0)
        return x + Table.values


def test_a_class_loses_what_a_capture_has_given_it_by_its_own_means():
    """Python goes on reading from a cache what only the dict of a class has lost, and crashes."""
    model, x = FromAClass().eval(), torch.randn(2, 4)
    program = tsopt.capture(model, x)
    found = getattr(Table, "values", None)
    assert found is None or type(found) is torch.Tensor
    torch.testing.assert_close(program.module()(x)[0], x + torch.arange(4.0))
    torch.testing.assert_close(model(x), x + torch.arange(4.0))
    del Table.values
    assert not hasattr(Table, "values")
    torch.testing.assert_close(model(x), x + torch.arange(4.0))


class Slotted:
    __slots__ = ("table",)


class Plain:
    """Its attributes are in no dict for as long as nobody asks for one."""


HELD: dict[str, Any] = {}


class Keeping(nn.Module):
    """Keeps a table in whatever is there, once."""

    def forward(self, x):
        holder, table = HELD["it"], torch.arange(4.0)
        if isinstance(holder, (set, deque)):
            keep = getattr(holder, "add", None) or holder.append
            if not holder:
                keep(table)
        elif isinstance(holder, dict):
            holder.setdefault("table", table)
        elif not hasattr(holder, "table"):
            holder.table = table
        return x + table


@pytest.mark.parametrize("kind", [Slotted, Plain, set, deque, OrderedDict])
def test_no_tensor_of_the_tracer_stays_wherever_it_is_kept(kind, monkeypatch):
    monkeypatch.setattr(Outside, "put_back", lambda self: False)  # which takes back what it knows of
    holder = HELD["it"] = kind()
    try:
        tsopt.capture(Keeping().eval(), torch.randn(2, 4))
        assert not any(type(item) is FakeTensor for item in gc.get_referents(holder))
    finally:
        HELD.clear()
