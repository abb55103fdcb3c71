"""Inputs whose masks hide nothing, everything, or whole rows, which examples rarely do.

A mask is an input of booleans, or of integers that are 0 and 1 in the example and no index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tsopt.compiler.graph.program import Program
from tsopt.runtime.checking.extremes import index_inputs, is_safe, like

MASKS = "mask"
FALSE_ROWS, TRUE_ROWS = f"{MASKS} with rows of zeros", f"{MASKS} with rows of ones"


def mask_values(
    program: Program, leaves: Sequence[torch.Tensor], generator: torch.Generator
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The values of all inputs, with all masks changed together."""
    masks = [position for position, leaf in enumerate(leaves) if _is_mask(leaf)]
    if any(leaves[position].dtype != torch.bool for position in masks):
        if len(leaves) != len(program.signature.user_inputs) or not is_safe(program):
            masks = [position for position in masks if leaves[position].dtype == torch.bool]
        else:
            indices = index_inputs(program)
            masks = [position for position in masks if position not in indices]
    if not masks:
        return
    tried = [list(leaves)]

    def new(changed: dict[int, torch.Tensor]) -> list[torch.Tensor] | None:
        values = [changed.get(position, leaf) for position, leaf in enumerate(leaves)]
        if any(all(torch.equal(values[i], earlier[i]) for i in masks) for earlier in tried):
            return None
        tried.append(values)
        return values

    for kind, number in ((f"{MASKS} of zeros", 0), (f"{MASKS} of ones", 1)):
        values = new({i: like(leaves[i], torch.full_like(leaves[i], number)) for i in masks})
        if values is not None:
            yield kind, values
    for kind, number in ((FALSE_ROWS, 0), (TRUE_ROWS, 1)):
        values = new({i: _with_rows(leaves[i], number, generator) for i in masks})
        if values is not None:
            yield kind, values


def _is_mask(leaf: torch.Tensor) -> bool:
    if not leaf.numel():
        return False
    if leaf.dtype == torch.bool:
        return True
    if leaf.is_floating_point() or leaf.is_complex():
        return False
    return leaf.numel() > 1 and bool(((leaf == 0) | (leaf == 1)).all()) and bool((leaf == 1).any())


def _with_rows(leaf: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """A mask with a uniform slice along each axis but the last; elsewhere as in the example, or random."""
    values = leaf.detach().clone(memory_format=torch.contiguous_format)
    if bool((values == values.reshape(-1)[0]).all()):
        values = torch.randint(2, leaf.shape, generator=generator, device="cpu").to(leaf)
    for axis in range(max(1, leaf.dim() - 1) if leaf.dim() else 0):
        size = leaf.shape[axis]
        if size > 1:
            values.select(axis, int(torch.randint(size, (), generator=generator, device="cpu"))).fill_(number)
    return like(leaf, values)
