"""Runs the user's `model.py[:name]` and finds the model and its example input in it."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from tsopt.cli import beside
from tsopt.errors import UsageError

NAMES = ("example_input", "example_inputs")


class Files:
    """The Python files that a command names. Each runs once: a metric has to see the model that is optimized.

    Args:
        seed: set before each of them runs.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._modules: dict[Path, Any] = {}

    def module(self, path: Path) -> Any:
        """What the file defines. Anything it prints goes to stderr; stdout is for the result."""
        from tsopt.compiler.random_state import seed_all

        place = path.resolve()
        if place not in self._modules:
            seed_all(self._seed)
            self._modules[place] = _execute(path, {module.__name__ for module in self._modules.values()})
        return self._modules[place]


@dataclass(frozen=True)
class ModelFile:
    """A model file: the model and its example input, and the files that have run by then."""

    path: Path
    model: Callable[..., Any]
    example_input: Any
    files: Files = field(default_factory=lambda: Files(0))


def load_model_file(spec: str, inputs: list[str], seed: int) -> ModelFile:
    """Executes the file and picks the model.

    Args:
        spec: `path.py`, `path.py:name`; the name is a model, or a class or function that makes one.
        inputs: `--input` values, which replace the file's `example_input`.
        seed: set before the file runs, and used to generate the `--input` values.

    Raises:
        UsageError: no such file or name, the file raises, or it has no example input.
    """
    path, name = _existing(spec)
    files = Files(seed)
    module = files.module(path)
    model = _model(module, path, name)
    if inputs:
        made = parse_inputs(inputs, seed)
        check_inputs(model, made)
        return ModelFile(path, model, made, files)
    for candidate in NAMES:
        if hasattr(module, candidate):
            value = getattr(module, candidate)
            is_maker = callable(value) and not hasattr(value, "__dlpack__")
            return ModelFile(path, model, _call(value, path, candidate) if is_maker else value, files)
    raise UsageError(
        f"{path.name} defines no example_input",
        where=str(path),
        why="capture needs an example of how the model is called",
        fix="add a line like `example_input = torch.randn(1, 3, 224, 224)`, or pass --input x:1x3x224x224:f32",
    )


def load_data(timing: Any, files: Files) -> dict[str, Any]:
    """`--calibration` and `--metric` as `optimize` takes them.

    Args:
        files: those that have run for the model.

    Raises:
        UsageError: no such file or name, or the file raises.
    """
    calibration, metric = timing.calibration, timing.metric
    if calibration is not None:
        is_count = calibration.isdecimal()
        calibration = int(calibration) if is_count else _named(files, calibration, "--calibration", calibration)
    if metric is not None:
        metric = _named(files, metric, "--metric", metric)
    return {"calibration": calibration, "metric": metric}


def _named(files: Files, spec: str, option: str, otherwise: Any) -> Any:
    """The object that `FILE.py:NAME` refers to; `otherwise` for any other text. A function is called for its data."""
    path, name = split_spec(spec)
    if path.suffix != ".py":
        return otherwise
    if not name:
        raise UsageError(f"{option} {spec} names a file but no object in it", fix=f"write {option} {path}:NAME")
    _existing(spec)
    found = getattr(files.module(path), name, None)
    if found is None:
        raise UsageError(f"{path.name} defines no {name!r}", where=str(path), fix=f"check the name in {option}")
    makes = option == "--calibration" and callable(found) and not hasattr(found, "__iter__")
    return _call(found, path, name) if makes else found


def split_spec(spec: str) -> tuple[Path, str]:
    """`path.py:name` in two; the name is empty if there is none."""
    text, _, name = spec.rpartition(":")
    if not text or name.endswith(".py") or "/" in name:
        return Path(spec), ""
    return Path(text), name


def _existing(spec: str) -> tuple[Path, str]:
    path, name = split_spec(spec)
    try:
        if path.is_dir():
            raise UsageError(
                f"{path} is a directory", fix="pass a Python file that defines `model` and `example_input`"
            )
        if not path.is_file():
            raise _missing(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=error.strerror, fix="check the path") from error
    return path, name


def _missing(path: Path) -> UsageError:
    near = [p.name for p in path.parent.glob("*.py")][:5] if path.parent.is_dir() else []
    return UsageError(
        f"no such file: {path}",
        where=str(path.parent.resolve()),
        fix=f"use one of the Python files there: {', '.join(sorted(near))}" if near else "check the path",
    )


def _execute(path: Path, taken: set[str]) -> Any:
    # NOTE: not the stem as module name: a `json.py` next to the model would shadow the standard library.
    name = f"tsopt_model_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}"
    while name in taken:  # by a file of the same name in another directory: pickle finds classes by module name
        name += "_"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", fix="pass a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with redirect_stdout(sys.stderr), beside.importable(path):
            spec.loader.exec_module(module)
    except SystemExit as error:
        raise UsageError(
            f"{path.name} exits the process (sys.exit({error.code!r})) when imported",
            where=str(path),
            fix='move script code under `if __name__ == "__main__":`',
        ) from error
    except Exception as error:
        raise UsageError(
            f"{path.name} raises {type(error).__name__}",
            where=_where(error, path),
            why=str(error)[:300] or None,
            fix=f"make sure that `python {path.name}` runs",
        ) from error
    return module


def _where(error: BaseException, path: Path) -> str:
    # In this file or in one that it imports; in neither if it is in a text, which the file has compiled in some line.
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        place = path if Path(error.filename).resolve() == path.resolve() else error.filename
        return f"{place}:{error.lineno}" if error.lineno else str(place)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
    return f"{path}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(path)


def _model(module: Any, path: Path, name: str) -> Callable[..., Any]:
    from torch import nn

    found = getattr(module, name or "model", None)
    if found is None:
        offers = [key for key, value in vars(module).items() if _is_model(value, module)]
        raise UsageError(
            f"{path.name} defines no {name or 'model'!r}",
            where=str(path),
            fix=f"use one of: {', '.join(f'{path.name}:{key}' for key in offers)}" if offers else "add `model = ...`",
        )
    if isinstance(found, type) and issubclass(found, nn.Module):
        found = _call(found, path, name or "model")
    elif callable(found) and not isinstance(found, nn.Module):
        parameters = _parameters(found)
        if not isinstance(found, type) and _takes_any_tensors(parameters):
            found = _made_or_itself(found, path)
        elif parameters is not None and all(map(_is_optional, parameters)):
            found = _call(found, path, name or "model")
    if not callable(found):
        raise UsageError(
            f"{name or 'model'!r} in {path.name} is a {type(found).__name__}, not a model",
            where=str(path),
            fix="make it an nn.Module, a function of tensors, or a function that returns either",
        )
    return found  # type: ignore[no-any-return]


def _is_model(value: Any, module: Any) -> bool:
    from torch import nn

    made_here = getattr(value, "__module__", None) == module.__name__
    return isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module) and made_here)


def _parameters(function: Any) -> list[Parameter] | None:
    """None for objects from C++ that have no signature."""
    try:
        return list(signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _is_optional(item: Parameter) -> bool:
    return item.default is not item.empty or item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD)


def _takes_any_tensors(parameters: list[Parameter] | None) -> bool:
    """Whether a signature is `*args` or `*args, **kwargs`, which tells a model as little as what makes one."""
    kinds = [item.kind for item in parameters or ()]
    return kinds in ([Parameter.VAR_POSITIONAL], [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD])


def _made_or_itself(function: Callable[..., Any], path: Path) -> Any:
    """What a function of `*args` makes without any, if that is a model; otherwise the function is the model.

    It may be one of several tensors, an exported program, or a wrapper without `functools.wraps` around either kind.
    """
    try:
        with redirect_stdout(sys.stderr), beside.importable(path):
            made = function()
    except Exception:  # what a model raises that is not given its inputs
        return function
    return made if callable(made) else function


def _call(maker: Callable[[], Any], path: Path, name: str) -> Any:
    try:
        with redirect_stdout(sys.stderr), beside.importable(path):
            return maker()
    except (Exception, SystemExit) as error:  # `sys.exit()` in a maker must not look like success
        raise UsageError(
            f"{name}() in {path.name} raises {type(error).__name__}",
            where=_where(error, path),
            why=str(error)[:300],
            fix=_how_to_make(name, _parameters(maker) or []),
        ) from error


def _how_to_make(name: str, parameters: list[Parameter]) -> str:
    if not all(map(_is_optional, parameters)):
        return f"give its parameters defaults ({name} is called without arguments), or define `model = {name}(...)`"
    if not parameters:
        return f"make sure that {name}() runs"
    return f"make sure that {name}() runs; if it is the model itself, write its first parameter without a default"


_INPUT = re.compile(r"^(?:(?P<name>[^:]+):)?(?P<shape>scalar|\d+(?:x\d+)*)(?::(?P<dtype>\w+))?$")


def parse_inputs(texts: list[str], seed: int) -> Any:
    """`x:1x3x224x224:f32` -> random tensors; named ones are keyword arguments, the others positional.

    Raises:
        UsageError: wrong syntax, dtype or shape, a repeated name, or only some of them have names.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    made = [_input(text, generator) for text in texts]
    counts = Counter(name for name, _ in made)
    unnamed = counts.pop(None, 0)
    if unnamed:
        if counts:
            raise UsageError("some --input options have names and others do not", fix="name all of them or none")
        return tuple(value for _, value in made)
    for name, count in counts.items():
        if count > 1:
            raise UsageError(f"--input {name} was given {count} times", fix="use each name once")
    return dict(made)


def check_inputs(model: Callable[..., Any], made: Any) -> None:
    """Raises UsageError for `--input` names that the model does not have, missing inputs, or too many of them.

    Args:
        made: the result of `parse_inputs`: a dict of keyword arguments, or a tuple of positional ones.
    """
    try:
        parameters = signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):  # objects from C++ have no signature
        return
    kinds = {name: item.kind for name, item in parameters.items()}
    named = [name for name, kind in kinds.items() if kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    takes_any = len(named) < len(kinds)
    needed = [name for name in named if parameters[name].default is Parameter.empty]
    fix = f"match the parameters of the model: {', '.join(named) or 'none'}"
    if isinstance(made, dict):
        unknown = [name for name in made if name not in named]
        if unknown and Parameter.VAR_KEYWORD not in kinds.values():
            raise UsageError(f"--input {unknown[0]}: the model has no input with that name", fix=fix)
        absent = [name for name in needed if name not in made]
        if absent and not takes_any:
            raise UsageError(f"no --input for {', '.join(absent)}, which the model requires", fix=fix)
    elif not takes_any and not len(needed) <= len(made) <= len(named):
        times = "once" if len(made) == 1 else f"{len(made)} times"
        takes = f"{len(named)} input{'' if len(named) == 1 else 's'}"
        raise UsageError(f"--input was given {times}, but the model takes {takes}", fix=fix)


def _input(text: str, generator: Any) -> tuple[str | None, Any]:
    match = _INPUT.match(text)
    if match is None:
        raise UsageError(f"cannot parse --input {text!r}", fix="write NAME:SHAPE:DTYPE, for example x:1x3x224x224:f32")
    dtype = _dtype(match["dtype"] or "f32", text)
    try:
        shape = () if match["shape"] == "scalar" else tuple(int(n) for n in match["shape"].split("x"))
        return match["name"], _random(shape, dtype, generator)
    except (RuntimeError, TypeError, ValueError) as error:  # torch's errors for sizes that are too large
        raise UsageError(
            f"--input {text}: cannot create a tensor of that shape",
            why=str(error).partition("\n")[0][:200],
            fix="use a smaller shape",
        ) from error


def _dtype(kind: str, text: str) -> Any:
    import torch

    from tsopt.compiler.calls.types import LONG

    dtype = getattr(torch, LONG.get(kind, kind), None)
    if not isinstance(dtype, torch.dtype) or not _can_hold_values(dtype):
        raise UsageError(f"--input {text}: unsupported dtype {kind!r}", fix=f"use one of: {', '.join(LONG)}")
    return dtype


def _can_hold_values(dtype: Any) -> bool:
    import torch

    try:
        torch.zeros(1, device="cpu").to(dtype)
    except RuntimeError:  # quantized and sub-byte dtypes: names without a conversion
        return False
    return True


def _random(shape: tuple[int, ...], dtype: Any, generator: Any) -> Any:
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype)
    # Small enough to be an index into any table; 2 for bool.
    return torch.randint(0, 2, shape, generator=generator, device="cpu").to(dtype)
