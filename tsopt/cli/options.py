"""The options of the commands: their names, their checks, and what they are to `optimize`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tsopt.errors import UsageError
from tsopt.runtime.thread_count import MOST


class Format(str, Enum):
    """The formats that `tsopt export` writes."""

    tsopt = "tsopt"
    onnx = "onnx"
    torchscript = "torchscript"


def _seed(value: int) -> int:
    # NOTE: one below torch's limit: verification on fresh inputs uses the next seed.
    if not -(1 << 63) <= value < 1 << 63:
        raise UsageError(
            f"--seed {value} is out of range", why="a seed is a 64-bit integer", fix="use a number from 0 to 2**63 - 1"
        )
    return value


def _seconds(value: float) -> float:
    if not 0 < value < math.inf:
        raise UsageError(
            f"--seconds must be positive and finite, got {value:g}", fix="use a number of seconds greater than 0"
        )
    return value


def _bytes(text: str | None) -> int | None:
    """The bytes of `4GB`, `512MiB` or `1000000`."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?|\d{1,18}) ?(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE)
    size = 0
    if found is not None:
        unit = (1024 if found[3] else 1000) ** (" KMGT".index(found[2].upper()) if found[2] else 0)
        size = int(float(found[1]) * unit)
    if size < 1:
        raise UsageError(
            f"--memory {text!r} is not a size", fix="write a number of bytes, or for example 4GB or 512MiB"
        )
    return size


def _fraction(text: str | float) -> float:
    """The number of `0.5%` or `0.005`; a default is one already."""
    if isinstance(text, float):
        return text
    number, percent, rest = text.strip().partition("%")
    try:
        if rest:
            raise ValueError(text)
        return float(number) / (100 if percent else 1)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a fraction", fix="write for example 0.05 or 5%") from error


def _limit(text: str | float) -> float:
    """A fraction below 1, or any percentage: `5` could mean either."""
    found = _fraction(text)
    if isinstance(text, str) and found >= 1 and "%" not in text:
        raise UsageError(
            f"--max-slowdown {text} would be {found:.0%}", fix=f"write {text}% or, for {found:.0%}, {100 * found:g}%"
        )
    return found


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Python file that defines `model`, FILE.py:NAME for another name, timm:NAME, torchvision:NAME, "
        "hf:DIRECTORY, or a .pt2 or TorchScript file.",
    ),
]
Trust = Annotated[bool, typer.Option("--trust", help="Run code that comes with the model's or the bundle's files.")]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input", metavar="NAME:SHAPE:DTYPE", help="Example input, e.g. x:1x3x224x224:f32. Repeat for more than one."
    ),
]
Dynamic = Annotated[
    list[str] | None,
    typer.Option(
        "--dynamic", metavar="NAME:AXIS=DIM", help="Dynamic dimension, e.g. x:0=batch[1..32]. Repeat for more than one."
    ),
]
Frontend = Annotated[
    str,
    typer.Option(
        "--frontend",
        metavar="NAME",
        help="How to capture the model: auto, one-graph, export, strict, fx, torchscript or parts.",
    ),
]
Level = Annotated[
    int,
    typer.Option(
        "-O",
        metavar="LEVEL",
        help="0: no passes; 1: bit-exact passes; 2: also passes that round differently; 3: also lower precisions.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=MOST, help="Number of intra-op threads; torch's own by default."),
]
Backends = Annotated[
    str | None,
    typer.Option(
        "--backends",
        "--backend",
        metavar="A,B",
        help="Backends to try, for example onnxruntime?threads=1,onednn, or all.",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="P",
        help="fp32, or bf16, fp16, tf32, int8, int4 or auto to try lower precisions as well; auto "
        "includes int8 only with --calibration, and never int4.",
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="DATA",
        help="Real inputs for int8 and int4: an .npz file, a directory of such files, FILE.py:NAME, or how many "
        "to draw.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="Accuracy metric, for lower precisions and in check: sqnr, cosine, top1, or FILE.py:NAME for your own.",
    ),
]
MaxDrop = Annotated[
    float | None,
    typer.Option(
        "--max-drop",
        metavar="X",
        parser=_fraction,
        help="How far the metric may be below that of the model (or baseline), e.g. 0.01 or 1%.",
    ),
]
MaxSlowdown = Annotated[
    float,
    typer.Option(
        "--max-slowdown", metavar="X", parser=_limit, help="How much longer a call may take, e.g. 0.05 or 5%."
    ),
]
KeepFloat = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-float", metavar="PATTERN", help="Layers that stay in float32, e.g. 'encoder.layer.3.*'. Repeatable."
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", callback=_seed, help="Random seed for the model file and for generated inputs.")
]
Eval = Annotated[bool, typer.Option("--eval", help="Treat a model in training mode as if it were in eval mode.")]
AllowNan = Annotated[bool, typer.Option("--allow-nan", help="Accept weights that contain NaN.")]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="RULE", help="Leave out a rule or pass. Repeat for more than one."),
]
Seconds = Annotated[float, typer.Option("--seconds", callback=_seconds, help="Time limit for timing, in seconds.")]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="SECONDS",
        help="Time limit for all candidates together, and for quantization; none by default.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory for all candidates together, for example 4GB; most of what is free by default.",
    ),
]
BestSoFar = Annotated[
    bool, typer.Option("--best-so-far", help="On Ctrl-C during timing, keep the best candidate so far.")
]
Isolate = Annotated[bool, typer.Option("--isolate/--no-isolate", help="Run each candidate in a separate process.")]
UseCache = Annotated[
    bool, typer.Option("--cache/--no-cache", help="Reuse the results of earlier races on this machine.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also save a page for a browser, complete in one file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors.")]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, how to capture it, and which rewrites to apply."""

    model: Model
    input: Input = None
    dynamic: Dynamic = None
    frontend: Frontend = "auto"
    level: Level = 2
    seed: Seed = 0
    eval: Eval = False
    allow_nan: AllowNan = False
    without: Without = None
    trust: Trust = False


@dataclass(frozen=True, slots=True)
class Timing:
    """Which candidates to race, and for how long."""

    backends: Backends = None
    precision: Precision = None
    calibration: Calibration = None
    metric: Metric = None
    max_drop: MaxDrop = None
    keep_float: KeepFloat = None
    seconds: Seconds = 10.0
    budget: Budget = None
    memory: Memory = None
    best_so_far: BestSoFar = False
    isolate: Isolate = True


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Flattens a command's groups of options into separate options, as typer expects them."""
    own = _options_of(command)
    groups = {option.name: _options_of(option.annotation) for option in own if is_dataclass(option.annotation)}
    options = [part.replace(kind=Parameter.KEYWORD_ONLY) for item in own for part in groups.get(item.name, [item])]

    def run(**given: Any) -> None:
        for item in own:
            if item.name in groups:
                given[item.name] = item.annotation(**{part.name: given.pop(part.name) for part in groups[item.name]})
        command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    return run


def _options_of(called: Any) -> list[Parameter]:
    hints = get_type_hints(called, include_extras=True)
    return [option.replace(annotation=hints[option.name]) for option in signature(called).parameters.values()]


def check_needs(needed: str, options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that was given although it says nothing without another one.

    Args:
        needed: the other one, which was not given.
        options: values of options by name.
    """
    for option, value in options.items():
        if value:
            raise UsageError(f"{option} needs {needed}", fix=f"pass {needed} as well, or leave out {option}")


def check_beside(option: str, others: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that says nothing beside another one that was given.

    Args:
        others: values of options by name.
    """
    for other, value in others.items():
        if value:
            raise UsageError(f"{option} has no effect beside {other}", fix=f"leave out {option}, or {other}")


def read_sizes(texts: Sequence[str]) -> dict[str, dict[int, str]]:
    """Parses `x:0=batch[1..32]`, one text per axis, into what `optimize` and `capture` accept.

    Raises:
        UsageError: a text does not have this form.
    """
    found: dict[str, dict[int, str]] = {}
    for text in texts:
        place, equals, name = text.partition("=")
        item, colon, axis = place.rpartition(":")
        if not equals or not colon or not item or not re.fullmatch(r"-?[0-9]{1,9}", axis):
            raise UsageError(
                f"--dynamic {text!r} is not of the form NAME:AXIS=DIM",
                fix="write --dynamic x:0=batch, or --dynamic 'x:0=batch[1..32]'",
            )
        axes = found.setdefault(item.strip(), {})
        if int(axis) in axes:
            raise UsageError(f"--dynamic {item}:{axis} was given twice", fix="name each axis once")
        axes[int(axis)] = name
    return found


def capture_options(subject: Subject) -> dict[str, Any]:
    """The options of `capture` and `optimize` that all commands share."""
    return {
        "dynamic": read_sizes(subject.dynamic) if subject.dynamic else None,
        "frontend": "auto" if subject.frontend == "one-graph" else subject.frontend,
        "eval_mode": subject.eval,
        "allow_nan": subject.allow_nan,
    }


def race_options(subject: Subject, timing: Timing) -> dict[str, Any]:
    """The options of `optimize` that commands share."""
    from tsopt.cli.bench import words

    asked = words(timing.backends, "--backends")
    chosen: dict[str, Any] = {"backends": "all" if asked == ["all"] else asked} if asked else {}
    return {
        **chosen,
        **capture_options(subject),
        "frontend": subject.frontend,  # `optimize` also knows those that decide what follows a failed capture
        "precision": timing.precision,
        "max_drop": timing.max_drop,
        "keep_float": timing.keep_float or (),
        "level": subject.level,
        "seed": subject.seed,
        "without": subject.without or (),
        "seconds": timing.seconds,
        "budget": timing.budget,
        "memory": _bytes(timing.memory),
        "best_so_far": timing.best_so_far,
        "isolate": timing.isolate,
    }
