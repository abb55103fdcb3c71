"""Bounds on the input values for which an engine computes what torch computes, checked before each call.

Can be imported without torch: a bundle checks its calls as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tsopt.compiler.calls.signature import Signature
from tsopt.errors import BackendError, BundleError, IndexOutOfRange, IndexRefused
from tsopt.runtime.calling.executable import Runner

INDEX, REFUSED, RANGE = "index", "refused", "range"  # eager raises IndexError; RuntimeError; nothing at all
FINITE, BELOW_INFINITY, NOT_NAN = "finite", "below infinity", "not nan"  # floats
FLOATS = {FINITE: "NaN or infinity", BELOW_INFINITY: "NaN or infinity", NOT_NAN: "NaN"}  # what they do not admit


@dataclass(frozen=True, slots=True)
class Bound:
    """The whole numbers that an input may hold, both ends included; or which floats.

    Attributes:
        input: its position among the inputs of the signature.
        kind: what eager does with others: `index` and `refused` raise IndexError and RuntimeError, `range` computes.
            For floats, it says which are admitted, and `low` and `high` are not used.
        also: one number more, such as the target that a loss ignores.
        of, axis, below, above: where the ends depend on a size of the call, whose: each end is moved by so many times
            the size of this axis of this input.
    """

    input: int
    low: int = 0
    high: int = 0
    kind: str = RANGE
    also: int | None = None
    of: int = 0
    axis: int = 0
    below: int = 0
    above: int = 0

    def is_within(self, other: Bound) -> bool:
        """Whether it admits no more numbers of an input than another; False for ends that depend on sizes."""
        ends = (replace(bound, low=0, high=0, kind=RANGE) for bound in (self, other))
        fixed = Bound(self.input)
        return all(end == fixed for end in ends) and other.low <= self.low and self.high <= other.high

    def admits(self, values: Sequence[Any]) -> bool:
        array = values[self.input]
        if not hasattr(array, "__array_interface__"):
            is_narrow = self.kind in FLOATS and array.element_size() < 4
            array = (array.float() if is_narrow else array).numpy(force=True)  # numpy has no bfloat16
        if not array.size:
            return True
        if self.kind in FLOATS:
            return self._admits_floats(array)
        low, high = self.low, self.high
        if self.below or self.above:
            size = int(values[self.of].shape[self.axis])
            low, high = low + self.below * size, high + self.above * size
        if self.also is not None:
            array = array[array != self.also]
            if not array.size:
                return True
        return bool(low <= array.min() and array.max() <= high)

    def _admits_floats(self, array: Any) -> bool:
        largest = array.max()  # NaN if there is one
        if self.kind == NOT_NAN:
            return bool(largest == largest)
        return bool(largest < math.inf and (self.kind == BELOW_INFINITY or array.min() > -math.inf))

    def error(self, names: Sequence[str]) -> Exception:
        name = names[self.input]
        if self.kind in FLOATS:
            return BackendError(
                f"input {name!r} contains {FLOATS[self.kind]}",
                why="PyTorch would pass it on to the results; int8 layers would turn it into an ordinary number",
                fix="check the inputs before the call, or export the model without precision=int8",
            )
        if self.kind == RANGE:
            return BackendError(
                f"input {name!r} contains values for which this backend differs from PyTorch",
                why=f"results are known to match for values from {self.low} to {self.high}",
                fix="call the model itself with these inputs, or optimize it on a machine with PyTorch installed",
            )
        cls = IndexOutOfRange if self.kind == INDEX else IndexRefused
        return cls(f"input {name!r} contains an out-of-range index", why="PyTorch raises for this call as well")


def guarded(
    run: Runner, bounds: Sequence[Bound], signature: Signature, otherwise: Callable[[], Runner] | None = None
) -> Runner:
    """A runner that is asked only for calls within bounds.

    Args:
        otherwise: makes the runner of the program by torch, which answers all others, or raises what eager raises;
            None: others are an error.
    """
    if not bounds:
        return run
    names = [item.name for item in signature.inputs]
    made: list[Runner] = []

    def checked(values: Sequence[Any]) -> Sequence[Any]:
        for bound in bounds:
            if not bound.admits(values):
                if otherwise is None:
                    raise bound.error(names)
                if not made:
                    made.append(otherwise())
                return made[0](values)
        return run(values)

    return checked


def to_options(bounds: Sequence[Bound]) -> dict[str, Any]:
    """What a bundle keeps of bounds, among the options of its session."""
    return {"bounds": [asdict(bound) for bound in bounds]} if bounds else {}


def from_options(options: Mapping[str, Any], signature: Signature) -> list[Bound]:
    """The bounds of a bundle.

    Raises:
        BundleError: they are not what `to_options` writes, or not of this signature.
    """
    found = options.get("bounds", [])
    known = {field.name for field in fields(Bound)}
    if not isinstance(found, list) or not all(isinstance(item, dict) and set(item) == known for item in found):
        raise BundleError("the value bounds in the bundle are damaged", fix="export the model again")
    bounds = [Bound(**item) for item in found]
    if not all(_is_sound(bound, signature) for bound in bounds):
        raise BundleError("the value bounds in the bundle do not match its signature", fix="export the model again")
    return bounds


def _is_sound(bound: Bound, signature: Signature) -> bool:
    numbers = (bound.input, bound.low, bound.high, bound.of, bound.axis, bound.below, bound.above)
    if not all(type(number) is int for number in numbers) or bound.kind not in (INDEX, REFUSED, RANGE, *FLOATS):
        return False
    if bound.also is not None and type(bound.also) is not int:
        return False
    count = len(signature.inputs)
    if not (0 <= bound.input < count and 0 <= bound.of < count):
        return False
    rank = len(signature.inputs[bound.of].type.shape)
    return not (bound.below or bound.above) or 0 <= bound.axis < rank
