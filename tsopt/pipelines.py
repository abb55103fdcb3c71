"""Pipelines of transformers: a model between a tokenizer, or the like, and what is made of the outputs."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

MADE_BY = "transformers.pipelines."


def model_in(value: Any) -> nn.Module | None:
    """The model inside a pipeline; None for anything else. Does not import transformers."""
    is_pipeline = any(base.__module__.startswith(MADE_BY) for base in type(value).__mro__)
    model = getattr(value, "model", None) if is_pipeline else None
    return model if isinstance(model, nn.Module) else None


def with_model(pipeline: Any, model: nn.Module) -> Any:
    """A pipeline with another model, which shares everything else."""
    made = copy.copy(pipeline)
    made.model = model
    return made
