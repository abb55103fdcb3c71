"""The garbage collector during imports."""

from __future__ import annotations

import gc
import sys
import types

import pytest

from tsopt import importing
from tsopt.importing import without_collector


def test_it_does_not_run_meanwhile():
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_runs_again_after_an_error():
    with pytest.raises(ImportError), without_collector():
        raise ImportError
    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Thing:
    """Something in a module."""


@pytest.fixture
def imported(monkeypatch):
    """Imports a module; it is gone after the test."""

    def make(name: str) -> Thing:
        module = types.ModuleType(name)
        module.thing = Thing()
        monkeypatch.setitem(sys.modules, name, module)
        return module.thing

    return make


@pytest.fixture
def nothing_frozen():
    """As in most processes; conftest.py freezes what the tests have imported."""
    gc.unfreeze()
    yield
    gc.freeze()


def is_old(thing: Thing) -> bool:
    return any(item is thing for item in gc.get_objects(generation=2))


def test_what_many_modules_brought_is_old_at_once(imported, monkeypatch, nothing_frozen):
    monkeypatch.setattr(importing, "MANY", 1)
    with without_collector():
        thing = imported("a_module_of_tests")
    assert is_old(thing)
    assert gc.get_freeze_count() == 0


def test_where_little_was_imported_the_young_stay_young(imported, nothing_frozen):
    with without_collector():
        thing = imported("a_module_of_tests")
    assert not is_old(thing)


def test_what_is_frozen_stays_frozen(imported, monkeypatch):
    monkeypatch.setattr(importing, "MANY", 1)
    gc.freeze()
    count = gc.get_freeze_count()
    with without_collector():
        imported("a_module_of_tests")
    assert gc.get_freeze_count() > 0.9 * count > 0
