"""Tensors in a file, by name: safetensors, and what it lacks. Read as torch tensors, or as arrays without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.errors import BundleError

if TYPE_CHECKING:
    import torch

# Complex dtypes that safetensors does not know, and those of their parts: stored as pairs, under `NAME:DTYPE`.
PARTS = {"complex128": "float64", "complex32": "float16"}


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes contiguous tensors of which no two share memory.

    Raises:
        BundleError: a dtype cannot be stored.
    """
    from safetensors.torch import save_file

    try:
        save_file(dict(_storable(name, tensor) for name, tensor in tensors.items()), path)
    except KeyError as error:
        raise BundleError(
            f"tensors of {error.args[0]} cannot be stored in a file", fix="convert them in the model, to float32 maybe"
        ) from error


def _storable(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    import torch

    value = tensor.resolve_conj().resolve_neg()  # flags of a view, which a file cannot hold
    dtype = str(value.dtype).removeprefix("torch.")
    return (f"{name}:{dtype}", torch.view_as_real(value)) if dtype in PARTS else (name, value)


def read_tensors(path: Path, *, arrays: bool = False) -> dict[str, Any]:
    """What `write_tensors` wrote, mapped from the file where that is possible.

    Args:
        arrays: numpy's arrays, for where torch is not installed.

    Raises:
        Exception: whatever safetensors raises for a damaged file, a ValueError for a damaged pair.
    """
    if arrays:
        from safetensors.numpy import load_file
    else:
        from safetensors.torch import load_file  # type: ignore[assignment]
    return dict(_restored(name, value) for name, value in load_file(path).items())


def _restored(name: str, value: Any) -> tuple[str, Any]:
    base, _, dtype = name.rpartition(":")
    if dtype not in PARTS or not base:
        return name, value
    if str(value.dtype).removeprefix("torch.") != PARTS[dtype] or not value.ndim or value.shape[-1] != 2:
        raise ValueError(f"{name[:80]!r} is not a tensor of pairs")
    if hasattr(value, "data_ptr"):
        import torch

        return base, torch.view_as_complex(value.clone())  # in the file it may not be aligned
    return base, value.view(dtype)[..., 0]  # numpy has no complex32: this raises TypeError
