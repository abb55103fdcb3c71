"""Lowers a call to one call for all branches, on values stacked along a new first axis.

Facts about ops come from the tag `pointwise` and from their schema; the exceptions are in tables, each with its reason.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import Impossible
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import tensor_type, type_of
from tsopt.passes.merge.branches import SPLITS, Group, columns, is_shared, is_weights, operands, varies
from tsopt.passes.merge.draft import Draft, Operand

# Elementwise, but without the tag.
UNTAGGED = (
    aten.hardswish.default,
    aten.floor_divide.default,
    aten.log_sigmoid.default,
    aten.rsub.Tensor,
    aten.masked_fill.Tensor,
    aten.to.dtype,
)

# The axes of the first argument that an op is told. The other arguments do not depend on the shape.
AXES: dict[Any, tuple[str, ...]] = {
    aten.softmax.int: ("dim",),
    aten.log_softmax.int: ("dim",),
    aten._softmax.default: ("dim",),
    aten._log_softmax.default: ("dim",),
    aten.mean.dim: ("dim",),
    aten.sum.dim_IntList: ("dim",),
    aten.amax.default: ("dim",),
    aten.amin.default: ("dim",),
    aten.logsumexp.default: ("dim",),
    aten.cumsum.default: ("dim",),
    aten.select.int: ("dim",),
    aten.slice.Tensor: ("dim",),
    aten.unsqueeze.default: ("dim",),
    aten.squeeze.dim: ("dim",),
    aten.transpose.int: ("dim0", "dim1"),
    aten.unbind.int: ("dim",),
    **{split: ("dim",) for split in SPLITS},
}

SHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints)
NORMS = (aten.layer_norm.default, aten.rms_norm.default)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one branch, with operands for all branches in place of its values."""

    target: Any
    arguments: dict[str, Any]
    count: int
    type: TensorType | tuple[TensorType, ...] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result in one branch, for calls with one."""
        assert isinstance(self.type, TensorType)
        return self.type.shape


Lowering = Callable[[Draft, Call], fx.Node]


def lower(draft: Draft, group: Group, read: Callable[[Group], fx.Node | None]) -> fx.Node:
    """Makes the calls of a group once; `read` gives the stacked or shared value of a column.

    Raises:
        Impossible: the op refuses, or computes something else on a stack.
    """
    found = iter([Operand(column, read(column)) for column in columns(group)])
    bound = {name: _filled(value, found) for name, value in ops.bind(group[0]).items()}
    call = Call(group[0].target, bound, len(group), type_of(group[0]))
    made = _lowering(group[0].target)(draft, call)
    wanted, has = call.type, type_of(made)
    pairs = zip(*(kind if isinstance(kind, tuple) else (kind,) for kind in (wanted, has)), strict=True)
    for each, whole in pairs:
        if each is None or whole is None or (each.dtype, (call.count, *each.shape)) != (whole.dtype, whole.shape):
            raise Impossible(f"{call.target} on stacked values returns {whole}")
    return made


def _filled(value: Any, found: Iterator[Operand]) -> Any:
    """An argument with operands in place of values."""
    if isinstance(value, fx.Node):
        return next(found)
    if isinstance(value, (list, tuple)):
        return [_filled(item, found) for item in value]
    return value


def _lowering(target: Any) -> Lowering:
    return LOWERINGS.get(target) or (along_axes if target in AXES else pointwise)


def is_pointwise(target: Any) -> bool:
    return target in UNTAGGED or (isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags)


def is_known(target: Any) -> bool:
    """Whether there is a form for stacks at all."""
    return target in LOWERINGS or target in AXES or is_pointwise(target)


def fits(group: Group) -> bool:
    """Whether the calls of a group can be made once on stacks."""
    target = group[0].target
    if len({len(operands(member)) for member in group}) > 1:  # of sizes, one may be computed and another one known
        return False
    numbers = [column for column in columns(group) if type_of(column[0]) is None]  # that the program computes
    if numbers and not (is_pointwise(target) and all(map(is_shared, numbers))):
        return False
    if target in CONDITIONS:
        return CONDITIONS[target](group)
    if target in AXES:
        return bool(tensor_type(operands(group[0])[0]).shape)  # a 0-d value has no axis
    return _pointwise_fits(group) if is_pointwise(target) else is_known(target)


def _rank(node: fx.Node) -> int:
    return len(tensor_type(node).shape)


def _pointwise_fits(group: Group) -> bool:
    # NOTE: a stack of 0-d values is no longer 0-d, and promotes dtypes as 0-d values do not.
    read = [column for column in columns(group) if type_of(column[0]) is not None]
    one_dtype = len({tensor_type(column[0]).dtype for column in read}) == 1
    return one_dtype or not any(_rank(column[0]) == 0 and not is_shared(column) for column in read)


def is_plain(layer: fx.Node) -> bool:
    """Whether a linear layer has a matrix, and a bias for each of its rows; the op takes others, which broadcast."""
    _, weight, *bias = operands(layer)
    shape = tensor_type(weight).shape
    return len(shape) == 2 and all(tensor_type(value).shape == shape[:1] for value in bias)


def _linear_fits(group: Group) -> bool:
    _, weights, *bias = columns(group)
    if not is_plain(group[0]):
        return False
    if is_shared(weights):
        return all(map(is_shared, bias))
    return is_weights(weights) and all(is_weights(column) for column in bias)


def _norm_fits(group: Group) -> bool:
    return all(is_shared(column) or is_weights(column) for column in columns(group)[1:])


def _matmul_fits(group: Group) -> bool:
    return all(_rank(value) >= 2 for value in operands(group[0]))  # a product with a vector is another op


def _attention_fits(group: Group) -> bool:
    rank, batch = _rank(group[0]), tensor_type(group[0]).shape[:1]
    return rank <= 4 and all(
        _rank(value) == rank and tensor_type(value).shape[:1] == batch for value in operands(group[0])[:3]
    )


def _cat_fits(group: Group) -> bool:
    return all(_rank(value) == _rank(group[0]) for value in operands(group[0]))  # cat leaves out empty vectors


def _item_fits(group: Group) -> bool:
    (split,) = columns(group)
    return split[0].target in AXES and varies(split)


# ---- the ops ------------------------------------------------------------------------------------------------------


def pointwise(draft: Draft, call: Call) -> fx.Node:
    """f(x_i, y) -> f on stacks that broadcast as the values do."""
    rank = len(call.shape)
    arguments = [draft.aligned(v, rank) if isinstance(v, Operand) else v for v in call.arguments.values()]
    return _called(draft, call, arguments)


def along_axes(draft: Draft, call: Call) -> fx.Node:
    """f(x_i, axis) -> f(stack, axis + 1), axes from the end as they are."""
    arguments = dict(call.arguments)
    first = next(iter(arguments))
    operand: Operand = arguments[first]
    rank = len(operand.type.shape)
    for name in AXES[call.target]:
        axes = arguments[name]
        if axes is None or axes == []:  # all of them
            arguments[name] = list(range(1, rank + 1))
        else:
            arguments[name] = [_behind(axis) for axis in axes] if isinstance(axes, list) else _behind(axes)
    arguments[first] = draft.aligned(operand, rank)
    return _called(draft, call, list(arguments.values()))


def _behind(axis: int) -> int:
    return axis + 1 if axis >= 0 else axis


def _called(draft: Draft, call: Call, arguments: list[Any]) -> fx.Node:
    """The op on new arguments, in the form that its schema asks for: by position, by name, defaults left out."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for item, value in zip(call.target._schema.arguments, arguments, strict=True):
        if item.kwarg_only:
            if not item.has_default_value() or value != item.default_value:
                named[item.name] = value
        else:
            positional.append(value)
    return draft.call(call.target, *positional, **named)


def linear(draft: Draft, call: Call) -> fx.Node:
    """x_i @ w_i.T + b_i -> baddbmm(b, x, w) with b [E, 1, N], x [E, rows, K], w [E, K, N]."""
    x, w, b = (call.arguments[name] for name in ("input", "weight", "bias"))
    if w.shared:
        return draft.call(aten.linear.default, draft.stack(x), w.each[0], *([b.each[0]] if b is not None else []))
    n, k = w.type.shape
    rows = math.prod(x.type.shape[:-1])
    if x.shared:
        flat = draft.call(aten.expand.default, draft.reshape(x.each[0], [rows, k]), [call.count, rows, k])
    else:
        flat = draft.reshape(draft.stack(x), [call.count, rows, k])
    weight = draft.weights(w.each, lambda values: torch.stack([value.t() for value in values]))
    if b is None:
        made = draft.call(aten.matmul.default, flat, weight)
    else:
        bias = draft.weights(b.each, lambda values: torch.stack(values).reshape(call.count, 1, n))
        made = draft.call(aten.baddbmm.default, bias, flat, weight)
    return draft.reshape(made, [call.count, *call.shape])


def norm(draft: Draft, call: Call) -> fx.Node:
    """Layer norms with weights of their own -> one without weights, then scale and shift by stacks."""
    x: Operand = call.arguments["input"]
    w, b = (call.arguments.get(name) for name in ("weight", "bias"))
    rank = len(call.shape)
    arguments = dict(call.arguments)
    arguments["input"] = draft.aligned(x, rank)
    apart = any(operand is not None and not operand.shared for operand in (w, b))
    for name, operand in (("weight", w), ("bias", b)):
        if operand is not None:
            arguments[name] = None if apart else operand.each[0]
    value = _called(draft, call, list(arguments.values()))
    if not apart:
        return value
    scale, shift = (None if operand is None else draft.aligned(operand, rank) for operand in (w, b))
    if scale is not None and shift is not None:
        return draft.call(aten.addcmul.default, shift, value, scale)
    return draft.call(aten.mul.Tensor, value, scale) if shift is None else draft.call(aten.add.Tensor, value, shift)


def matmul(draft: Draft, call: Call) -> fx.Node:
    """x_i @ y_i -> x @ y on stacks, for values of two axes and more."""
    x, y = (call.arguments[name] for name in ("self", "other"))
    rank = len(call.shape)
    return draft.call(aten.matmul.default, draft.aligned(x, rank), draft.aligned(y, rank))


def attention(draft: Draft, call: Call) -> fx.Node:
    """scaled_dot_product_attention(q_i, k_i, v_i) -> the same on stacks.

    Its kernels take four axes: where a branch has them all, its axis becomes part of the batch.
    """
    rank = len(call.shape)
    arguments = dict(call.arguments)
    for name in ("query", "key", "value"):
        arguments[name] = draft.stack(arguments[name])
        if rank == 4:
            arguments[name] = _in_batch(draft, arguments[name])
    mask = arguments["attn_mask"]
    if isinstance(mask, Operand):
        arguments["attn_mask"] = draft.aligned(mask, rank)
        if rank == 4 and (not mask.shared or (len(mask.type.shape) == 4 and mask.type.shape[0] != 1)):
            own = [1] * (4 - len(mask.type.shape)) + list(mask.type.shape)
            whole = [call.count, call.shape[0], *own[1:]]
            arguments["attn_mask"] = _in_batch(draft, draft.call(aten.expand.default, arguments["attn_mask"], whole))
    made = _called(draft, call, list(arguments.values()))
    return draft.reshape(made, [call.count, *call.shape])


def _in_batch(draft: Draft, value: fx.Node) -> fx.Node:
    """The first two axes as one."""
    shape = tensor_type(value).shape
    return draft.reshape(value, [shape[0] * shape[1], *shape[2:]])


def cat(draft: Draft, call: Call) -> fx.Node:
    """[x_i, y] side by side -> [x, expand(y)] side by side, one axis further."""
    parts: list[Operand] = call.arguments["tensors"]
    rank = len(call.shape)
    return draft.call(aten.cat.default, [draft.stack(part) for part in parts], call.arguments["dim"] % rank + 1)


def reshaped(draft: Draft, call: Call) -> fx.Node:
    """reshape(x_i, shape) -> reshape(x, [E, *shape])."""
    return draft.reshape(draft.stack(call.arguments["self"]), [call.count, *call.shape])


def permuted(draft: Draft, call: Call) -> fx.Node:
    """permute(x_i, axes) -> permute(x, [0, *(axes + 1)])."""
    x, rank = call.arguments["self"], len(call.shape)
    return draft.permute(draft.stack(x), [0, *(axis % rank + 1 for axis in call.arguments["dims"])])


def expanded(draft: Draft, call: Call) -> fx.Node:
    """expand(x_i, shape) -> expand(x, [E, *shape])."""
    value = draft.aligned(call.arguments["self"], len(call.shape))
    return draft.call(aten.expand.default, value, [call.count, *call.shape])


def item(draft: Draft, call: Call) -> fx.Node:
    """xs_i[k] -> xs[k]."""
    return draft.call(operator.getitem, call.arguments["0"].whole, call.arguments["1"])


LOWERINGS: dict[Any, Lowering] = {
    aten.linear.default: linear,
    aten.matmul.default: matmul,
    aten.bmm.default: matmul,
    aten.scaled_dot_product_attention.default: attention,
    aten.cat.default: cat,
    aten.permute.default: permuted,
    aten.expand.default: expanded,
    operator.getitem: item,
    **{target: reshaped for target in SHAPES},
    **{target: norm for target in NORMS},
}
CONDITIONS: dict[Any, Callable[[Group], bool]] = {
    aten.linear.default: _linear_fits,
    aten.matmul.default: _matmul_fits,
    aten.bmm.default: _matmul_fits,
    aten.scaled_dot_product_attention.default: _attention_fits,
    aten.cat.default: _cat_fits,
    operator.getitem: _item_fits,
    **{target: _norm_fits for target in NORMS},
}
