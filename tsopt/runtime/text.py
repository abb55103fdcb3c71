"""Text that others have made, such as names in a model or a file, for a terminal and for tables. Imports no torch."""

from __future__ import annotations


def printable(text: str) -> str:
    """Without control characters and what turns the direction of writing: no name may drive a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def markdown_cell(text: str) -> str:
    """In one cell of a table, whatever it holds."""
    return printable(text).replace("|", "\\|").replace("\n", " ").replace("\t", " ")
