"""The type of a call's result, by running the op on fake tensors."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx

from tsopt.compiler.program import Program

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def infer(program: Program, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake value of a call on nodes of the program.

    Raises:
        Exception: whatever the op raises for arguments that do not fit.
    """
    values = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    # It logs the traceback of a call that an op refuses; the caller reports it. NOTE: a change of level would clear the
    # caches of all loggers, at every call.
    was, _LOGGER.disabled = _LOGGER.disabled, True
    try:
        with torch.no_grad(), program.fake_mode:
            return target(*values[0], **values[1])
    finally:
        _LOGGER.disabled = was


def infer_weight(program: Program, tensor: torch.Tensor) -> Any:
    """The fake value of a weight."""
    return program.fake_mode.from_tensor(tensor, static_shapes=True)
