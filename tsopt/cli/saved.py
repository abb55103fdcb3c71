"""Saves the result of a command as a file, in the format that the suffix selects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tsopt.cli.export import check_place
from tsopt.errors import UsageError

Writers = Mapping[str, Callable[[Any], str | bytes]]  # by suffix


PAGE: Writers = {".html": lambda result: result.html}  # of what `--html` saves


def check_saved(option: str, path: Path | None, writers: Writers) -> None:
    """Raises UsageError or BundleError for a file that cannot be written, before hours of work."""
    if path is None:
        return
    if path.suffix not in writers:
        raise UsageError(f"{option} {path} has an unknown suffix", fix=f"use one of the suffixes {', '.join(writers)}")
    check_place(option, path)


def save(result: Any, path: Path, writers: Writers) -> None:
    """Writes a result in the format of the suffix; the file is complete or not written at all."""
    from tsopt.runtime.bundles.staging import staged

    with staged(path, unpack=True) as directory:
        made = writers[path.suffix](result)
        (directory / path.name).write_bytes(made.encode() if isinstance(made, str) else made)
