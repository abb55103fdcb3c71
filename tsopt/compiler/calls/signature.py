"""The inputs and outputs of a program, and the check that a call matches them. Works on torch tensors and numpy arrays.

Imports neither torch nor a backend, so that a bundle can be called where torch is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tsopt.compiler.calls.conditions import Condition
from tsopt.compiler.calls.counters import as_called
from tsopt.compiler.calls.effects import Effect, finish
from tsopt.compiler.calls.memory import is_repeated, overlaps
from tsopt.compiler.calls.result_views import INPUT, View
from tsopt.compiler.calls.structure import Structure, flatten, same_but_for_sharing, where_different
from tsopt.compiler.calls.types import TensorType, unlike_a_tensor
from tsopt.compiler.capture.question import LAYOUT, Question
from tsopt.errors import SignatureError

SHORT_TEXT = 160  # characters: longer signatures are shown with a path to the difference
LONG_TEXT = 300  # characters of a signature in a message


# For each axis the name of its Dim, or `past+1` where it is that much larger; none at all where every size is fixed.
Axes = tuple[str | None, ...]
ENDLESS = 1 << 48  # a size that no tensor has
DERIVED = "?"  # an axis of an output whose size follows from those of the inputs


@dataclass(frozen=True, slots=True)
class Dim:
    """A dynamic dimension: sizes from `low` to `high`, both included, in multiples of `step`."""

    name: str
    low: int = 1
    high: int | None = None
    step: int = 1

    def __str__(self) -> str:
        steps = f", multiples of {self.step}" if self.step > 1 else ""
        return f"{self.name}: {self.low}..{self.high or ''}{steps}"

    @property
    def sizes(self) -> range:
        first = -(-self.low // self.step) * self.step
        return range(first, (ENDLESS if self.high is None else self.high) + 1, self.step)

    def admits(self, size: int) -> bool:
        return size >= self.low and (self.high is None or size <= self.high) and size % self.step == 0


def dim_of(name: str) -> tuple[str, int]:
    """The Dim of a named axis, and how much larger than the Dim the axis is."""
    dim, plus, more = name.partition("+")
    return dim, int(more) if plus else 0


@dataclass(frozen=True, slots=True)
class Input:
    """A graph input: the user's tensor, or (`state`) a tensor of the model that a call writes.

    The sizes of named axes are those that the program was traced with. `asked` lists the other properties that the
    model's Python code read: a call for which they differ would have been traced differently.
    """

    name: str
    type: TensorType
    state: bool = False
    axes: Axes = ()
    asked: tuple[Question, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """A graph output: returned to the user, or written to the input named `writes` after the call.

    `view`: the memory that it shares with an input or with another result. `lasting`: it is the same in every call, so
    an engine may return memory that it keeps using.
    """

    name: str
    type: TensorType
    writes: str | None = None
    axes: Axes = ()
    view: View | None = field(default=None, repr=False)
    lasting: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs in graph order (the user's first, then state), outputs (writes first), and the user's nestings.

    `outer` nests the leaves of the call `(args, kwargs)`, `result` those of its return value, and `effects` those that
    it stores in objects of the call. `dims` are the dynamic dimensions. `aliasing`: whether it matters which tensors of
    the call are one object or share memory, because the model writes to one of them or checks. `modes` are the thread's
    modes that the model has read, and whether they were on. `collected` are the keywords that the model takes as
    `**kwargs`, whose order it can see. `default_dtype`: torch's default dtype at the capture, where what the
    model computes follows it. `conditions` on the sizes hold for every call that is served.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    outer: Structure
    result: Structure
    dims: tuple[Dim, ...] = ()
    effects: tuple[Effect, ...] = ()
    aliasing: bool = False
    modes: tuple[tuple[str, bool], ...] = ()
    collected: tuple[str, ...] = ()
    default_dtype: str = ""
    conditions: tuple[Condition, ...] = ()

    @property
    def user_inputs(self) -> tuple[Input, ...]:
        return tuple(item for item in self.inputs if not item.state)

    @property
    def state_inputs(self) -> tuple[Input, ...]:
        return tuple(item for item in self.inputs if item.state)

    @property
    def writes(self) -> tuple[Output, ...]:
        return tuple(item for item in self.outputs if item.writes is not None)

    @property
    def returned(self) -> tuple[Output, ...]:
        return tuple(item for item in self.outputs if item.writes is None)

    @property
    def written_inputs(self) -> frozenset[int]:
        """The positions of the user's inputs that a call writes."""
        names = {item.writes for item in self.writes}
        return frozenset(i for i, item in enumerate(self.user_inputs) if item.name in names)

    @property
    def devices(self) -> tuple[tuple[str, str], ...]:
        """The name of each input and output, and where it is."""
        given = ((item.name, item.type.device) for item in self.inputs)
        return (*given, *((item.name, item.type.device) for item in self.outputs))

    def flattened(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Structure]:
        """The tensors of a call, in graph order if it is like the example, and their nesting."""
        return flatten((tuple(args), self.ordered(kwargs)), share=self.aliasing)

    def ordered(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a call in the order of the example, where the model cannot see it: `f(b=2, a=1)`."""
        order = self.outer.children[1].keys
        same_keys = len(order) == len(kwargs) and all(key in kwargs for key in order)
        if same_keys and tuple(key for key in kwargs if key in self.collected) == self.collected:
            return {key: kwargs[key] for key in order}
        return dict(kwargs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The call's tensors in graph order.

        Raises:
            SignatureError: the nesting, a constant, a dtype, a shape or a device differs from the capture, or so does
                something else the model reads of its inputs, or which inputs alias.
        """
        leaves, structure = self.flattened(args, kwargs)
        outer = as_called(self.outer, leaves)
        if structure != outer:
            if self.aliasing and same_but_for_sharing(structure, outer):
                raise _other_sharing("alias in the call but not in the example, or the other way round", structure)
            place, mine, theirs = where_different(outer, structure)
            place = _place(place)
            at_place = f", at {place}" if len(str(outer)) > SHORT_TEXT and place else ""
            mine, theirs = (mine, theirs) if at_place else (outer, structure)
            raise SignatureError(
                "the call does not match the signature of the example",
                why=f"captured for {str(mine)[:LONG_TEXT]}, called with {str(theirs)[:LONG_TEXT]}{at_place}",
                fix="call it with the same arguments as the example, or optimize for this signature as well",
            )
        for item, leaf in zip(self.user_inputs, leaves, strict=True):
            odd = unlike_a_tensor(leaf)
            if odd is not None:
                raise SignatureError(f"input {item.name!r} is {odd[0]}, expected a dense tensor", fix=odd[1])
            reason = mismatch(item.type, leaf, item.axes)
            if reason:
                raise SignatureError(
                    f"input {item.name!r} {reason}",
                    fix="pass an input like the one in the example, or optimize for this input as well",
                )
            for question in item.asked:
                if not question.answered_by(leaf):
                    raise SignatureError(
                        f"input {item.name!r}: {question} differs from the example",
                        why=f"the model reads it, and its value at capture was {question.answer}",
                        fix="pass an input like the one in the example, or optimize for this input as well",
                    )
        for position, view in self.viewed:
            leaf = leaves[position]
            if hasattr(leaf, "stride") and not view.holds_for(leaf):  # an array is never handed out
                raise SignatureError(
                    f"input {self.user_inputs[position].name!r} has other strides than in the example",
                    why="a result is a view of it, which depends on its strides",
                    fix="pass an input like the one in the example, or optimize for this input as well",
                )
        for position in self.written_inputs:
            if is_repeated(leaves[position]):
                raise SignatureError(
                    f"elements of input {self.user_inputs[position].name!r} share memory",
                    why="the model writes to it, and a write to one would have to be visible in the others",
                    fix="pass a tensor with memory for each element: x.contiguous()",
                )
        for pair in overlaps(leaves) if self.aliasing else ():
            if not self.written_inputs.isdisjoint(pair):
                raise _other_sharing(f"share memory: {' and '.join(self.user_inputs[i].name for i in pair)}")
        sizes = self.sizes_of(leaves)
        reason = misfit(self.dims, sizes)
        if reason:
            raise SignatureError(reason, fix="pass sizes in the supported range, or optimize for these sizes as well")
        failed = self.unmet({name: next(iter(found)) for name, found in sizes.items()})
        if failed is not None:
            raise SignatureError(
                f"the sizes of the call do not satisfy {failed}",
                where=failed.where or None,
                why="the model depends on these sizes, and was captured for sizes where this holds",
                fix="optimize for these sizes as well",
            )
        return leaves

    def unmet(self, sizes: Mapping[str, int]) -> Condition | None:
        """The first condition that the sizes of a call, by Dim, do not satisfy; None if there is none."""
        return next((condition for condition in self.conditions if not condition.holds_at(sizes)), None)

    def admits(self, dim: Dim, size: int) -> bool:
        """Whether a size lies within the range of a Dim and meets every condition that involves no other Dim."""
        own = (condition for condition in self.conditions if condition.dims == (dim.name,))
        return dim.admits(size) and all(condition.holds(size) for condition in own)

    @property
    def decisive(self) -> tuple[Condition, ...]:
        """The conditions that sizes in the ranges may fail, for users to read: most hold in all of them."""
        sizes = {dim.name: dim.sizes for dim in self.dims}
        return tuple(item for item in self.conditions if item.may_fail([sizes[name] for name in item.dims]))

    @property
    def viewed(self) -> tuple[tuple[int, View], ...]:
        """The user's inputs, by position, whose layout decides whether a result is a view of them; and the views.

        Not those at single sizes: at all others, and in another layout, the result is a copy.
        """
        users = len(self.user_inputs)
        views = [
            item.view
            for item in self.returned
            if item.view is not None and item.view.kind == INPUT and not item.view.where
        ]
        found = {(view.of, view.layout): (view.of, view) for view in views if view.of < users}
        return tuple(pair for pair in found.values() if pair[1].layout is not None)

    @property
    def depends_on_layout(self) -> bool:
        """Whether calls may be refused for the strides of their tensors."""
        asked = any(question.name in LAYOUT for item in self.user_inputs for question in item.asked)
        return asked or bool(self.viewed) or bool(self.written_inputs)

    def sizes_of(self, leaves: Sequence[Any]) -> dict[str, set[int]]:
        """The sizes that a call has for each Dim; exactly one each if it matches this signature."""
        found: dict[str, set[int]] = {dim.name: set() for dim in self.dims}
        for item, leaf in zip(self.user_inputs, leaves, strict=True):
            for name, size in zip(item.axes, leaf.shape, strict=False):
                if name is not None:
                    dim, more = dim_of(name)
                    found[dim].add(int(size) - more)
        return found

    def tied(self, a: Dim, b: Dim) -> Signature:
        """The same with two Dims merged into one, under the name of the first."""
        highs = [dim.high for dim in (a, b) if dim.high is not None]
        one = Dim(a.name, max(a.low, b.low), min(highs, default=None), math.lcm(a.step, b.step))

        def named(axes: Axes) -> Axes:
            return tuple(
                a.name + name.removeprefix(b.name) if name and dim_of(name)[0] == b.name else name for name in axes
            )

        return replace(
            self,
            inputs=tuple(replace(item, axes=named(item.axes)) for item in self.inputs),
            outputs=tuple(
                replace(item, axes=named(item.axes), view=item.view and item.view.renamed(b.name, a.name))
                for item in self.outputs
            ),
            dims=tuple(one if dim == a else dim for dim in self.dims if dim != b),
            conditions=tuple(condition.renamed(b.name, a.name) for condition in self.conditions),
        )

    def flat(self) -> Signature:
        """The same with flat inputs and outputs: nestings may contain classes that only the user's script defines."""
        returned = len(self.returned)
        inputs = tuple(Structure("leaf", index=i) for i in range(len(self.user_inputs)))
        outputs = tuple(Structure("leaf", index=i) for i in range(returned))
        args = Structure("tuple", tuple, (), inputs)
        outer = Structure("tuple", tuple, (), (args, Structure("dict", dict)))
        result = outputs[0] if returned == 1 else Structure("tuple", tuple, (), outputs)
        return replace(self, outer=outer, result=result, effects=(), collected=())

    def unbind(self, values: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The user's return value around the returned tensors; objects of the call are modified as by the model.

        Args:
            args, kwargs: the call, which `bind` has taken.
        """
        return finish(self.result, self.effects, values, (args, kwargs))


def _place(path: str) -> str:
    """A path into `(args, kwargs)` as a user writes it: positional, or by its keyword."""
    return f"args.{path[2:]}" if path.startswith("0.") else path[2:]


def _other_sharing(how: str, called: Structure | None = None) -> SignatureError:
    names: dict[int, list[str]] = {}
    for index, path in called.paths() if called is not None else ():
        names.setdefault(index, []).append(_place(path))
    same = "; ".join(" is ".join(paths) for paths in names.values() if len(paths) > 1)
    return SignatureError(
        f"inputs {how}",
        why=f"the model writes to one of them, or checks their identity{f'; in the call {same}' if same else ''}",
        fix="pass tensors that alias exactly as in the example, or optimize for this call as well",
    )


def mismatch(expected: TensorType, value: Any, axes: Axes = ()) -> str | None:
    """Why a tensor or array is not of the expected type; None when it is. Neither strides nor named axes count."""
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != expected.dtype:
        return f"is {dtype}, expected {expected.dtype}"
    if not same_sizes(tuple(value.shape), expected.shape, axes):
        return f"has shape {list(value.shape)}, expected {shape_text(expected.shape, axes)}"
    device = str(getattr(value, "device", "cpu"))
    if device != expected.device:
        return f"is on {device}, expected {expected.device}"
    return None


def same_sizes(shape: tuple[int, ...], expected: tuple[int, ...], axes: Axes = ()) -> bool:
    """Whether the sizes of all axes without a name are as expected."""
    if not axes:
        return shape == expected
    return len(shape) == len(axes) and all(
        name is not None or mine == other for mine, other, name in zip(shape, expected, axes, strict=True)
    )


def shape_text(shape: tuple[int, ...], axes: Axes = ()) -> str:
    """`[batch, 3, 224, 224]`."""
    names = axes or (None,) * len(shape)
    return f"[{', '.join(str(size) if name is None else name for size, name in zip(shape, names, strict=True))}]"


def misfit(dims: Sequence[Dim], sizes: Mapping[str, set[int]]) -> str | None:
    """Why the sizes of a call are not those of its Dims; None when they are."""
    for dim in dims:
        found = sizes[dim.name]
        if len(found) > 1:
            return f"{dim.name} is {' and '.join(map(str, sorted(found)))} in the same call"
        if not all(map(dim.admits, found)):
            return f"{dim.name} is {next(iter(found))}, expected {str(dim).partition(': ')[2]}"
    return None
