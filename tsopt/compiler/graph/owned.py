"""Copies of the weights, owned by a program, so that later changes to the user's model do not affect it.

Views stay views: weights that share memory share it in the copy as well, and an expanded weight is not materialized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import replace

import torch

from tsopt.compiler.graph.program import Program

SPARE = 2  # times the bytes of the views themselves: views farther apart than that are copied one by one


def owned(program: Program) -> Program:
    """The program with copies of its weights, also where it returns them.

    State, which calls write to the user's model, stays the user's.
    """
    live = {_place(tensor) for tensor in program.state.values() if _is_dense(tensor)}
    return replace(program, weights=copies(program.weights, live), returned_weights=())


def copies(weights: Mapping[str, torch.Tensor], live: Container[int] = ()) -> dict[str, torch.Tensor]:
    """Copies of tensors, alike in strides and in who shares memory with whom.

    Args:
        live: addresses of storages that are not copied: a view of what calls write has to see what they have written.
    """
    groups: dict[tuple[int, torch.dtype, torch.device], list[str]] = defaultdict(list)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not _is_dense(tensor):
            made[name] = tensor.detach().clone()
        elif tensor.numel() and _place(tensor) in live:
            made[name] = tensor
        else:
            groups[_place(tensor) or id(tensor), tensor.dtype, tensor.device].append(name)
    for names in groups.values():
        views = [weights[name] for name in names]
        made.update(zip(names, _copied(views), strict=True))
    return {name: made[name] for name in weights}


def _copied(views: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors that share one storage: of the stretch that all of them are in, unless most of it is unused."""
    ends = [_ends(view) for view in views]
    low, high = min(begin for begin, _ in ends), max(end for _, end in ends)
    if len(views) > 1 and high - low > SPARE * sum(end - begin for begin, end in ends):
        return [copy for view in views for copy in _copied([view])]
    with torch.no_grad():
        base = torch.as_strided(views[0].detach(), (high - low,), (1,), low).clone()
        return [
            torch.as_strided(base, view.shape, view.stride(), begin - low)
            for view, (begin, _) in zip(views, ends, strict=True)
        ]


def _ends(view: torch.Tensor) -> tuple[int, int]:
    """The first element of a view in its storage, and the one past the last."""
    begin = int(view.storage_offset())
    if not view.numel():
        return begin, begin
    last = sum((int(size) - 1) * int(step) for size, step in zip(view.shape, view.stride(), strict=True))
    return begin, begin + 1 + last


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values are those of a storage, at its strides."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
