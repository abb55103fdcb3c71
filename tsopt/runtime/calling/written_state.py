"""The tensors that calls of a model may write, where no program tells which of them they do."""

from __future__ import annotations

from typing import Any

import torch

from tsopt.compiler.model_reads import reads_of
from tsopt.runtime.calling.model_changes import Watch


def state_of(model: Any) -> list[torch.Tensor]:
    """Buffers of all modules that a model's code reads, and tensors in attributes, containers, closures and globals.

    Parameters are not among them.
    """
    reads = reads_of(model)
    parameters = {id(tensor) for module in reads.modules for tensor in module._parameters.values()}
    return [tensor for tensor in Watch(reads).tensors if id(tensor) not in parameters]
