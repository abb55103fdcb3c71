"""What `tsopt export` writes, and where. Each file is complete or not there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tsopt.cli.model_file import split_spec
from tsopt.errors import ArtifactError, UsageError
from tsopt.runtime.artifact import check_target
from tsopt.runtime.staging import staged

SUFFIX = {"tsopt": ".tsopt", "onnx": ".onnx", "torchscript": ".ts"}
BACKEND = {"onnx": "onnxruntime", "torchscript": "torchscript"}


def targets(model: str, formats: list[str], output: Path | None) -> dict[str, Path]:
    """Path for each format, checked before hours of work rather than after.

    Raises:
        UsageError, ArtifactError: a path cannot be written or is something else.
    """
    try:
        places = _places(model, formats, output)
        for kind, path in places.items():
            check_place(kind, path)
    except OSError as error:  # a name or a path that is too long for the system
        raise _unwritable(output or Path(), str(error.strerror)) from error
    return places


def check_formats(formats: list[str], opset: int | None) -> None:
    """Raises UsageError for an opset that nobody can write, before the work."""
    if "onnx" in formats:
        from tsopt.runtime.onnx_export import check_opset

        check_opset(opset)


def _places(model: str, formats: list[str], output: Path | None) -> dict[str, Path]:
    stem = re.sub(r"[^\w.-]", "_", split_spec(model)[0].stem) or "model"
    single = output is not None and not output.is_dir() and len(formats) == 1
    if single and output is not None:
        places = {formats[0]: output}
    elif output is not None and output.suffix in SUFFIX.values() and len(formats) > 1:
        raise UsageError(f"-o {output} is one file, and {len(formats)} formats are asked for", fix="give a directory")
    else:
        places = {kind: (output or Path()) / f"{stem}{SUFFIX[kind]}" for kind in formats}
    if any("\n" in str(path) or str(path) in ("-", "") for path in places.values()):
        raise UsageError("-o is not a usable path", fix="give a file or directory name")
    return places


def check_place(kind: str, path: Path) -> None:
    """Raises ArtifactError where no file, or for the kind `tsopt` no bundle, can be written."""
    _check_parent(path)
    if kind == "tsopt":
        check_target(path)
    elif path.is_dir():
        raise ArtifactError("the output is a directory", where=str(path), fix="give a file name")


def _check_parent(path: Path) -> None:
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise _unwritable(path, f"{parent} is not a directory that you may write to")
    (parent / f".{path.name}.12345678.old").exists()  # the longest name while it is written: OSError if it is too long


def _unwritable(path: Path, why: str) -> ArtifactError:
    return ArtifactError("the output cannot be written", where=str(path), why=why, fix="choose another place (-o)")


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
