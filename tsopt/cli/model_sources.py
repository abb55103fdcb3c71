"""Models that are in no Python file: of timm and torchvision, in a directory of transformers, exported or scripted.

Nothing is downloaded: a model that is made by name has random weights. Its example input is made from what it says of
itself, and tried.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from sys import stderr
from typing import Any

from tsopt.cli.model_file import Files, ModelFile, check_inputs, load_model_file, parse_inputs, split_spec
from tsopt.cli.options import Subject
from tsopt.errors import UsageError

CONFIG = "config.json"
TOKENS = 128  # of an example, unless the model takes fewer
DECODED = 8  # tokens that a decoder behind an encoder is given
SOUND = 16_000  # samples: a second
DETECTED, SEGMENTED, FRAMES = (3, 480, 640), (1, 3, 520, 520), 16
RANDOM = "random weights"
GIVE_INPUT = "pass --input, for example --input 1x3x224x224"


@dataclass(frozen=True, slots=True)
class Made:
    """A model from elsewhere.

    Attributes:
        example: None if its inputs are unknown.
        weights: where they come from.
    """

    model: Callable[..., Any]
    example: Any
    weights: str


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
            why=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}",
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
    if make is _transformers:
        return Path(rest) / CONFIG
    return None if make in BY_NAME.values() else Path(rest)


def _source(spec: str) -> tuple[Callable[[str, bool], Made] | None, str]:
    """What makes a model, and from what; None for a Python file."""
    kind, _, rest = spec.partition(":")
    if kind in BY_NAME and rest:
        return BY_NAME[kind], rest
    return FILES.get(Path(spec).suffix), spec


# ---- libraries ------------------------------------------------------------------------------------------------------


def _timm(name: str, trust: bool) -> Made:
    timm = _library("timm")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    model = _made("timm", name, lambda: timm.create_model(name, pretrained=False))
    size = (getattr(model, "pretrained_cfg", None) or model.default_cfg)["input_size"]
    return Made(model, _normal(1, *size), RANDOM)


def _torchvision(name: str, trust: bool) -> Made:
    models = _library("torchvision.models")
    try:
        builder = models.get_model_builder(name)
    except ValueError as error:
        raise _unknown("torchvision", name, models.list_models()) from error
    backbone = {"weights_backbone": None} if "weights_backbone" in inspect.signature(builder).parameters else {}
    model = _made("torchvision", name, lambda: builder(weights=None, **backbone))
    kind = builder.__module__.removeprefix("torchvision.models.").partition(".")[0]
    if kind == "detection":
        return Made(model, ([_normal(*DETECTED).sigmoid()],), RANDOM)
    if kind == "segmentation":
        return Made(model, _normal(*SEGMENTED), RANDOM)
    weights = getattr(models.get_model_weights(name), "DEFAULT", None)
    cropped = getattr(weights.transforms(), "crop_size", None) if weights is not None else None
    # The size that the model was built for, before that of weights which are not loaded.
    size = getattr(model, "image_size", None) or cropped
    if size is None:
        return Made(model, None, RANDOM)
    sizes = _pair(size)
    return Made(model, _normal(1, 3, *([FRAMES] if kind == "video" else []), *sizes), RANDOM)


def _transformers(text: str, trust: bool) -> Made:
    directory = Path(text)
    if not (directory / CONFIG).is_file():
        raise UsageError(
            f"{directory} holds no {CONFIG}",
            why="hf: takes a directory that save_pretrained has written; nothing is downloaded",
            fix="pass hf:DIRECTORY",
        )
    transformers = _library("transformers")
    try:
        own = dict(json.loads((directory / CONFIG).read_text()))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{directory / CONFIG} is not a JSON object", why=str(error)[:200]) from error
    if "auto_map" in own and not trust:
        raise UsageError(
            f"{directory} comes with Python code of its own",
            why="loading the model would execute it",
            fix="if you trust its source, pass --trust",
        )
    has_weights = any(directory.glob("*.safetensors")) or any(directory.glob("*.bin"))
    if any("/" in str(own.get(key, "")) for key in ("attn_implementation", "_attn_implementation")):
        raise UsageError(f"{directory} asks for attention kernels that would be downloaded", fix="remove the entry")
    has_weights = any(directory.glob("*.safetensors")) or any(directory.glob("*.bin"))
    try:
        model, example = _of_transformers(transformers, directory, own, has_weights, trust)
    except Exception as error:  # the library raises whatever a file breaks
        raise UsageError(
            f"transformers cannot load {directory}", why=f"{type(error).__name__}: {str(error)[:300]}"
        ) from error
    return Made(model, example, str(directory) if has_weights else RANDOM)


def _of_transformers(
    transformers: Any, directory: Path, own: dict[str, Any], has_weights: bool, trust: bool
) -> tuple[Any, dict[str, Any] | None]:
    """A model and its example."""
    options = {"local_files_only": True, "trust_remote_code": trust}
    config = transformers.AutoConfig.from_pretrained(str(directory), **options)
    names = [str(name) for name in getattr(config, "architectures", None) or []]
    known = [getattr(transformers, name, None) for name in names]
    models = [item for item in known if isinstance(item, type) and issubclass(item, transformers.PreTrainedModel)]
    cls: Any = next(iter(models), None)
    if cls is None or "auto_map" in own:  # one of the library's factories, which also knows classes of the directory
        mapped = [name for name in own.get("auto_map", {}) if name.startswith("AutoModel")]
        cls = getattr(transformers, next(iter(mapped), "AutoModel"))
    if has_weights:
        model = cls.from_pretrained(str(directory), **options)
    elif hasattr(cls, "from_config"):
        model = cls.from_config(config, trust_remote_code=trust)
    else:
        model = cls(config)
    return model.eval(), _example_of(model)


def _example_of(model: Any) -> dict[str, Any] | None:
    """Keyword arguments for a model of transformers, by its configuration; None where that does not say enough."""
    config, main = model.config, model.main_input_name
    text = getattr(config, "text_config", None) or config
    vision = getattr(config, "vision_config", None) or config
    takes = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    if main == "input_ids" and hasattr(text, "vocab_size"):
        longest = getattr(text, "max_position_embeddings", None) or TOKENS
        found[main] = _tokens(text, min(TOKENS, int(longest)))
        if "attention_mask" in takes:
            found["attention_mask"] = found[main].new_ones(found[main].shape)
    elif main in ("input_features", "input_values"):
        sound = _sound(config, main)
        if sound is None:
            return None
        found[main] = sound
    if "pixel_values" in takes and hasattr(vision, "image_size") and (found or main == "pixel_values"):
        frames = [vision.num_frames] if hasattr(vision, "num_frames") else []
        found["pixel_values"] = _normal(1, *frames, getattr(vision, "num_channels", 3), *_pair(vision.image_size))
    if found and getattr(config, "is_encoder_decoder", False) and hasattr(text, "vocab_size"):
        found["decoder_input_ids"] = _tokens(text, DECODED)
    # Of the dtype of the weights, which a directory may hold in half precision.
    made = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in found.items()}
    return made or None


def _tokens(config: Any, length: int) -> Any:
    """Token ids; the last one ends the text, where the model has an id for that."""
    import torch

    found = torch.randint(0, int(config.vocab_size), (1, length), device="cpu")
    if isinstance(end := getattr(config, "eos_token_id", None), int) and 0 <= end < int(config.vocab_size):
        found[:, -1] = end
    return found


def _sound(config: Any, main: str) -> Any:
    """Samples or a spectrogram; None where the configuration does not say its size."""
    bins, longest = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if main == "input_features":
        return None if bins is None or longest is None else _normal(1, bins, 2 * longest)
    if bins is not None:
        return _normal(1, config.max_length, bins)
    channels = getattr(config, "audio_channels", None)
    return _normal(1, *([] if channels is None else [channels]), SOUND)


# ---- files ----------------------------------------------------------------------------------------------------------


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
    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return UsageError(f"{path} is not {what}", why=why, fix="define the model in a Python file, and pass that")


# ---- both -----------------------------------------------------------------------------------------------------------


def _library(name: str) -> Any:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise _broken(package, error) from error
        raise UsageError(f"{package} is not installed", fix=f"pip install {package}") from error
    except Exception as error:  # torchvision raises where it was built for another torch
        raise _broken(package, error) from error


def _broken(package: str, error: Exception) -> UsageError:
    return UsageError(
        f"{package} is installed but does not work",
        why=f"{type(error).__name__}: {str(error)[:200]}",
        fix=f"install a {package} that belongs to the installed torch",
    )


def _unknown(library: str, name: str, known: Iterable[str]) -> UsageError:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    fix = f"use one of: {', '.join(f'{library}:{item}' for item in near)}" if near else "check the name"
    return UsageError(f"{library} has no model {name!r}", fix=fix)


def _made(library: str, name: str, make: Callable[[], Any]) -> Any:
    try:
        return make().eval()
    except Exception as error:  # the library raises what it likes, for a tag that it does not know
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise UsageError(f"{library} cannot make {name!r}", why=why, fix="check the name") from error


def _pair(size: Any) -> tuple[int, int]:
    """Height and width, of one number or two."""
    sizes = tuple(size) if isinstance(size, (list, tuple)) else (size,)
    return int(sizes[0]), int(sizes[-1])


def _normal(*sizes: int) -> Any:
    import torch

    return torch.randn(sizes, device="cpu")


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


BY_NAME = {"timm": _timm, "torchvision": _torchvision, "hf": _transformers}
FILES = {".pt2": _exported, **dict.fromkeys((".pt", ".pth", ".ts", ".jit", ".torchscript"), _scripted)}
