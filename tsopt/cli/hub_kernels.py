"""Kernels that a configuration of transformers asks for by name: code that the library downloads and runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tsopt.errors import UsageError

_NAMES = re.compile(r"_?(?:attn|experts)_implementation(?:_internal)?")
# Implementations of attention and of experts that are part of torch and transformers. "flash_attention_2" is not: where
# flash_attn is not installed, transformers replaces it by a kernel from the hub.
INCLUDED = frozenset({"eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"})


def check_kernels(config: Any, directory: Path) -> None:
    """Raises UsageError if a configuration, or one within it, asks for kernels that are not part of the library.

    Args:
        config: as transformers has read it, since it may have been in another file than config.json.
    """
    for name in _asked_for(config):
        if name not in INCLUDED:
            raise UsageError(
                f"{directory} asks for the kernels {name[:80]!r}",
                why="they are not part of transformers, which would download them and run their code",
                fix='write "sdpa" or "eager" in its configuration or, if you trust its source, pass --trust',
            )


def _asked_for(config: Any) -> Iterator[str]:
    """What a configuration names, and those within it."""
    if isinstance(config, (list, tuple)):
        for item in config:
            yield from _asked_for(item)
    is_object = hasattr(type(config), "to_dict")  # a configuration, not a dtype or what else one may hold
    items = vars(config) if is_object else config if isinstance(config, dict) else {}
    for key, value in items.items():
        if isinstance(key, str) and _NAMES.fullmatch(key):
            yield from _texts(value)
        else:
            yield from _asked_for(value)


def _texts(value: Any) -> Iterator[str]:
    """A name, or one for each part of the model."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif value is not None:
        yield str(value)
