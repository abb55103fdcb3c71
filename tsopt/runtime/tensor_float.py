"""TensorFloat-32: whether torch may round the factors of float32 products on a GPU to 10 bits of mantissa.

torch has two settings for this, `allow_tf32` and `fp32_precision`. Where the user has set the second one, reading the
first one is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def _settings() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, torch.backends.cudnn


def is_on() -> bool:
    """Whether products of matrices may be computed in it."""
    matmul: Any = torch.backends.cuda.matmul
    try:
        return bool(matmul.allow_tf32)
    except RuntimeError:
        return bool(matmul.fp32_precision == "tf32")


@contextmanager
def turned_on() -> Iterator[None]:
    """Lets products and convolutions be computed in it. For the process: torch has no setting for a thread."""
    name, value = "allow_tf32", True
    try:
        before = [getattr(setting, name) for setting in _settings()]
    except RuntimeError:
        name, value = "fp32_precision", "tf32"  # type: ignore[assignment]
        before = [getattr(setting, name) for setting in _settings()]
    try:
        _set(name, [value] * len(before))
        yield
    finally:
        _set(name, before)


def _set(name: str, values: Sequence[Any]) -> None:
    # What torch's own context managers use: `torch.backends.disable_global_flags()` forbids anything else.
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():
        for setting, value in zip(_settings(), values, strict=True):
            setattr(setting, name, value)
