"""Example inputs, as the user passes them. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tsopt.compiler.calls.snapshot import is_leaf, iterator_in
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from tsopt.compiler.calls.signature import Signature


@dataclass(frozen=True, slots=True)
class Example:
    """The arguments of one call, positional and keyword.

    Attributes:
        written: whether the call writes to its tensors.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    written: bool = False

    def renewed(self) -> Example:
        """The same call with copies of everything it may modify: containers, objects and written tensors."""
        leaves, structure = flatten((self.args, self.kwargs))
        if self.written:
            leaves = [leaf.clone() for leaf in leaves]
        elif all(item.kind in ("leaf", "const") for group in structure.children for item in group.children):
            return self
        return Example(*unflatten(structure, leaves))

    def apart(self) -> Example:
        """The same call with a separate tensor in each place; the call itself if no tensor is passed twice."""
        leaves, structure = flatten((self.args, self.kwargs), share=False)
        if len(set(map(id, leaves))) == len(leaves):
            return self
        first = {id(leaf): place for place, leaf in reversed(list(enumerate(leaves)))}
        own = [leaf if first[id(leaf)] == place else leaf.detach().clone() for place, leaf in enumerate(leaves)]
        args, kwargs = unflatten(structure, own)
        return Example(args, kwargs, self.written)

    def as_captured(self, signature: Signature) -> Example:
        """The same call with its tensors where a program's are: one in each place, keywords in order."""
        made = Example(self.args, signature.ordered(self.kwargs), self.written)
        return made if signature.aliasing else made.apart()


def example(*args: Any, **kwargs: Any) -> Example:
    """Makes an example input; pass positional and keyword arguments as in a call of the model."""
    return Example(args, kwargs)


def as_examples(value: Any) -> tuple[Example, ...]:
    """Reads an `example_input`, or a list of several of them.

    Raises:
        UsageError: it is something else.
    """
    if type(value) is not list or len(value) < 2:
        return (as_example(value),)
    return tuple(map(as_example, value))


def as_example(value: Any) -> Example:
    """Reads an `example_input`: a tensor, a tuple (positional), a dict (keyword) or an `Example`.

    Raises:
        UsageError: it is something else, or holds a numpy array.
        CaptureError: it holds an iterator.
    """
    if isinstance(value, Example):
        made = value
    elif is_leaf(value):
        made = Example((value,))
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        made = Example((), dict(value))
    elif type(value) is tuple:
        made = Example(value)
    elif type(value) is list and value:
        raise UsageError(
            "example_input is a list",
            why="a list means several examples that differ only in their sizes",
            fix="pass positional arguments as a tuple: (x, y); wrap a single list argument in a tuple: ([x, y],)",
        )
    else:
        raise UsageError(
            f"example_input is a {type(value).__name__}",
            fix="pass a tensor, a tuple of positional arguments, a dict of keyword arguments, or "
            "tsopt.example(*args, **kwargs)",
        )
    for where, value in [*((f"args.{i}", arg) for i, arg in enumerate(made.args)), *made.kwargs.items()]:
        found = iterator_in(value)
        if found is not None:
            raise CaptureError(
                f"an input {'is' if found is value else 'holds'} an iterator: a {type(found).__name__}",
                where=f"input {where}",
                why="a call consumes it, so that the call cannot be repeated or compared",
                fix="pass a list or a tuple of what it yields",
            )
    leaves, _ = flatten((made.args, made.kwargs))
    for leaf in leaves:
        if type(leaf).__module__ == "numpy":
            raise UsageError(
                "example_input contains a numpy array",
                why="a model computes with tensors; an array would be baked into the program as a constant",
                fix="pass torch.from_numpy(array)",
            )
    return made
