"""Names of models, and of the tensors of a call, by the parameters that they belong to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tsopt.compiler.calls.structure import Structure
from tsopt.compiler.capture.lowering import unique
from tsopt.compiler.capture.scripted import Scripted
from tsopt.compiler.protect import InEvalMode


def name_of(model: object, nameless: str = "Model") -> str:
    """The name of a model in programs and reports.

    Args:
        nameless: what stands for the name of a lambda, which has none.
    """
    while isinstance(model, partial | InEvalMode):
        model = model.func if isinstance(model, partial) else model.module
    own = type(model).__name__
    name = own if isinstance(model, nn.Module) else getattr(model, "__name__", own)
    name = str(getattr(model, "original_name", name))  # of TorchScript
    return name if name.isidentifier() else nameless


def input_names(model: Callable[..., Any], outer: Structure) -> list[str]:
    """A name for each leaf: the parameter of forward that it belongs to, and its path below."""
    parameters = _parameters(model) or []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names: dict[int, str] = {}  # of a tensor in two places, the first
    args, kwargs = outer.children
    for position, child in enumerate(args.children):
        prefix = plain[position] if position < len(plain) else f"arg{position}"
        names = dict(child.paths(prefix)) | names
    for key, child in zip(kwargs.keys, kwargs.children, strict=True):
        names = dict(child.paths(str(key))) | names
    return unique([names[index] for index in sorted(names)])


def collected(model: Callable[..., Any], outer: Structure) -> tuple[str, ...]:
    """The keywords of a call that the model takes as `**kwargs`; all of them where its parameters are not known."""
    keys = tuple(map(str, outer.children[1].keys))
    parameters = _parameters(model)
    if parameters is None:
        return keys
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return ()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return tuple(key for key in keys if key not in named)


def _parameters(model: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a call of the model; None where they are not known."""
    target = model.forward if isinstance(model, nn.Module) else model
    try:
        signature = model.call_signature if isinstance(model, Scripted) else inspect.signature(target)
    except (TypeError, ValueError):
        return None
    return list(signature.parameters.values())
