"""Models that libraries make by name, and those in a directory of transformers. Nothing is downloaded.

A model that is made by name has random weights. Its example input is made from what it says of itself.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsopt.cli.hub_kernels import check_kernels
from tsopt.errors import UsageError, summary_of

CONFIG = "config.json"
TOKENS = 128  # of an example, unless the model takes fewer
DECODED = 8  # tokens that a decoder behind an encoder is given
SOUND = 16_000  # samples: a second
DETECTED, SEGMENTED, FRAMES = (3, 480, 640), (1, 3, 520, 520), 16
RANDOM = "random weights"


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


def timm_model(name: str, trust: bool) -> Made:
    """A model of timm, for images of the size that it is made for."""
    timm = _library("timm")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    model = _made("timm", name, lambda: timm.create_model(name, pretrained=False))
    size = (getattr(model, "pretrained_cfg", None) or model.default_cfg)["input_size"]
    return Made(model, _normal(1, *size), RANDOM)


def torchvision_model(name: str, trust: bool) -> Made:
    """A model of torchvision. A detector takes a list of images."""
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


def transformers_model(text: str, trust: bool) -> Made:
    """The model in a directory that save_pretrained has written."""
    directory = Path(text)
    if not (directory / CONFIG).is_file():
        raise UsageError(
            f"{directory} holds no {CONFIG}",
            why="hf: takes a directory that save_pretrained has written; nothing is downloaded",
            fix="pass hf:DIRECTORY",
        )
    # NOTE: read when transformers is imported. It also downloads kernels for some models, and for quantized weights.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = _library("transformers")
    try:
        own = dict(json.loads((directory / CONFIG).read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{directory / CONFIG} is not a JSON object", why=str(error)[:200]) from error
    if "auto_map" in own and not trust:
        raise UsageError(
            f"{directory} comes with Python code of its own",
            why="loading the model would execute it",
            fix="if you trust its source, pass --trust",
        )
    has_weights = any(directory.glob("*.safetensors")) or any(directory.glob("*.bin"))
    try:
        model, example = _of_transformers(transformers, directory, own, has_weights, trust)
    except UsageError:
        raise
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
    elif not isinstance(config, cls.config_class or object):  # the model is a part of what the configuration is for
        config = cls.config_class.from_pretrained(str(directory), local_files_only=True)
    if not trust:
        check_kernels(config, directory)
    if has_weights:
        model = cls.from_pretrained(str(directory), config=config, **options)  # the one that was checked
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
        why = summary_of(error)
        raise UsageError(f"{library} cannot make {name!r}", why=why, fix="check the name") from error


def _pair(size: Any) -> tuple[int, int]:
    """Height and width, of one number or two."""
    sizes = tuple(size) if isinstance(size, (list, tuple)) else (size,)
    return int(sizes[0]), int(sizes[-1])


def _normal(*sizes: int) -> Any:
    import torch

    return torch.randn(sizes, device="cpu")
