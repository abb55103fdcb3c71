"""Programs on a device other than the CPU, for machines that only have a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tsopt.compiler.graph.program import Program


def elsewhere(program: Program, device: str = "meta") -> Program:
    """The program with the types it would have on another device; its weights are on `meta` and have no values."""

    def moved(value: Any, place: str = device) -> Any:
        if isinstance(value, torch.device):
            return torch.device(place)
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place)

    made = program.copy()
    made.weights = {name: moved(weight, "meta") for name, weight in program.weights.items()}
    with made.fake_mode:
        for node in made.graph.nodes:
            node.args, node.kwargs = tree_map(moved, node.args), tree_map(moved, dict(node.kwargs))
            if "val" in node.meta:
                node.meta["val"] = tree_map(moved, node.meta["val"])

    def ends(items: Any) -> Any:
        return tuple(replace(item, type=replace(item.type, device=device)) for item in items)

    signature = program.signature
    made.signature = replace(signature, inputs=ends(signature.inputs), outputs=ends(signature.outputs))
    return made
