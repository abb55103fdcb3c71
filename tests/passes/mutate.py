"""Takes one guard after the other out of the rules, and runs the tests of the rules on what is left.

`python -m tests.passes.mutate` lists the guards; with numbers it says for each whether a test goes red. A guard
is a condition on which a function gives up (`return None`, `return at.skip(...)`, `continue`); of several that `or`
joins each is one. The parent never imports tsopt.passes: each mutant is a fork made before that.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

PASSES = Path(__file__).parents[2] / "tsopt" / "passes"
TESTS = Path(__file__).parent
NOT_RULES = ("__init__", "cse", "dce", "fold", "order")  # passes of their own, with their own tests
NOT_THEIR_TESTS = ("test_standard", "test_random_programs", "test_mutations", "test_proofs")
LONGEST = 300  # seconds; a mutant that does not come to an end has been noticed


@dataclass(frozen=True)
class Guard:
    """One condition of one function. `place` counts the guards of the module, `text` is the condition as written."""

    module: str
    function: str
    text: str
    line: int
    place: int

    @property
    def key(self) -> str:
        return f"{self.module}.{self.function}: {self.text}"


def gives_up(node: ast.AST | None) -> bool:
    """Whether a value says that nothing is done: None, False, or a call of `skip`."""
    if node is None or (isinstance(node, ast.Constant) and node.value in (None, False)):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "skip"


def operands(test: ast.expr, joined: type[ast.boolop]) -> list[ast.expr]:
    return list(test.values) if isinstance(test, ast.BoolOp) and isinstance(test.op, joined) else [test]


def without(test: ast.expr, number: int, joined: type[ast.boolop]) -> ast.expr | None:
    """The condition without one of its operands; None when none is left."""
    left = [value for i, value in enumerate(operands(test, joined)) if i != number]
    if not left:
        return None
    return left[0] if len(left) == 1 else ast.BoolOp(joined(), left)


class Guards(ast.NodeTransformer):
    """Visits the guards of a module in order; takes out the one at `drop`."""

    def __init__(self, drop: int = -1) -> None:
        self.drop, self.count = drop, -1
        self.inside: list[str] = []
        self.found: list[tuple[str, str, int]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()
        return node

    def next_is_dropped(self, condition: ast.expr) -> bool:
        self.count += 1
        self.found.append((".".join(self.inside), ast.unparse(condition), condition.lineno))
        return self.count == self.drop

    def visit_If(self, node: ast.If) -> ast.AST:
        last = node.body[-1]
        ends = isinstance(last, ast.Continue) or (isinstance(last, ast.Return) and gives_up(last.value))
        if self.inside and len(node.body) == 1 and ends and not node.orelse:
            for number, condition in enumerate(operands(node.test, ast.Or)):
                if self.next_is_dropped(condition):
                    left = without(node.test, number, ast.Or)
                    return ast.Pass() if left is None else ast.If(left, node.body, [])
            return node
        self.generic_visit(node)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        value = node.value
        if not isinstance(value, ast.IfExp) or not self.inside:
            return node
        joined = ast.And if gives_up(value.orelse) else ast.Or
        if not gives_up(value.orelse) and not gives_up(value.body):
            return node
        kept = value.body if joined is ast.And else value.orelse
        for number, condition in enumerate(operands(value.test, joined)):
            if self.next_is_dropped(condition):
                left = without(value.test, number, joined)
                return ast.Return(kept if left is None else ast.IfExp(left, value.body, value.orelse))
        return node


def file_of(module: str) -> Path:
    return PASSES.joinpath(*module.split(".")).with_suffix(".py")


def modules() -> list[str]:
    """The files with rules, by their names inside tsopt.passes: `algebra`, `recompose.norms`."""
    paths = sorted(path.relative_to(PASSES) for path in PASSES.rglob("*.py") if path.stem not in NOT_RULES)
    return [".".join(path.with_suffix("").parts) for path in paths]


def guards_of(module: str) -> list[Guard]:
    visitor = Guards()
    visitor.visit(ast.parse(file_of(module).read_text()))
    return [Guard(module, *found, place) for place, found in enumerate(visitor.found)]


def all_guards() -> list[Guard]:
    return [guard for module in modules() for guard in guards_of(module)]


def without_guard(guard: Guard) -> str:
    """The source of a module in which one guard is missing."""
    tree = Guards(guard.place).visit(ast.parse(file_of(guard.module).read_text()))
    return ast.unparse(ast.fix_missing_locations(tree))


class Loader(importlib.machinery.SourceFileLoader):
    """Loads the mutant in place of the module."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code


@dataclass(frozen=True)
class Finder(importlib.abc.MetaPathFinder):
    guard: Guard

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != f"tsopt.passes.{self.guard.module}":
            return None
        file = str(file_of(self.guard.module))
        code = compile(without_guard(self.guard), file, "exec")
        return importlib.util.spec_from_file_location(fullname, file, loader=Loader(fullname, file, code))


def imported_by(path: Path) -> set[str]:
    """The modules of tsopt.passes that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("tsopt.passes."):
            inside = f"{node.module}.".removeprefix("tsopt.passes.")
            found |= {inside.removesuffix("."), *(f"{inside}{alias.name}" for alias in node.names)}
    return found


def tests_of(module: str) -> list[str]:
    """The test files that a module may turn red: its own, those of its folder, those of modules made with it."""
    users, size = {module}, 0
    while len(users) > size:
        size = len(users)
        users |= {name for name in modules() if imported_by(file_of(name)) & users}
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if path.stem not in NOT_THEIR_TESTS]
    folder, own = TESTS.joinpath(*module.split(".")[:-1]), f"test_{module.rpartition('.')[2]}"
    beside = {path for path in files if folder != TESTS and path.parent == folder}
    files = [path for path in files if path in beside or imported_by(path) & users]
    return [str(path) for path in sorted(files, key=lambda path: (path.stem != own, path not in beside))]


def is_red(module: str, guard: Guard | None = None) -> bool:
    """Runs the tests of a module in a fork, with a mutant in its place when a guard is given."""
    child = os.fork()
    if child:
        return _wait(child) != 0
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    code = 3
    try:
        import pytest

        sys.meta_path[:0] = [] if guard is None else [Finder(guard)]
        code = int(pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *tests_of(module)]))
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def report(chosen: Sequence[Guard]) -> Iterator[str]:
    """One line for each guard: `red` or `GREEN`, where it is, and what it says."""
    import tests.passes.helpers  # noqa: F401  # what takes long to import, once for all

    assert not any(name.startswith("tsopt.passes") for name in sys.modules)
    for guard in chosen:
        yield f"{'red' if is_red(guard.module, guard) else 'GREEN'} {guard.module}:{guard.line} {guard.key}"


def main(numbers: Sequence[int]) -> None:
    guards = all_guards()
    for number, guard in enumerate(() if numbers else guards):
        sys.stdout.write(f"{number} {guard.module}:{guard.line} {guard.key}\n")
    for line in report([guards[number] for number in numbers]) if numbers else ():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
