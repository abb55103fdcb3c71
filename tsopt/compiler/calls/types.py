"""The type of a tensor value, as every layer prints, stores and compares it. Does not import torch."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "bool",
    "complex32": "c32",
    "complex64": "c64",
    "complex128": "c128",
}
LONG = {short: long for long, short in SHORT.items()}


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype by its torch name (`float32`), shape and strides in elements, device as torch writes it."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: Any) -> TensorType:
        """The type of a torch tensor, real or fake."""
        return cls(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            str(tensor.device),
        )

    def __str__(self) -> str:
        place = "" if self.device == "cpu" else f"@{self.device}"
        return f"{SHORT.get(self.dtype, self.dtype)}[{', '.join(map(str, self.shape))}]{place}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        return self.same_layout(contiguous_strides(self.shape))

    def same_layout(self, stride: tuple[int, ...]) -> bool:
        """Whether strides address the same places: those of dimensions of size 1 and of empty tensors do not count."""
        if self.numel == 0:
            return True
        return all(
            size == 1 or mine == other for size, mine, other in zip(self.shape, self.stride, stride, strict=True)
        )

    def matches(self, other: TensorType) -> bool:
        """Equal but for strides that cannot be told apart."""
        return (self.dtype, self.shape, self.device) == (other.dtype, other.shape, other.device) and self.same_layout(
            other.stride
        )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def unlike_a_tensor(value: Any) -> tuple[str, str] | None:
    """What a value of a call is that no engine may take for a plain dense tensor, and what to pass; None for one."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(value).__name__}", "pass a torch.Tensor: x.as_subclass(torch.Tensor)"
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").strip("_")
        return f"a {kind} tensor", "pass a dense tensor: x.to_dense()"
    return None
