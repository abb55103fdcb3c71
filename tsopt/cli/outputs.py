"""Checks that the outputs of a command overwrite neither each other nor what the command reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from tsopt.cli.library_models import CONFIG
from tsopt.cli.model_file import split_spec
from tsopt.cli.model_sources import path_of
from tsopt.cli.options import Subject, Timing
from tsopt.errors import UsageError

UNREAD = (".html", ".md", ".onnx", ".ts")  # of which transformers loads nothing


def check_outputs(
    subject: Subject,
    timing: Timing | None,
    *,
    places: Iterable[Path] = (),
    saved: Mapping[str, Path | None],
    read: Mapping[str, Path] | None = None,
) -> None:
    """Checks the outputs of a command before any work is done.

    Args:
        places: of the files that the command is about.
        saved: of what it also saves, by option.
        read: what it reads beside the model and its data, by option.

    Raises:
        UsageError: two outputs are one file, or one lies inside another, or an output replaces what the command reads
            or may read.
    """
    written = [("-o", path) for path in places] + [(name, path) for name, path in saved.items() if path is not None]
    inputs = _inputs(subject, timing) | {name: path.resolve() for name, path in (read or {}).items()}
    for option, path in written:
        for name, other in inputs.items():
            if path.resolve() == other:
                raise UsageError(
                    f"{option} {path} is {name}, which the command reads",
                    why="it would be overwritten",
                    fix=f"choose another name with {option}",
                )
    directory = _directory(subject)
    for option, path in written:
        if directory in path.resolve().parents and path.is_file() and path.suffix not in UNREAD:
            raise UsageError(
                f"{option} {path} would replace a file in the directory of the model",
                why="the command may read it",
                fix=f"choose another name with {option}, or remove the file first",
            )
    for (first, path), (second, other) in itertools.permutations(written, 2):
        here, there = path.resolve(), other.resolve()
        if here == there or here in there.parents:
            raise UsageError(
                f"{second} {other} is {'also' if here == there else 'inside of'} {first} {path}",
                why="one of them would damage the other",
                fix="choose different names",
            )


def _inputs(subject: Subject, timing: Timing | None) -> dict[str, Path]:
    """The files that a command reads, by their role."""
    given = {} if timing is None else {"calibration": timing.calibration, "metric": timing.metric}
    specs = {f"the file of --{name}": split_spec(spec)[0] for name, spec in given.items() if spec is not None}
    model = path_of(subject.model)
    return {name: path.resolve() for name, path in (({"the model": model} if model else {}) | specs).items()}


def _directory(subject: Subject) -> Path | None:
    """The directory that a model of transformers is read from."""
    model = path_of(subject.model)
    return model.parent.resolve() if model is not None and model.name == CONFIG else None
