"""The parameters, buffers and submodules that a model holds: if one of them is replaced, it is another model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tsopt.compiler.model_reads import TABLES


class Holdings:
    """What the tables of modules hold now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables: list[Any] = [module.__dict__.get(name) for module in modules for name in TABLES]
        self._tables = [(table, dict(table)) for table in tables if isinstance(table, dict)]

    def replaced(self, but: Iterable[torch.Tensor] = ()) -> bool:
        """Whether anything was replaced or removed.

        Args:
            but: tensors that calls of the model itself may replace.
        """
        own = set(map(id, but))
        return any(
            table.get(name) is not item
            for table, held in self._tables
            for name, item in held.items()
            if id(item) not in own
        )
