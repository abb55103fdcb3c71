"""The weights of a Program as a file: safetensors, which knows no strides and no sharing.

A view is written as what it shows. A transposed weight is written in its memory order, so that the file can be mapped
and nothing has to be copied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tsopt.compiler.calls.tensor_file import read_tensors, write_tensors
from tsopt.compiler.tensor_bytes import bytes_in

HEADER_SIZE = 8  # bytes in front of the header, which contain its length


def write_weights(weights: Mapping[str, torch.Tensor], file: Path) -> None:
    found: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in weights.items():
        value = tensor.detach().cpu()
        value = value.permute(memory_order(tensor)).contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != value.nbytes:
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        found[name] = value
    write_tensors(found, file)


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The weights, mapped from the file, with their dimensions in memory order."""
    return read_tensors(file)


def memory_order(value: torch.Tensor) -> list[int]:
    """The dimensions of a tensor as they are in memory, the outermost first; unchanged if its memory has gaps."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    return order if value.permute(order).is_contiguous() else list(range(value.dim()))


def bytes_in_memory(weights: Mapping[str, torch.Tensor], file: Path) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes in this process of weights that were written to a file, each with its offset in the file.

    Weights whose memory has gaps, or that are not on the CPU, are left out.
    """
    with file.open("rb") as stored:
        size = int.from_bytes(stored.read(HEADER_SIZE), "little")
        header = json.loads(stored.read(size))
    for name, entry in header.items():
        value = weights.get(name)
        if value is None or value.device.type != "cpu" or not value.numel():
            continue
        value = value.detach().permute(memory_order(value))
        begin, end = entry["data_offsets"]
        if value.is_contiguous() and value.nbytes == end - begin:
            yield HEADER_SIZE + size + begin, bytes_in(value)
