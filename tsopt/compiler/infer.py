"""The type of a call's result, by running the op on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tsopt.compiler.program import Program


def infer(program: Program, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake value of a call on nodes of the program.

    Raises:
        Exception: whatever the op raises for arguments that do not fit.
    """
    values = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    with torch.no_grad(), program.fake_mode:
        return target(*values[0], **values[1])


def infer_weight(program: Program, tensor: torch.Tensor) -> Any:
    """The fake value of a weight."""
    return program.fake_mode.from_tensor(tensor, static_shapes=True)
