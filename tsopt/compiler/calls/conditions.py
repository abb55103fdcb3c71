"""Expressions over the sizes of a call: conditions under which a program was traced, and places in memory.

For sizes that fail a condition the model does something else. Imports no torch, so that a bundle can check conditions
where torch is not installed.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

ALWAYS = 2  # torch.export takes sizes of 0 and 1 for another program; whether they are is found out by running it
LONGEST = 4000  # characters of a condition
MANY = 4096  # sizes
MOST, MOST_SIZES = 2000, 64  # conditions of one program, and sizes in one of them
CALLS: dict[str, Callable[..., Any]] = {"abs": abs, "float": float, "max": max, "min": min, "round": round}
ONE_ARGUMENT = ("abs", "float", "round")  # `round` with digits makes a power of ten
MATH = {name: getattr(math, name) for name in ("ceil", "floor", "log2", "pow", "sqrt", "trunc", "inf", "nan")}
NODES = (
    *(ast.Expression, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.IfExp, ast.Load),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)
_SIZE = re.compile(r"\bs(\d+)\b")


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on sizes.

    Attributes:
        text: an expression of Python over `s0`, `s1`, ...
        dims: the names of the Dims whose sizes these are.
        where: `model.py:12` of the line that branches; empty where that is not the user's.
    """

    text: str
    dims: tuple[str, ...]
    where: str = ""

    def __str__(self) -> str:
        return _SIZE.sub(lambda found: self.dims[int(found[1])], self.text)

    def holds(self, *sizes: int) -> bool:
        """Whether it holds for sizes in the order of `dims`; False where it cannot be evaluated."""
        if len(sizes) == 1 and sizes[0] < ALWAYS:
            return True
        try:
            return bool(function_of(self.text, len(self.dims))(*sizes))
        except (ArithmeticError, TypeError, ValueError):
            return False

    def holds_at(self, sizes: Mapping[str, int]) -> bool:
        return self.holds(*map(sizes.__getitem__, self.dims))

    def may_fail(self, sizes: Sequence[range]) -> bool:
        """Whether some of these sizes fail it; if there are too many to try, whether the user's code branches on it."""
        if len(sizes) == 1 and len(sizes[0]) <= MANY:
            return not all(map(self.holds, sizes[0]))
        return bool(self.where)

    def renamed(self, name: str, other: str) -> Condition:
        return replace(self, dims=tuple(other if dim == name else dim for dim in self.dims))


@dataclass(frozen=True, slots=True)
class Places:
    """Where the elements of a tensor lie in its memory, for any sizes.

    Attributes:
        stride, offset: expressions of Python over `s0`, `s1`, ...
        dims: the names of the Dims whose sizes these are.
    """

    stride: tuple[str, ...]
    offset: str
    dims: tuple[str, ...]

    def at(self, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], int]:
        """The strides and the offset, in elements.

        Raises:
            ValueError: they cannot be computed for these sizes, or are negative.
        """
        given = [sizes[name] for name in self.dims]
        try:
            *stride, offset = (function_of(text, len(given))(*given) for text in (*self.stride, self.offset))
        except (ArithmeticError, TypeError) as error:
            raise ValueError(str(error)) from error
        if not all(type(number) is int and number >= 0 for number in (*stride, offset)):
            raise ValueError(f"invalid places: {str((stride, offset))[:80]}")
        return tuple(stride), offset

    def renamed(self, name: str, other: str) -> Places:
        return replace(self, dims=tuple(other if dim == name else dim for dim in self.dims))


def plain(text: str) -> str:
    """Normalizes an expression.

    Raises:
        ValueError: it is too long or too deeply nested, or does not parse.
    """
    if len(text) > LONGEST:
        raise ValueError("the condition on sizes is too long")
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a condition on sizes: {text[:80]!r}") from error


@lru_cache(maxsize=4096)
def function_of(text: str, count: int) -> Callable[..., Any]:
    """The expression as a function of `count` sizes.

    Raises:
        ValueError: it is not an expression, or does more than arithmetic and comparisons.
    """
    names, text = [f"s{i}" for i in range(count)], plain(text)
    if not all(_is_arithmetic(node, {*names, *CALLS, "math"}) for node in ast.walk(ast.parse(text, mode="eval"))):
        raise ValueError(f"not a condition on sizes: {text[:80]!r}")
    scope = {**CALLS, "math": SimpleNamespace(**MATH), "__builtins__": {}}
    made: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {text}", scope)  # only the nodes checked above
    return made


def _is_arithmetic(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, bool)
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in MATH
    if isinstance(node, ast.Call):
        if node.keywords or any(isinstance(item, ast.Starred) for item in node.args):
            return False
        if isinstance(node.func, ast.Name):
            return node.func.id in CALLS and (len(node.args) == 1 or node.func.id not in ONE_ARGUMENT)
        return isinstance(node.func, ast.Attribute)
    return isinstance(node, NODES)
