from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import tsopt

SOURCE = ast.parse(Path(tsopt.__file__).read_text())


def typed_names() -> dict[str, str]:
    """Name -> module of the `if TYPE_CHECKING` block."""
    (block,) = (n for n in SOURCE.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_the_four_lists_of_public_names_agree():
    assert set(tsopt.__all__) - {"__version__"} == set(tsopt._PLACES)
    assert typed_names() == tsopt._PLACES
    assert sorted(tsopt.__all__) == dir(tsopt)


def test_all_is_sorted_and_without_repeats():
    assert len(set(tsopt.__all__)) == len(tsopt.__all__)
    assert tsopt.__all__ == sorted(tsopt.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))


@pytest.mark.parametrize("name", [name for name in tsopt.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_lives_where_it_says(name):
    found = getattr(tsopt, name)
    assert found is getattr(importlib.import_module(tsopt._PLACES[name]), name)


@pytest.mark.parametrize("name", [name for name in tsopt.__all__ if name not in ("__version__", "STANDARD")])
def test_every_public_name_is_documented(name):
    found = getattr(tsopt, name)
    text = inspect.getdoc(found)
    assert text
    assert not text.startswith(f"{name}("), "the docstring that dataclass writes is none"


@pytest.mark.parametrize("name", ["optimize", "transform", "capture", "compile", "load", "verify", "benchmark"])
def test_the_verbs_name_their_arguments_types(name):
    signature = inspect.signature(getattr(tsopt, name))
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("name", ["hybridize_", "jit", "__wrapped__"])
def test_a_name_that_is_not_public_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=name):
        getattr(tsopt, name)


GRAPH_BREAK = "without changes to the model, tsopt.optimize(model, x) runs it partitioned or in eager mode"


@pytest.mark.parametrize("name", [n for n in tsopt.__all__ if n.endswith("Error") or n == "InvalidProgram"])
def test_every_error_is_a_tsopt_error_with_an_exit_code(name):
    cls = getattr(tsopt, name)
    assert issubclass(cls, tsopt.TsoptError)
    error = cls("what", where="where", why="why", fix="fix")
    # What a graph break costs is said behind the fix: the model runs all the same.
    still = f"; {GRAPH_BREAK}" if issubclass(cls, tsopt.GraphBreakError) else ""
    assert str(error) == f"what\n  where: where\n  why: why\n  fix: fix{still}"
    assert error.exit_code in (1, 2)
    assert str(cls("what")) == ("what" if not still else f"what\n  fix: {GRAPH_BREAK}")


def test_the_version_is_one():
    from tsopt._version import __version__

    assert tsopt.__version__ == __version__


@pytest.mark.parametrize("function", [tsopt.optimize, tsopt.transform])
def test_the_default_passes_can_be_read_in_a_signature(function):
    said = str(inspect.signature(function).parameters["passes"].default)
    assert "RulePass(name='algebra')" in said
    assert "lambda" not in said
    assert len(said) < 1500
