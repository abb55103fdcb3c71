"""A property of an input that the model's Python code read, beyond values, dtype and shape, and what it was.

Does not import torch: a bundle checks the same properties of its caller's arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

METHODS = frozenset({"is_contiguous", "stride", "storage_offset", "is_inference", "is_conj", "is_neg"})
METHODS |= {"is_shared", "is_pinned"}
ATTRIBUTES = frozenset({"requires_grad", "is_leaf"})
FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
PRESENT = "hasattr"  # whether the user has set an attribute of this name on the tensor
LAYOUT = frozenset({"is_contiguous", "stride"})


@dataclass(frozen=True, slots=True)
class Question:
    """A method or an attribute of `torch.Tensor`, what it was called with, and its answer.

    Attributes:
        name: one of METHODS or ATTRIBUTES, or PRESENT.
        args: whole numbers, and memory formats by name; of PRESENT, the name of the attribute.
        answer: a bool, a whole number, or a tuple of such.
    """

    name: str
    args: tuple[Any, ...]
    answer: Any

    @classmethod
    def of(cls, name: str, args: Sequence[Any], answer: Any) -> Question | None:
        """A question that can be asked again; None for one that cannot."""
        named = tuple(str(arg).removeprefix("torch.") if not isinstance(arg, int) else arg for arg in args)
        found = tuple(answer) if isinstance(answer, (list, tuple)) else answer
        made = cls(name, named, found)
        return made if made.is_sound() else None

    def is_sound(self) -> bool:
        """Whether it is safe to ask of any tensor, even if it comes from a file."""
        if self.name == PRESENT:
            return [*map(type, self.args)] == [str] and self.answer is False
        if self.name in ATTRIBUTES:
            return not self.args and type(self.answer) is bool
        simple = all(type(arg) is int or arg in FORMATS for arg in self.args)
        answers = self.answer if type(self.answer) is tuple else (self.answer,)
        return self.name in METHODS and simple and len(self.args) < 2 and all(type(a) in (bool, int) for a in answers)

    def answered_by(self, value: Any) -> bool:
        """Whether a tensor, or a numpy array, gives the same answer."""
        if self.name == PRESENT:
            # Only what the user has set counts: every array has `astype`, and reading `imag` of a real tensor raises.
            return (self.args[0] in getattr(value, "__dict__", ())) is self.answer
        if hasattr(value, "__array_interface__") and not hasattr(value, "requires_grad"):
            return self._answered_by_array(value)
        if self.name in ATTRIBUTES:
            return bool(getattr(value, self.name) == self.answer)
        return bool(_ask(value, self.name, self.args) == self.answer)

    def _answered_by_array(self, array: Any) -> bool:
        if self.name not in LAYOUT:
            return True  # an array has no gradients and no flags
        if self.name == "is_contiguous" and not self.args:
            return bool(array.flags.c_contiguous) == self.answer
        steps = tuple(step // array.itemsize for step in array.strides)
        return self.name == "stride" and (steps[self.args[0]] if self.args else steps) == self.answer

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.args))
        return f"{self.name}({inner})" if self.name in METHODS or self.name == PRESENT else self.name

    def to_json(self) -> list[Any]:
        return [self.name, list(self.args), list(self.answer) if isinstance(self.answer, tuple) else self.answer]

    @classmethod
    def from_json(cls, data: Any) -> Question:
        """Raises ValueError for anything other than a question."""
        name, args, answer = data
        made = cls(name, tuple(args), tuple(answer) if isinstance(answer, list) else answer)
        if not isinstance(name, str) or not made.is_sound():
            raise ValueError(f"invalid query of a tensor: {str(data)[:80]}")
        return made


def _ask(value: Any, name: str, args: Sequence[Any]) -> Any:
    if not args or isinstance(args[0], int):
        return getattr(value, name)(*args)
    import torch

    return getattr(value, name)(memory_format=getattr(torch, args[0]))
