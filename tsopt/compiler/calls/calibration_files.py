"""Calibration data in files: the arrays of .npz and .npy files, as inputs of one row each."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from tsopt.errors import UsageError

# What numpy raises for a file that is damaged, encrypted, or says that it is larger than memory.
UNREADABLE = (OSError, ValueError, EOFError, BadZipFile, zlib.error, RuntimeError, MemoryError)
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
        try:
            loaded = np.load(file, allow_pickle=False)
            arrays = dict(loaded) if isinstance(loaded, Mapping) else {"arr_0": loaded}
        except UNREADABLE as error:
            raise UsageError(
                f"calibration cannot be read: {file}",
                why=str(error)[:200] or type(error).__name__,
                fix="write it with numpy.savez or numpy.save",
            ) from error
        yield from _stacked(file, arrays)


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
