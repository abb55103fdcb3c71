"""Layers by the names that the user knows them by: module paths, and patterns of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import origins_of
from tsopt.errors import UsageError
from tsopt.passes.quantize.layers import NO_LAYER


def kept_in_float(layers: Sequence[fx.Node], patterns: Iterable[str]) -> dict[fx.Node, str]:
    """The layers that patterns of `keep_float` match, with the pattern: a module path, or one above it."""
    found: dict[fx.Node, str] = {}
    for pattern in patterns:
        matching = [layer for layer in layers if any(_matches(path, pattern) for path in _paths(layer))]
        if not matching:
            names = list(dict.fromkeys(map(module_of, layers)))
            raise UsageError(
                f"keep_float {pattern!r} matches no layer",
                why=f"the layers are: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else NO_LAYER,
                fix="use a module path, or a pattern such as 'encoder.layer.3.*'",
            )
        found |= {layer: pattern for layer in matching if layer not in found}
    return found


def _paths(layer: fx.Node) -> list[str]:
    """The modules that a layer stands for: its own, and for example that of a batch norm folded into it."""
    return [origin.partition(",")[0] for origin in origins_of(layer)]


def module_of(layer: fx.Node) -> str:
    """The module that the weight belongs to; the name of the value where that is not known."""
    weight = str(ops.bind(layer)["weight"].target)
    own = [path for path in _paths(layer) if weight.startswith(f"{path}.")]
    return max(own, key=len, default=layer.meta.get("module") or layer.name)


def _matches(path: str, pattern: str) -> bool:
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: count + 1]), pattern) for count in range(len(parts)))
