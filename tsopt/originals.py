"""Hybrids, as `hybridize` makes them, and the models that they are of."""

from __future__ import annotations

from typing import Any

from torch import nn

from tsopt.compiler.calls.snapshot import slot_names
from tsopt.pipelines import model_in


def original_of(model: Any) -> Any:
    """The original model of a hybrid; the model itself if it is not a hybrid."""
    compiled = compiled_of(model)
    return _plain(model) if compiled is None else compiled.model


def compiled_of(model: Any) -> Any:
    """The state behind a hybrid, or behind the model of a pipeline; None for anything else."""
    inside = model_in(model)
    model = model if inside is None else inside
    if isinstance(model, nn.Module):
        return behind(model)
    found = getattr(model, "_tsopt_compiled", None)  # which `functools.wraps` copies to what is around a hybrid
    return found if found is not None and getattr(model, "__wrapped__", None) is found.model else None


def behind(module: Any) -> Any:
    """The state behind a hybrid; None for any other object of its class, which `type(hybrid)(...)` makes as well."""
    found = getattr(type(module), "_tsopt_compiled", None)
    return found if found is not None and module.__dict__ is found.model.__dict__ else None


def class_of_model(cls: type) -> type:
    """The class that a hybrid's class was made of; any other is itself."""
    return cls.__bases__[-1] if "_tsopt_compiled" in vars(cls) else cls


def _plain(model: Any) -> Any:
    """Another object of a hybrid's class as one of the model's, which shares its attributes; all else is itself."""
    cls = type(model)
    if "_tsopt_compiled" not in vars(cls):
        return model
    made: Any = object.__new__(class_of_model(cls))
    made.__dict__ = model.__dict__
    for name in slot_names(type(made)):
        if hasattr(model, name):
            object.__setattr__(made, name, getattr(model, name))
    return made
