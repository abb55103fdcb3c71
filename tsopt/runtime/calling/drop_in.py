"""What `optimize` returns: a callable, not an nn.Module. Errors say what to use where a module is expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter
from itertools import chain
from typing import Any, Self

import torch
from torch import nn

from tsopt.compiler.capture.names import name_of
from tsopt.compiler.protect import modules_of
from tsopt.errors import UsageError
from tsopt.runtime.racing.outcomes import warn

SAVE_A_BUNDLE = "save a bundle with optimized.save(path), and load it with tsopt.load(path)"
# Options by which a user may want another result than what is already optimized.
FOR_ANOTHER_RESULT = ("dynamic", "level", "backends", "precision", "calibration", "keep_float", "frontend", "threads")
PICKLE_THE_MODEL = "pickle the model itself, and optimize it where it is loaded"  # where no program can be saved


class NotAModuleError(UsageError, AttributeError):
    """An attribute of modules, or of the model, which what `optimize` returns does not have."""


class DropIn:
    """A callable that stands for a model.

    Attributes:
        model: what it stands for.
    """

    model: Callable[..., Any]

    def eval(self) -> Self:
        """Returns itself. It does not switch the model to eval mode."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Returns itself if it computes there already. The arguments are those of `nn.Module.to`.

        Raises:
            UsageError: it is for another device or dtype.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        tensors = self._tensors()
        is_there = device is None or all(_is_on(tensor, device) for tensor in tensors)
        is_of_it = dtype is None or all(tensor.dtype == dtype for tensor in tensors if tensor.is_floating_point())
        if is_there and is_of_it:
            return self
        raise UsageError(
            "an optimized model cannot be moved",
            why="it is for the device and the dtype that the model had",
            fix="move the model, and optimize it there: tsopt.optimize(model.to(...), example)",
        )

    def warn_of_ignored(self, options: Mapping[str, Any], defaults: Mapping[str, Parameter]) -> None:
        """Warns of options of `optimize` that would have made something else of the model."""
        given = (name for name in FOR_ANOTHER_RESULT if not _is_default(options[name], defaults[name].default))
        if said := ", ".join(given):
            warn(
                f"tsopt: {name_of(self.model)} is already optimized and is returned unchanged; ignored: {said}. "
                "To apply them, optimize the original model",
                UserWarning,
            )

    def _tensors(self) -> list[torch.Tensor]:
        """Tensors that are where it computes."""
        modules = modules_of(self.model)
        own = (chain(module.parameters(recurse=False), module.buffers(recurse=False)) for module in modules)
        return list(chain.from_iterable(own))

    def __getattr__(self, name: str) -> Any:
        """Raises NotAModuleError, an AttributeError, for what modules, or the model, have."""
        missing = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name.startswith("__") or "model" not in self.__dict__:  # what Python asks for; while it is being made
            raise AttributeError(missing)
        module = next(iter(modules_of(self.model)), None)
        if module is None or not (hasattr(nn.Module, name) or hasattr(module, name)):
            raise AttributeError(missing)
        raise NotAModuleError(
            f"an optimized model has no attribute {name!r}",
            why="it can be called like the model, but it is not an nn.Module",
            fix=f"use that of the model: model.{name}; or tsopt.hybridize(model), which stays a module",
        )

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Raises UsageError: engines cannot be copied."""
        raise UsageError(
            "an optimized model cannot be deep-copied",
            why="what was made of the model belongs to the original",
            fix="copy the model and optimize the copy: tsopt.optimize(copy.deepcopy(model), example)",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises UsageError: an engine belongs to its process."""
        raise UsageError(
            "an optimized model cannot be pickled",
            why="what was made of the model belongs to this process",
            fix=SAVE_A_BUNDLE if "program" in self.__dict__ else PICKLE_THE_MODEL,
        )


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and value == default)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether it is there; `cuda` is any of its kind."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
