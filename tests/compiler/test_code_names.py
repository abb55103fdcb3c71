"""Names and imports in the code of functions."""

from __future__ import annotations

import sys
import types

import pytest

from tsopt.compiler.code_names import imported_by, names_in


def named(self, x):
    return [self.inner(part) for part in getattr(x, "scale", 1.0)] + math.pi  # noqa: F821


def test_names_of_attributes_globals_and_texts():
    assert {"inner", "scale", "math", "pi"} <= set(names_in(named.__code__))


def absolute():
    import outer.inner.deep

    return outer.inner.deep


def taken():
    from outer.inner import deep, other

    return deep, other


def relative():
    from . import inner  # noqa: TID252
    from .inner import deep  # noqa: TID252

    return inner, deep


def far():
    from ..outer.inner import deep  # noqa: TID252

    return deep


def below():
    def function():
        import outer

        return outer

    return function


CASES = {
    absolute: {("outer", frozenset()), ("outer.inner.deep", frozenset())},
    taken: {("outer.inner", frozenset({"deep", "other"}))},
    relative: {("outer", frozenset({"inner"})), ("outer.inner", frozenset({"deep"}))},
    far: {("pack.outer.inner", frozenset({"deep"}))},
    below: {("outer", frozenset())},
    named: set(),
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_imports(monkeypatch, function):
    for name in ("outer", "outer.inner", "outer.inner.deep", "pack.outer.inner"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    package = "pack.of" if function is far else "outer"
    within = types.FunctionType(function.__code__, {"__package__": package})
    assert {(module.__name__, names) for module, names in imported_by(within)} == CASES[function]


def test_what_is_not_loaded_is_nothing_yet():
    assert list(imported_by(absolute)) == []


def test_imports_behind_many_other_names_are_found(monkeypatch):
    """Numbers above 255 take a step of their own in the code."""
    monkeypatch.setitem(sys.modules, "outer", types.ModuleType("outer"))
    lines = [*(f"    self.name_{i} = {i}.5" for i in range(300)), "    import outer", "    from outer import deep"]
    space = {"__name__": "made"}
    exec("\n".join(["def function(self):", *lines]), space)
    found = {(module.__name__, names) for module, names in imported_by(space["function"])}
    assert found == {("outer", frozenset()), ("outer", frozenset({"deep"}))}
