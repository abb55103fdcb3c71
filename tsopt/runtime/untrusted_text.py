"""Makes untrusted text, such as names in a model or a file, safe for a terminal and for tables. Imports no torch."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text without control and bidirectional characters, so that no name can control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def on_one_line(text: str) -> str:
    """The same on one line, so that no message can pose as another line of a report."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def markdown_cell(text: str) -> str:
    """The text for one cell of a markdown table."""
    return on_one_line(text).replace("|", "\\|")
