"""Which results of a call are views of its inputs, or of each other: found in the memory of a recorded call.

Never imports a pass or a backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tsopt.compiler.calls.result_views import INPUT, JOINT, OUTPUT, View, last_place


def views_among(results: Sequence[Any], given: Sequence[Any], as_is: Sequence[bool]) -> tuple[View | None, ...]:
    """For each result of a call, what it is a view of; None for one that has memory of its own.

    Args:
        results: tensors that the call has returned.
        given: its inputs, and the model's tensors.
        as_is: for each of these, whether it is returned itself whatever its layout.
    """
    found: list[View | None] = []
    for result in results:
        whole = next((i for i, tensor in enumerate(given) if tensor is result), None)
        if whole is not None:
            found.append(View(INPUT, whole, None if as_is[whole] else _layout(given[whole])))
            continue
        found.append(_part(result, given, INPUT))
    for group in _sharing([(i, results[i]) for i, view in enumerate(found) if view is None]):
        for i, view in _among(results, group):
            found[i] = view
    return tuple(found)


def _among(results: Sequence[Any], group: Sequence[int]) -> list[tuple[int, View]]:
    """How results that share elements lie in memory: within one of them that is dense, or in memory for them all."""
    whole = max(group, key=lambda i: _reach(results[i]))
    bases = [results[whole] if i == whole else None for i in range(len(results))]
    parts = [(i, _part(results[i], bases, OUTPUT)) for i in group if i != whole]
    if results[whole].is_contiguous() and all(view is not None for _, view in parts):
        return [(i, view) for i, view in parts if view is not None]
    start, end = _span([results[i] for i in group])
    places = [(i, tuple(results[i].shape), tuple(results[i].stride()), results[i].storage_offset()) for i in group]
    return [(i, View(JOINT, min(group), (end - start,), shape, step, at - start)) for i, shape, step, at in places]


def _sharing(results: Sequence[tuple[int, Any]]) -> list[list[int]]:
    """The groups of results that have elements in common, by their numbers."""
    by_memory: dict[Any, list[tuple[int, Any]]] = {}
    for i, result in results:
        if result.layout == torch.strided and result.numel():
            by_memory.setdefault((_memory(result), _kind(result)), []).append((i, result))
    return [group for together in by_memory.values() for group in _with_common_elements(together)]


def _with_common_elements(results: Sequence[tuple[int, Any]]) -> list[list[int]]:
    """The same for results in one memory: the columns of a matrix lie side by side, and have none in common."""
    by_place = sorted(results, key=lambda item: item[1].storage_offset())
    ends = itertools.accumulate((_span([result])[1] for _, result in by_place), max)
    if all(later[1].storage_offset() >= end for end, later in zip(ends, by_place[1:], strict=False)):
        return []
    start, end = _span([result for _, result in results])
    places = torch.arange(end - start, device="cpu")
    owner = torch.full((end - start,), -1, dtype=torch.int32, device="cpu")  # of an element: the last that has it
    groups: dict[int, list[int]] = {}
    for i, result in results:
        elements = places.as_strided(result.shape, result.stride(), result.storage_offset() - start).flatten()
        mine = [i]
        for met in owner[elements].unique().tolist():
            number = next((number for number, group in groups.items() if met in group), None)
            mine += [] if number is None else groups.pop(number)
        groups[i] = mine
        owner[elements] = i
    return [sorted(group) for group in groups.values() if len(group) > 1]


def _span(tensors: Sequence[Any]) -> tuple[int, int]:
    """The first element of a memory that some tensors have, and the one behind their last."""
    return (
        min(tensor.storage_offset() for tensor in tensors),
        max(tensor.storage_offset() + _reach(tensor) + 1 for tensor in tensors),
    )


def _part(result: torch.Tensor, bases: Sequence[Any], kind: str) -> View | None:
    if result.layout != torch.strided or result.is_nested:
        return None
    for position, base in enumerate(bases):
        if base is None or _kind(base) != _kind(result) or not result.numel():
            continue
        offset = result.storage_offset() - base.storage_offset()
        if _memory(base) == _memory(result) and offset >= 0 and offset + _reach(result) <= _reach(base):
            detached = base.requires_grad and not result.requires_grad
            shape, stride = tuple(result.shape), tuple(result.stride())
            return View(kind, position, _layout(base), shape, stride, offset, detached=detached)
    return None


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.layout, tensor.is_conj(), tensor.is_neg()


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _reach(tensor: Any) -> int:
    return last_place(tensor.shape, tensor.stride())


def _layout(tensor: Any) -> tuple[int, ...]:
    return () if tensor.is_contiguous() else tuple(tensor.stride())
