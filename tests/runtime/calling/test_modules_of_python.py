"""What a watch sees of changes in Python modules that the code of a model reads."""

from __future__ import annotations

import sys
import types

import pytest
from torch import nn

from tests.runtime.calling.watched import is_seen
from tsopt.runtime.calling.model_changes import Watch


@pytest.fixture
def flags(monkeypatch):
    """The module `outer_flags.inner`, which can be imported."""
    outer, inner = types.ModuleType("outer_flags"), types.ModuleType("outer_flags.inner")
    outer.inner, inner.scale = inner, 1.0
    monkeypatch.setitem(sys.modules, "outer_flags", outer)
    monkeypatch.setitem(sys.modules, "outer_flags.inner", inner)
    monkeypatch.setitem(globals(), "OUTER", outer)
    return inner


def by_global(x):
    return x * OUTER.inner.scale  # noqa: F821


def by_import(x):
    import outer_flags.inner

    return x * outer_flags.inner.scale


def by_import_as(x):
    import outer_flags.inner as flags

    return x * flags.scale


def by_import_from(x):
    from outer_flags.inner import scale

    return x * scale


def by_import_of_module(x):
    from outer_flags import inner

    return x * inner.scale


@pytest.mark.parametrize("model", [by_global, by_import, by_import_as, by_import_from, by_import_of_module])
def test_a_module_of_python_in_another_is_read(flags, model):
    is_seen(model, lambda: setattr(flags, "scale", 2.0))


def test_two_functions_may_read_the_same_module_of_python(flags):
    flags.shift = 1.0

    def shifted(x):
        return by_global(x) + OUTER.inner.shift  # noqa: F821

    is_seen(shifted, lambda: setattr(flags, "shift", 2.0))
    is_seen(shifted, lambda: setattr(flags, "scale", 2.0))


def test_a_module_of_python_may_be_replaced(flags):
    other = types.SimpleNamespace(scale=2.0)
    is_seen(by_global, lambda: setattr(OUTER, "inner", other))  # noqa: F821


class Holds(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        return x * self.held.scale


def test_a_module_of_python_may_be_held(flags):
    class InDefault(nn.Module):
        def forward(self, x, held=flags):
            return x * held.scale

    in_object = types.SimpleNamespace(held=flags)
    models = Holds(flags), InDefault(), lambda x: x * flags.scale, lambda x: x * in_object.held.scale
    for number, model in enumerate(models):
        is_seen(model, lambda number=number: setattr(flags, "scale", 2.0 + number))


def test_what_nothing_reads_is_no_change(flags):
    class Reads(nn.Module):
        def forward(self, x):
            return x * OUTER.inner.scale  # noqa: F821

        def unread(self, x):
            return x * OUTER.inner.unread_flag  # noqa: F821

    flags.unread_flag = 1.0
    watch = Watch(Reads())
    flags.unread_flag = 2.0
    assert not watch.changed()
    flags.scale = 2.0
    assert watch.changed()
