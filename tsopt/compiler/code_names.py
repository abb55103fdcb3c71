"""The names in a function's code, and the Python modules that it imports."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

IMPORT_NAME = dis.opmap["IMPORT_NAME"]


def names_in(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes, also of those that are given as text: `getattr(self, "scale", 1.0)`."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def imported_by(function: FunctionType) -> Iterator[tuple[ModuleType, frozenset[str]]]:
    """The modules that it imports when it is called, as far as they are loaded, with the names that it takes from each.

    No names: it has the module itself, or the package that this is in.
    """
    for name, level, names in _imports_in(function.__code__):
        path = str(function.__globals__.get("__package__") or "").split(".")
        full = ".".join(filter(None, (*path[: len(path) - level + 1], name))) if level else name
        for place in {full, full if names else full.partition(".")[0]}:
            module = sys.modules.get(place)
            if isinstance(module, ModuleType):
                yield module, names


def _imports_in(code: CodeType) -> Iterator[tuple[str, int, frozenset[str]]]:
    """Of each import the module, how many dots are before it, and the names that are taken from it."""
    if IMPORT_NAME in code.co_code[::2]:
        level: Any = 0
        names: Any = None
        for step in dis.get_instructions(code):
            if step.opcode == dis.EXTENDED_ARG:  # a part of the next step
                continue
            if step.opcode == IMPORT_NAME:  # the two steps before it have the other two
                known = isinstance(level, int) and isinstance(names, tuple | None)
                yield str(step.argval), level if known else 0, frozenset((names if known else None) or ())
            level, names = names, step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports_in(constant)
