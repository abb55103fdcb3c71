"""Matches layers against module paths and patterns, as the user writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import fx

from tsopt.compiler.graph.origin import module_of, paths_of
from tsopt.errors import UsageError
from tsopt.passes.quantize.layers import NO_LAYER


def kept_in_float(
    layers: Sequence[fx.Node], patterns: Iterable[str], others: Sequence[fx.Node] = ()
) -> dict[fx.Node, str]:
    """The layers that `keep_float` matches, each with its pattern. A pattern may match any parent module.

    Args:
        others: what a pattern may match as well, for other candidates lower its precision.

    Raises:
        UsageError: a pattern matches nothing at all.
    """
    found: dict[fx.Node, str] = {}
    for pattern in patterns:
        matching = [layer for layer in layers if _is_named(layer, pattern)]
        if not matching and not any(_is_named(layer, pattern) for layer in others):
            names = list(dict.fromkeys(map(module_of, (*layers, *others))))
            raise UsageError(
                f"keep_float {pattern!r} matches no layer",
                why=f"the layers are: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else NO_LAYER,
                fix="use a module path, or a pattern such as 'encoder.layer.3.*'",
            )
        found |= {layer: pattern for layer in matching if layer not in found}
    return found


def _is_named(layer: fx.Node, pattern: str) -> bool:
    return any(_matches(path, pattern) for path in paths_of(layer))


def _matches(path: str, pattern: str) -> bool:
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: count + 1]), pattern) for count in range(len(parts)))
