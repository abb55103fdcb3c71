"""Every sentence that a user can meet, in one golden file: to be read as a whole when the wording changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "tsopt"
SENTENCE = re.compile(r"[A-Za-z]{2,}[,:;]? [A-Za-z(`{]|[A-Za-z`}] [A-Za-z]{2,}")
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_all_messages_are_as_they_were_read(golden):
    """NOTE: read what `pytest --update-golden` has written: a sentence is for somebody who has not read the code."""
    parts = []
    for path in sorted(ROOT.rglob("*.py")):
        found = list(dict.fromkeys(sentences(ast.parse(path.read_text()))))
        if found:
            parts += [f"# {path.relative_to(ROOT)}", *found, ""]
    golden("messages", "\n".join(parts))


def sentences(tree: ast.AST) -> Iterator[str]:
    """What reads as words in the string literals of a file, where they stand; docstrings and code are left out."""
    documentation = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, SCOPES) and _documented(node)
    }
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    literals = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        if id(node) not in documentation
        if isinstance(node, ast.JoinedStr) or id(node) not in inner
    ]
    for node in sorted(literals, key=lambda node: (node.lineno, node.col_offset)):
        text = "".join(map(_text, node.values)) if isinstance(node, ast.JoinedStr) else node.value
        line = " ".join(text.split())
        if SENTENCE.search(line) and not _is_code(text):
            yield line


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _text(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return "{" + ast.unparse(part.value) + "}"
    return part.value if isinstance(part, ast.Constant) else ""


def _is_code(text: str) -> bool:
    try:
        ast.parse(text.strip())
    except SyntaxError:
        return text.lstrip().startswith(("def ", "class ", "@", "for ", "with ", "if ")) and text.rstrip().endswith(":")
    return True


def test_what_counts_as_a_sentence():
    source = (
        '"""Not this."""\nraise Error(f"no {x!r} here", fix="pass one")\ncode, name, rule = "def f(x):", "abc", "a = b"'
    )
    assert list(sentences(ast.parse(source))) == ["no {x} here", "pass one"]
