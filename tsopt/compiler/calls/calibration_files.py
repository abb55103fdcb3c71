"""Calibration data in files: the arrays of .npz and .npy files, as inputs of one row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tsopt.errors import UsageError

FORMS = (
    "pass a DataLoader, a Dataset, an iterable of inputs or of (input, target), the path of an .npz file or of a "
    "directory of .npy and .npz files, or a number of inputs to draw"
)


def from_files(path: Path) -> Iterator[Any]:
    """The calls in an .npz file, one for each index of its arrays' first axis; or in the files of a directory."""
    files = sorted(item for item in path.iterdir() if item.suffix in (".npz", ".npy")) if path.is_dir() else [path]
    if not path.exists() or not files:
        what = "there is no .npy or .npz file in it" if path.exists() else "no such file or directory"
        raise UsageError(f"calibration cannot be read: {path}", why=what, fix=FORMS)
    for file in files:
        yield from _stacked(file, _arrays_in(file))


def _arrays_in(file: Path) -> dict[str, Any]:
    """The arrays of a file by name."""
    member = ""
    try:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, Mapping):
            return {"arr_0": loaded}
        arrays: dict[str, Any] = {}
        for member in loaded:
            arrays[member] = loaded[member]
            if not isinstance(arrays[member], np.ndarray):  # numpy gives the bytes of a member that is none
                raise ValueError("it is not an array")
    except Exception as error:  # damage to a header, to the archive and to each kind of compression differ
        place = f", member {member[:80]!r}" if member else ""
        raise UsageError(
            f"calibration cannot be read: {file}{place}",
            why=str(error)[:200] or type(error).__name__,
            fix="write it with numpy.savez or numpy.save",
        ) from error
    return arrays


def _stacked(file: Path, arrays: Mapping[str, Any]) -> Iterator[Any]:
    """One call for each index of the first axis, as a batch of one."""
    lengths = {array.shape[:1] for array in arrays.values()}
    if len(lengths) != 1 or not arrays or lengths == {()}:
        sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise UsageError(
            f"the arrays in {file} differ in the size of their first axis",
            why=sizes or "there is none",
            fix="save arrays whose first axis counts the inputs: numpy.savez(file, x=images)",
        )
    unnamed = all(name.startswith("arr_") for name in arrays)
    tensors = {name: with_tensors(array) for name, array in arrays.items()}
    for index in range(lengths.pop()[0]):
        one = {name: tensor[index : index + 1] for name, tensor in tensors.items()}
        yield Unnamed(one.values()) if unnamed else Named(one)


class Unnamed(tuple[Any, ...]):
    """Inputs in the order of the arrays of a file."""


class Named(dict[str, Any]):
    """Inputs by the names that the signature gives them."""


def with_tensors(item: Any) -> Any:
    """An item with tensors in place of numpy's arrays, except of those that torch cannot represent, such as texts."""
    if type(item) in (list, tuple):
        return type(item)(map(with_tensors, item))
    if type(item) in (dict, Named):
        return type(item)((key, with_tensors(value)) for key, value in item.items())
    if not isinstance(item, (np.ndarray, np.generic)):
        return item
    array = np.ascontiguousarray(item)
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(item.shape)
    except (TypeError, ValueError):
        return item
