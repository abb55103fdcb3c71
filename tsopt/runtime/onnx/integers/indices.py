"""Finds the values of a program that are used as indices, what they index, and the inputs that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.intervals import Range
from tsopt.compiler.analysis.ranged_call import Values, base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.runtime.calling.value_checks import INDEX, REFUSED

# op -> (the argument that holds indices, what they are of, whether negative ones count from the end, what eager raises)
_ALONG = ("index", "self", False, REFUSED)
USES: dict[str, tuple[str, str, bool, str]] = {
    "embedding": ("indices", "weight", False, INDEX),
    "embedding_bag": ("indices", "weight", False, REFUSED),
    "gather": _ALONG,
    "scatter": _ALONG,
    "scatter_add": _ALONG,
    "scatter_reduce": _ALONG,
    "index_add": _ALONG,
    "index_select": ("index", "self", False, INDEX),
    "index_copy": ("index", "self", False, INDEX),
    "index_fill": ("index", "self", True, INDEX),
    "index": ("indices", "self", True, INDEX),
    "index_put": ("indices", "self", True, INDEX),
    "take": ("index", "self", True, INDEX),
    "one_hot": ("self", "num_classes", False, REFUSED),
    "nll_loss": ("target", "self", False, INDEX),
    "nll_loss_nd": ("target", "self", False, INDEX),
    "nll_loss2d": ("target", "self", False, INDEX),
    "cross_entropy_loss": ("target", "self", False, INDEX),
}
# Every element of the argument is an element of the result, and nothing else is.
REARRANGED = frozenset(
    {"view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "flatten", "unflatten"}
    | {"contiguous", "clone", "alias", "detach", "repeat", "tile", "flip", "roll", "view_as", "reshape_as"}
    | {"expand_as", "unsafe_view", "movedim", "swapaxes", "ravel", "lift_fresh_copy"}
)
CASTS = frozenset({"to", "type_as", "to_copy"})


@dataclass(frozen=True, slots=True)
class Use:
    """A value that is used as an index.

    Attributes:
        call: by which call.
        index: the value.
        size: of what it indexes.
        negative: whether -size is an index too.
        error: what eager raises for one that does not exist: INDEX or REFUSED.
        also: a number that is taken although it is no index.
    """

    call: fx.Node
    index: fx.Node
    size: int
    negative: bool
    error: str
    also: int | None = None

    @property
    def range(self) -> Range:
        return Range(-self.size if self.negative else 0, self.size - 1)


def uses_of(program: Program, values: Values) -> list[Use]:
    """All uses of values as indices, in the order of the program. Not those within branches and loops."""
    return [use for node in program.calls() for use in _uses(node, values)]


def _uses(node: fx.Node, values: Values) -> Iterator[Use]:
    known = USES.get(base_name(node))
    if known is None:
        return
    place, of, negative, error = known
    call = ops.bind(node)
    if base_name(node) == "one_hot":
        yield Use(node, call[place], int(_plain(call[of], values)), negative, error)
        return
    source = call[of]
    if not isinstance(source, fx.Node):
        return
    shape = tuple(values[source].shape)
    if isinstance(call[place], (list, tuple)):
        yield from _of_axes(node, call[place], shape, values, error)
        return
    if not isinstance(call[place], fx.Node) or values[call[place]].dtype.is_floating_point:
        return  # the target of a loss may be probabilities
    also = int(_plain(call["ignore_index"], values)) if "ignore_index" in call else None
    if place == "target":
        size = shape[1] if len(shape) > 1 else shape[0]
    elif "dim" in call:
        size = shape[int(_plain(call["dim"], values))] if shape else 1
    else:
        size = torch.Size(shape).numel() if base_name(node) == "take" else shape[0]
    yield Use(node, call[place], size, negative, error, also)


def _of_axes(
    node: fx.Node, indices: Sequence[Any], shape: tuple[int, ...], values: Values, error: str
) -> Iterator[Use]:
    axis = 0
    for index in indices:
        if not isinstance(index, fx.Node):
            axis += 1
        elif values[index].dtype in (torch.bool, torch.uint8):
            axis += values[index].dim()
        else:
            yield Use(node, index, shape[axis], True, error)
            axis += 1


def _plain(value: Any, values: Values) -> Any:
    return values[value] if isinstance(value, fx.Node) else value


def is_index_only(node: fx.Node, values: Values) -> bool:
    """Whether nothing is done with a value but to look something up by it."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user in seen or ops.is_settled_check(user):
                continue
            if base_name(user) in REARRANGED or (base_name(user) in CASTS and is_whole(values.get(user))):
                seen.add(user)
                todo.append(user)
            elif not _only_indexes(user, seen, values):
                return False
    return True


def _only_indexes(user: fx.Node, nodes: set[fx.Node], values: Values) -> bool:
    """Whether a call takes these values as indices, and as nothing else."""
    as_index = sum(use.index in nodes for use in _uses(user, values))
    places: list[fx.Node] = []
    fx.node.map_arg((user.args, dict(user.kwargs)), places.append)
    return bool(as_index) and as_index == sum(place in nodes for place in places)


def is_whole(value: Any) -> bool:
    """Whether it is a tensor of integers."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    return not (value.dtype.is_floating_point or value.dtype.is_complex)


@dataclass(frozen=True, slots=True)
class Affine:
    """`factor * input + offset`, element by element."""

    input: fx.Node
    factor: int = 1
    offset: int = 0

    def inverse(self, found: Range) -> Range:
        """The inputs whose results are in a range."""
        ends = [(found.low - self.offset) / self.factor, (found.high - self.offset) / self.factor]
        low, high = min(ends), max(ends)
        return Range(-(-low // 1), high // 1)


def affine(node: fx.Node, values: Values) -> Affine | None:
    """Which input a value comes from through nothing but casts, rearrangements and constant arithmetic."""
    factor, offset = 1, 0
    while node.op != "placeholder":
        name, call = base_name(node), ops.bind(node) if ops.is_call(node) else {}
        source = next(iter(call.values()), None)
        if not isinstance(source, fx.Node) or not is_whole(values.get(node)) or not is_whole(values.get(source)):
            return None
        if name in REARRANGED or name in CASTS:
            node = source
            continue
        step = _step(name, call)
        if step is None:
            return None
        factor, offset = factor * step[0], offset + factor * step[1]
        node = source
    return Affine(node, factor, offset) if factor and is_whole(values.get(node)) else None


def _step(name: str, call: ops.Arguments) -> tuple[int, int] | None:
    """The factor and the offset of a call with a literal."""
    if name == "neg":
        return -1, 0
    other, alpha = call.get("other"), call.get("alpha", 1)
    if type(other) is not int or type(alpha) is not int:
        return None
    return {"add": (1, other * alpha), "sub": (1, -other * alpha), "rsub": (-alpha, other), "mul": (other, 0)}.get(name)
