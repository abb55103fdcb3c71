"""What `tsopt export` writes, and where. Each file is complete or not there."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tsopt.cli.model_file import split_spec
from tsopt.errors import BundleError, UsageError
from tsopt.runtime.backends.table import BACKENDS
from tsopt.runtime.bundles.members import MANIFEST
from tsopt.runtime.bundles.staging import staged
from tsopt.runtime.bundles.store import check_target

SUFFIX = {"tsopt": ".tsopt", "onnx": ".onnx", "torchscript": ".ts"}
BACKEND = {info.exports: info.name for info in BACKENDS.values() if info.exports}  # by format


def targets(model: str, formats: list[str], output: Path | None) -> dict[str, Path]:
    """Path for each format, checked before hours of work rather than after.

    Raises:
        UsageError, BundleError: a path cannot be written or is something else.
    """
    try:
        places = _places(model, formats, output)
        for kind, path in places.items():
            check_place(kind, path)
    except OSError as error:  # a name or a path that is too long for the system
        raise _unwritable(output or Path(), str(error.strerror)) from error
    return places


@contextmanager
def directories(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """The directories of these paths that are not there yet; those that were made go again when the block fails."""
    new = [parent for path in paths for parent in path.parents if not parent.exists()]
    new = sorted(dict.fromkeys(new), key=lambda parent: len(parent.parts))
    try:
        yield new
    except BaseException:
        for parent in reversed(new):
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def check_formats(formats: list[str], opset: int | None) -> None:
    """Raises UsageError for an opset that nobody can write, before the work."""
    if "onnx" in formats:
        from tsopt.runtime.onnx.export import check_opset

        check_opset(opset)


def _places(model: str, formats: list[str], output: Path | None) -> dict[str, Path]:
    stem = re.sub(r"[^\w.-]", "_", split_spec(model)[0].stem) or "model"
    bundle = output is not None and _is_bundle(output)
    single = output is not None and (bundle or not output.is_dir()) and len(formats) == 1
    if single and output is not None:
        _check_name(output, formats[0])
        places = {formats[0]: output}
    elif output is not None and len(formats) > 1 and (bundle or (output.suffix in SUFFIX.values())):
        raise UsageError(f"-o {output} is one file, and {len(formats)} formats are asked for", fix="give a directory")
    else:
        places = {kind: (output or Path()) / f"{stem}{SUFFIX[kind]}" for kind in formats}
    if any("\n" in str(path) or str(path) in ("-", "") for path in places.values()):
        raise UsageError("-o is not a usable path", fix="give a file or directory name")
    return places


def _is_bundle(path: Path) -> bool:
    """Whether a directory is, or would be taken for, a bundle: a name that ends so is never a place for others."""
    return path.is_dir() and (path.suffix == SUFFIX["tsopt"] or (path / MANIFEST).is_file())


def _check_name(path: Path, kind: str) -> None:
    """Raises UsageError for the suffix of another format than the one that is written."""
    other = next((name for name, suffix in SUFFIX.items() if suffix == path.suffix), kind)
    if other != kind:
        raise UsageError(
            f"-o {path} has the name of another format: what is written is {kind}",
            fix=f"--format {other}, or -o {path.with_suffix(SUFFIX[kind])}",
        )


def check_place(kind: str, path: Path) -> None:
    """Raises BundleError where no file, or for the kind `tsopt` no bundle, can be written."""
    _check_parent(path)
    inside = next((parent for parent in path.parents if _is_bundle(parent)), None)
    if inside is not None:
        raise BundleError(
            "the output is inside a bundle, which another file would damage",
            where=str(path),
            fix=f"choose a place outside {inside}",
        )
    if kind == "tsopt":
        check_target(path)
    elif path.is_dir():
        raise BundleError("the output is a directory", where=str(path), fix="give a file name")
    elif path.is_symlink() or (path.exists() and not path.is_file()):
        what = "a link" if path.is_symlink() else "not a regular file"
        raise BundleError(f"the output is {what}", where=str(path), fix="give the name of a file")


def _check_parent(path: Path) -> None:
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise _unwritable(path, f"{parent} is not a directory that you may write to")
    (parent / f".{path.name}.12345678.old").exists()  # the longest name while it is written: OSError if it is too long


def _unwritable(path: Path, why: str) -> BundleError:
    return BundleError("the output cannot be written", where=str(path), why=why, fix="choose another place (-o)")


def write(fast: Any, kind: str, path: Path, opset: int | None) -> None:
    """Writes one format of an Optimized."""
    if kind == "tsopt":
        fast.save(path)
        return
    # What is in the file need not be what has raced: the .onnx holds standard operators alone, at the opset asked for.
    options = {"fused": False, "opset": opset} if kind == "onnx" else {}
    save = fast.verified(BACKEND[kind], **options).save
    with staged(path, unpack=True) as directory:
        if save is not None:
            save(directory / path.name)
