"""The tensors that calls of a model may write, where no program tells which of them they do."""

from __future__ import annotations

from typing import Any

import torch

from tsopt.compiler.model_reads import reads_of
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.protect import modules_of
from tsopt.compiler.small_state import is_small_state
from tsopt.runtime.calling.model_changes import Watch


def state_of(model: Any) -> list[torch.Tensor]:
    """Buffers of the model and of all modules that its code reads; small tensors in attributes, lists and closures.

    Parameters are not among them; nor is what lies outside of the model while other threads run, which may write there.
    """
    own = [tensor for module in modules_of(model) for tensor in module._buffers.values() if tensor is not None]
    if others_run():
        return own
    reads = reads_of(model)
    buffers = [tensor for module in reads.modules for tensor in module._buffers.values() if tensor is not None]
    parameters = {id(tensor) for module in reads.modules for tensor in module._parameters.values()}
    others = (t for t in Watch(reads).tensors if id(t) not in parameters and is_small_state(t))
    return list({id(tensor): tensor for tensor in (*own, *buffers, *others)}.values())
