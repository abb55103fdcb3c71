"""Models that are in no Python file: of timm and torchvision, in a directory of transformers, exported or scripted.

The example input that is made for one is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from sys import stderr
from typing import Any

from tsopt.cli.library_models import CONFIG, Made, timm_model, torchvision_model, transformers_model
from tsopt.cli.model_file import Files, ModelFile, check_inputs, load_model_file, parse_inputs, split_spec
from tsopt.cli.options import Subject
from tsopt.errors import UsageError, summary_of

GIVE_INPUT = "pass --input, for example --input 1x3x224x224"


def load_subject(out: Any, subject: Subject) -> ModelFile:
    """The model of a command, and its example input; see `load_model`."""
    return load_model(subject.model, subject.input or [], subject.seed, trust=subject.trust, note=out.note)


def load_model(
    spec: str,
    inputs: list[str],
    seed: int,
    *,
    trust: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> ModelFile:
    """The model that the command line names, and its example input.

    Args:
        spec: `model.py`, `model.py:name`, `timm:NAME`, `torchvision:NAME`, `hf:DIRECTORY`, or a .pt2 or TorchScript
            file.
        inputs: `--input` values, which replace the example input.
        seed: of random weights and inputs.
        trust: run code that comes with the model.
        note: called with what was made up.

    Raises:
        UsageError: the model does not exist, its library is missing, it comes with code that is not trusted, or its
            inputs are unknown.
    """
    make, rest = _source(spec)
    if make is None:
        return load_model_file(spec, inputs, seed)
    from tsopt.compiler.random_state import seed_all

    seed_all(seed)
    with redirect_stdout(stderr):
        made = make(rest, trust)
    example = made.example
    if inputs:
        example = parse_inputs(inputs, seed)
        check_inputs(made.model, example)
    elif example is None:
        raise UsageError(f"{spec} does not say how it is called", fix=GIVE_INPUT)
    else:
        _try(spec, made.model, example)
        note(f"{spec}: {made.weights}, example input {_said(example)}")
    return ModelFile(Path(rest), made.model, example, Files(seed))


def _try(spec: str, model: Callable[..., Any], example: Any) -> None:
    """Raises UsageError if the model does not take the example that was made for it. What it writes is put back."""
    import torch

    from tsopt.compiler.calls.example import as_example
    from tsopt.compiler.capture.export_errors import unflatten_clones
    from tsopt.compiler.protect import protected

    run: Any = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    args, kwargs = unflatten_clones(as_example(example))
    try:
        with protected(run):
            run(*args, **kwargs)
    except Exception as error:  # a model may raise anything
        raise UsageError(
            f"{spec} does not run on an example input made from its configuration, {_said(example)}",
            why=summary_of(error),
            fix=GIVE_INPUT,
        ) from error


def stem_of(spec: str) -> str:
    """What files for a model are named after."""
    make, rest = _source(spec)
    if make is None:
        return split_spec(spec)[0].stem
    return Path(rest).stem if Path(rest).suffix in FILES else Path(rest).name


def path_of(spec: str) -> Path | None:
    """The file that a model is read from; None for one that is made by name."""
    make, rest = _source(spec)
    if make is None:
        return split_spec(spec)[0]
    if make is transformers_model:
        return Path(rest) / CONFIG
    return None if make in BY_NAME.values() else Path(rest)


def _source(spec: str) -> tuple[Callable[[str, bool], Made] | None, str]:
    """What makes a model, and from what; None for a Python file."""
    kind, _, rest = spec.partition(":")
    if kind in BY_NAME and rest:
        return BY_NAME[kind], rest
    return FILES.get(Path(spec).suffix), spec


def _exported(text: str, trust: bool) -> Made:
    import torch

    path = _trusted(text, trust, "an exported program")
    try:
        program = torch.export.load(path)
    except Exception as error:  # the file decides what goes wrong
        raise _unreadable(path, "a program that torch.export.save has written", error) from error
    args, kwargs = program.example_inputs or ((), {})
    return Made(program, _as_call(args, kwargs), "its own weights")


def _scripted(text: str, trust: bool) -> Made:
    import torch

    path = _trusted(text, trust, "TorchScript")
    try:
        return Made(torch.jit.load(str(path), map_location="cpu").eval(), None, "its own weights")
    except Exception as error:  # the file decides what goes wrong
        raise _unreadable(path, "a TorchScript module", error) from error


def _as_call(args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    from tsopt.compiler.calls.example import Example

    made = tuple(args)
    return Example(made, dict(kwargs)) if made or kwargs else None


def _trusted(text: str, trust: bool, what: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"no such file: {path}", where=str(path.parent.resolve()), fix="check the path")
    if not trust:
        raise UsageError(
            f"{path} is {what}, which can hold code",
            why="loading the file, or calling the model, can execute it",
            fix="if you trust its source, pass --trust",
        )
    return path


def _unreadable(path: Path, what: str, error: Exception) -> UsageError:
    why = summary_of(error)
    return UsageError(f"{path} is not {what}", why=why, fix="define the model in a Python file, and pass that")


def _said(example: Any) -> str:
    """The inputs of an example, as `--input` takes them."""
    from tsopt.compiler.calls.example import as_example
    from tsopt.compiler.calls.structure import flatten
    from tsopt.compiler.calls.types import SHORT

    made = as_example(example)
    named = {f"{number}": value for number, value in enumerate(made.args)} | made.kwargs
    said = []
    for name, value in named.items():
        for leaf in flatten((value,))[0]:
            dtype = str(leaf.dtype).removeprefix("torch.")
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            said.append(f"{name}:" * (not name.isdecimal()) + f"{shape}:{SHORT.get(dtype, dtype)}")
    return " ".join(said)


BY_NAME = {"timm": timm_model, "torchvision": torchvision_model, "hf": transformers_model}
FILES = {".pt2": _exported, **dict.fromkeys((".pt", ".pth", ".ts", ".jit", ".torchscript"), _scripted)}
