"""What `tsopt export` and `tsopt quantize` do: optimize a model and write the winner.

Each file is complete or not written at all.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tsopt.cli import process
from tsopt.cli.model_file import load_data
from tsopt.cli.model_sources import load_subject, stem_of
from tsopt.cli.options import Subject, Timing, race_options
from tsopt.errors import BundleError, UsageError
from tsopt.runtime.backends.table import BACKENDS
from tsopt.runtime.bundles.members import MANIFEST
from tsopt.runtime.bundles.staging import longest_name, staged
from tsopt.runtime.bundles.store import check_target
from tsopt.runtime.onnx.onnx_model import BESIDE

if TYPE_CHECKING:
    from tsopt.compiler.calls.signature import Signature
    from tsopt.runtime.report import Report

SUFFIX = {"tsopt": ".tsopt", "onnx": ".onnx", "torchscript": ".ts"}
SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))
BACKEND = {info.exports: info.name for info in BACKENDS.values() if info.exports}  # by format


def run(
    out: Any,
    subject: Subject,
    timing: Timing,
    places: dict[str, Path],
    *,
    threads: int | None,
    cache: bool,
    opset: int | None = None,
    saved: Mapping[str, Path | None] = MappingProxyType({}),
    layer_times: bool = False,
) -> Report:
    """Optimizes a model, writes the winner, and shows the report.

    Args:
        places: the path for each format.
        saved: where the report is also saved, by what it is called there.
        layer_times: time each layer in float32 and in int8, if int8 wins.
    """
    from tsopt.cli.quantize import WRITERS
    from tsopt.cli.saved import save

    options, remarks = race_options(subject, timing), list[str]()
    reports = {kind: path for kind, path in saved.items() if path is not None}
    with directories([*places.values(), *reports.values()]) as new, out.progress(Path(subject.model).name) as tell:
        options |= {"threads": threads, "cache": cache, "progress": tell}
        fast = optimized_as_one_graph(out, subject, timing, options)
        if layer_times and fast.quantized is not None:
            tell("profile")
            fast.profile()
        replaced = [path for path in (*places.values(), *reports.values()) if path.exists()]
        beside = [_weights_beside(path) for kind, path in places.items() if kind == "onnx"]
        earlier = {path: path.stat().st_ino for path in beside if path.exists()}
        for path in reports.values():  # first: what was measured is worth keeping, whatever becomes of the formats
            save(fast.report, path, WRITERS)
            process.State.written += (str(path),)
        compiled = {}  # all of them before the first is written: one may be impossible
        for kind in places:
            if kind in BACKEND:
                tell(f"compile for {kind}")
                compiled[kind] = _compiled(fast, kind, opset)
        for kind, path in places.items():
            tell(f"write {path}")
            remarks.append(_write(fast, compiled.get(kind), path))
            process.State.written += (str(path),)
        replaced += [path for path, number in earlier.items() if path.stat().st_ino != number]
    made = fast.report.with_files((kind, str(path)) for kind, path in (places | reports).items())
    out.report(made)
    for directory in new:
        out.say(f"created the directory {directory}")
    for path in replaced:
        out.say(f"replaced the earlier {path}")
    for remark in filter(None, remarks):
        out.note(remark)
    return made


def optimized_as_one_graph(
    out: Any,
    subject: Subject,
    timing: Timing,
    options: dict[str, Any],
    check: Callable[[Any], None] = lambda example_input: None,
) -> Any:
    """The optimized model of a command whose result holds one graph.

    Args:
        options: of `optimize`, with `progress`.
        check: raises an error for an example that the command cannot work on.

    Raises:
        GraphBreakError: the model is more than one graph.
    """
    options["progress"]("import torch")
    loaded = load_subject(out, subject)
    from tsopt.api import optimize

    check(loaded.example_input)
    one_graph = {"frontend": "one-graph"} if subject.frontend == "auto" else {}
    return optimize(loaded.model, loaded.example_input, **options | load_data(timing, loaded.files) | one_graph)


def check_frontend(subject: Subject) -> None:
    """Raises UsageError for a frontend whose result cannot be saved."""
    if subject.frontend == "parts":
        raise UsageError(
            "a partitioned model cannot be saved", fix="use --frontend auto, or time the model with `tsopt bench`"
        )


def targets(model: str, formats: list[str], given: str | None) -> dict[str, Path]:
    """The path for each format, checked before hours of work.

    Args:
        given: a file or a directory, as on the command line: a directory that is new ends with a separator.

    Raises:
        UsageError, BundleError: a path cannot be written, or names something that must not be replaced.
    """
    output = None if given is None else Path(given)
    try:
        is_new = given is not None and given.endswith(SEPARATORS) and Path(given).suffix != SUFFIX["tsopt"]
        places = _places(model, formats, output, is_new)
        for kind, path in places.items():
            check_place("-o", path, kind)
    except OSError as error:  # a name or a path that is too long for the system
        raise _unwritable("-o", output or Path(), str(error.strerror)) from error
    return places


@contextmanager
def directories(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """The parent directories that do not exist yet; those the block creates are removed again if it fails."""
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
    """Raises UsageError, before any work, for an opset that cannot be written or that no output uses."""
    if opset is not None and "onnx" not in formats:
        raise UsageError(
            f"--opset has no effect on the format {', '.join(formats)}", fix="add --format onnx, or leave out --opset"
        )
    if "onnx" in formats:
        from tsopt.runtime.onnx.export import check_opset

        check_opset(opset)


def _places(model: str, formats: list[str], output: Path | None, is_new: bool) -> dict[str, Path]:
    stem = re.sub(r"[^\w.-]", "_", stem_of(model)) or "model"
    bundle = output is not None and _is_bundle(output)
    single = output is not None and (bundle or not (is_new or output.is_dir())) and len(formats) == 1
    if single and output is not None:
        _check_name(output, formats[0])
        places = {formats[0]: output}
    elif output is not None and len(formats) > 1 and (bundle or (output.suffix in SUFFIX.values())):
        raise UsageError(
            f"-o {output} names one file, but {len(formats)} formats were requested", fix="pass a directory"
        )
    else:
        places = {kind: (output or Path()) / f"{stem}{SUFFIX[kind]}" for kind in formats}
    if any("\n" in str(path) or str(path) in ("-", "") for path in places.values()):
        raise UsageError("-o is not a usable path", fix="pass the name of a file or directory")
    return places


def _is_bundle(path: Path) -> bool:
    """Whether a directory is, or would be taken for, a bundle; other files never go into it."""
    return path.is_dir() and (path.suffix == SUFFIX["tsopt"] or (path / MANIFEST).is_file())


def _check_name(path: Path, kind: str) -> None:
    """Raises UsageError if the suffix belongs to another format."""
    other = next((name for name, suffix in SUFFIX.items() if suffix == path.suffix), kind)
    if other != kind:
        raise UsageError(
            f"-o {path} has the suffix of {other}, but the format is {kind}",
            fix=f"use --format {other}, or -o {path.with_suffix(SUFFIX[kind])}",
        )


def check_place(option: str, path: Path, kind: str = "") -> None:
    """Raises BundleError if a file, or for `tsopt` a bundle, cannot be written there.

    Args:
        option: which names the path.
        kind: a format; empty for any other file.
    """
    _check_parent(option, path)
    inside = next((parent for parent in path.parents if _is_bundle(parent)), None)
    if inside is not None:
        raise BundleError(
            "the output path is inside a bundle",
            where=str(path),
            why="another file would damage the bundle",
            fix=f"choose a path outside {inside}",
        )
    if kind == "tsopt":
        check_target(path)
        return
    _check_file(path, "the output path")
    if kind == "onnx":
        _check_file(_weights_beside(path), "the path for weights that the .onnx file may not hold")


def _check_file(path: Path, what: str) -> None:
    is_other = path.exists() and not path.is_file()
    if path.is_symlink() or is_other:
        kind = "a symbolic link" if path.is_symlink() else "a directory" if path.is_dir() else "not a regular file"
        raise BundleError(f"{what} is {kind}", where=str(path), fix="pass the name of another file")


def _weights_beside(path: Path) -> Path:
    """The file of weights that an .onnx file refers to, if it cannot hold them."""
    return path.with_name(f"{path.name}{BESIDE}")


def _check_parent(option: str, path: Path) -> None:
    parent = path.parent
    try:
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise _unwritable(option, path, f"{parent} is not a writable directory")
        with contextlib.suppress(FileNotFoundError):
            (parent / longest_name(path)).lstat()  # OSError for a name that would be too long while it is written
    except OSError as error:
        raise _unwritable(option, path, str(error.strerror)) from error


def _unwritable(option: str, path: Path, why: str) -> BundleError:
    return BundleError(
        "the output cannot be written", where=str(path), why=why, fix=f"choose another path with {option}"
    )


def _compiled(fast: Any, kind: str, opset: int | None) -> Any:
    """The program of an Optimized in a format other than its own, verified."""
    # The file may differ from what was raced: the .onnx has standard operators only, at the requested opset.
    options = {"fused": False, "opset": opset} if kind == "onnx" else {}
    return fast.verified(BACKEND[kind], **options)


def _write(fast: Any, executable: Any, path: Path) -> str:
    """Writes one format of an Optimized: a bundle if there is no executable. Returns notes for the user."""
    if executable is None:
        fast.save(path)
        return ""
    with staged(path, unpack=True) as directory:
        if executable.save is not None:
            executable.save(directory / path.name)
    return _state_of(path, executable.signature)


def _state_of(path: Path, signature: Signature) -> str:
    """Explains how a file without state takes and returns what the model writes; empty if it writes nothing."""
    if not signature.writes:
        return ""
    names = ", ".join(str(item.writes) for item in signature.writes)
    kept = ", ".join(item.name for item in signature.state_inputs)
    said = (
        f"{path}: a call of the model writes {names}; the new values are the first outputs of the file, in this order"
    )
    return f"{said}. It does not store {kept}: pass the present values behind the model's own inputs" if kept else said
