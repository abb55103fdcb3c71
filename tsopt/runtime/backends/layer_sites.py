"""Layers, and what follows them that a library can do in the same call: a residual sum, an activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten

LOSES_NAN = "a ReLU fused into a layer turns NaN into 0, where PyTorch propagates NaN"

Attribute = tuple[str, list[float], str]
NOTHING: Attribute = ("none", [], "")
CONVOLUTIONS = (aten.conv2d.default, aten.conv3d.default)
LAYERS = (*CONVOLUTIONS, aten.linear.default)


def _bounds(low: str, high: str) -> Callable[[dict[str, Any]], Attribute | None]:
    def read(call: dict[str, Any]) -> Attribute | None:
        ends = [call[low], call[high]]
        return ("hardtanh", [float(e) for e in ends], "") if all(isinstance(e, (int, float)) for e in ends) else None

    return read


# The activations that a layer can apply itself: op -> how oneDNN knows it, from the arguments of the call.
ACTIVATIONS: dict[Any, Callable[[dict[str, Any]], Attribute | None]] = {
    aten.relu.default: lambda call: ("relu", [], ""),
    aten.relu6.default: lambda call: ("hardtanh", [0.0, 6.0], ""),
    aten.hardtanh.default: _bounds("min_val", "max_val"),
    aten.clamp.default: _bounds("min", "max"),
    aten.sigmoid.default: lambda call: ("sigmoid", [], ""),
    aten.tanh.default: lambda call: ("tanh", [], ""),
    aten.silu.default: lambda call: ("swish", [], ""),
    aten.hardswish.default: lambda call: ("hardswish", [], ""),
    aten.gelu.default: lambda call: ("gelu", [], str(call["approximate"])),
    aten.leaky_relu.default: lambda call: ("leaky_relu", [float(call["negative_slope"])], ""),
}


@dataclass(frozen=True, slots=True)
class Site:
    """A layer, and what follows it that the layer can do itself."""

    layer: fx.Node
    end: fx.Node
    other: fx.Node | None
    activation: Attribute

    @property
    def chain(self) -> list[fx.Node]:
        """The calls that are replaced, in order."""
        nodes = [self.layer]
        while nodes[-1] is not self.end:
            nodes.append(next(iter(nodes[-1].users)))
        return nodes


def site_of(layer: fx.Node) -> Site:
    """A layer with the residual sum and the activation after it, where nothing else reads what is in between."""
    end, other, activation = layer, None, NOTHING
    user = _only_user(end)
    if user is not None and user.target is aten.add.Tensor and ops.bind(user)["alpha"] == 1:
        operands = [arg for arg in user.args[:2] if arg is not layer]
        if len(operands) == 1 and isinstance(operands[0], fx.Node) and _alike(operands[0], layer):
            end, other = user, operands[0]
            user = _only_user(end)
    if user is None or user.target not in ACTIVATIONS or not _alike(user, layer):
        return Site(layer, end, other, activation)
    found = ACTIVATIONS[user.target](ops.bind(user))
    # NOTE: the linear kernel with a residual sum takes no activation after it.
    if found is None or (other is not None and layer.target is aten.linear.default):
        return Site(layer, end, other, activation)
    return Site(layer, user, other, found)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _alike(a: fx.Node, b: fx.Node) -> bool:
    mine, theirs = a.meta.get("val"), b.meta["val"]
    return isinstance(mine, torch.Tensor) and (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)


def each(value: Sequence[int], count: int) -> list[int]:
    """One number for each spatial dimension."""
    return list(value) * count if len(value) == 1 else list(value)


def sample(shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    """Random values as the layer before would leave them: that is where a conversion is saved."""
    value = torch.randn(shape, generator=draw, device="cpu").to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return value.contiguous(memory_format=formats[value.dim()]) if value.dim() in formats else value
