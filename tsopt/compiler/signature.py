"""What a program takes and returns, and the check that a call fits. Works on torch tensors and on numpy arrays.

Imports neither torch nor a backend, so that a bundle can be called where torch is not installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tsopt.compiler.structure import Structure, flatten, from_json, to_json, unflatten
from tsopt.compiler.types import SHORT, TensorType
from tsopt.errors import ArtifactError, SignatureError

_DEVICE = re.compile(r"(cpu|cuda|xpu|mps)(:\d{1,3})?")


@dataclass(frozen=True, slots=True)
class Input:
    """A graph input: the user's tensor, or (`state`) a tensor of the model that a call writes."""

    name: str
    type: TensorType
    state: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A graph output: returned to the user, or written to the input called `writes` after the call."""

    name: str
    type: TensorType
    writes: str | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs in graph order (the user's first, then state), outputs (writes first), and the user's nestings.

    `outer` nests the leaves of the call `(args, kwargs)`, `result` those of what it returns.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    outer: Structure
    result: Structure

    @property
    def user_inputs(self) -> tuple[Input, ...]:
        return tuple(item for item in self.inputs if not item.state)

    @property
    def state_inputs(self) -> tuple[Input, ...]:
        return tuple(item for item in self.inputs if item.state)

    @property
    def writes(self) -> tuple[Output, ...]:
        return tuple(item for item in self.outputs if item.writes is not None)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The call's tensors in graph order.

        Raises:
            SignatureError: another nesting, constant, dtype, shape or device than captured.
        """
        order = self.outer.children[1].keys
        if len(order) == len(kwargs) and all(key in kwargs for key in order):
            kwargs = {key: kwargs[key] for key in order}  # `f(b=2, a=1)` is `f(a=1, b=2)`
        leaves, structure = flatten((tuple(args), dict(kwargs)))
        if structure != self.outer:
            raise SignatureError(
                "the call has another form than the example",
                why=f"captured for {self.outer}, called with {structure}",
                fix="call it as in the example, or optimize for this form as well",
            )
        for item, leaf in zip(self.user_inputs, leaves, strict=True):
            reason = mismatch(item.type, leaf)
            if reason:
                raise SignatureError(
                    f"input {item.name!r} {reason}", fix="pass what the example had, or optimize for this input as well"
                )
        return leaves

    def unbind(self, values: Sequence[Any]) -> Any:
        """The user's return value around the graph's returned tensors."""
        return unflatten(self.result, values)

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": [{"name": i.name, "type": _type_json(i.type), "state": i.state} for i in self.inputs],
            "outputs": [{"name": o.name, "type": _type_json(o.type), "writes": o.writes} for o in self.outputs],
            "outer": to_json(self.outer),
            "result": to_json(self.result),
        }

    @classmethod
    def from_json(cls, data: Any) -> Signature:
        """Raises ArtifactError when the data is not a signature."""
        try:
            inputs = tuple(Input(str(i["name"]), _type_from(i["type"]), bool(i["state"])) for i in data["inputs"])
            outputs = tuple(Output(str(o["name"]), _type_from(o["type"]), o["writes"]) for o in data["outputs"])
            made = cls(inputs, outputs, from_json(data["outer"]), from_json(data["result"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ArtifactError("the stored signature is damaged", why=repr(error)) from error
        made._check_indices()
        return made

    def _check_indices(self) -> None:
        returned = len(self.outputs) - len(self.writes)
        for structure, count, what in ((self.outer, len(self.user_inputs), "input"), (self.result, returned, "output")):
            if any(index >= count for index, _ in structure.paths()):
                raise ArtifactError(f"the stored {what} structure is damaged", why=f"it names a tensor beyond {count}")


def mismatch(expected: TensorType, value: Any) -> str | None:
    """Why a tensor or array is not of the expected type; None when it is. Strides do not count."""
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != expected.dtype:
        return f"is {dtype}, expected {expected.dtype}"
    if tuple(value.shape) != expected.shape:
        return f"has shape {list(value.shape)}, expected {list(expected.shape)}"
    device = str(getattr(value, "device", "cpu"))
    if device != expected.device:
        return f"is on {device}, expected {expected.device}"
    return None


def _type_json(type_: TensorType) -> dict[str, Any]:
    return {"dtype": type_.dtype, "shape": list(type_.shape), "stride": list(type_.stride), "device": type_.device}


def _type_from(data: Any) -> TensorType:
    shape, stride = tuple(map(int, data["shape"])), tuple(map(int, data["stride"]))
    dtype, device = str(data["dtype"]), str(data["device"])
    sound = len(shape) == len(stride) <= 64 and all(0 <= size < 2**48 for size in (*shape, *stride))
    if not sound or dtype not in SHORT or not _DEVICE.fullmatch(device):
        raise ValueError(f"not a tensor type: {str(data)[:80]}")
    return TensorType(dtype, shape, stride, device)
