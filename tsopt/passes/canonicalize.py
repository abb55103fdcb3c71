"""Canonicalization: one form for equivalent ops, and no-ops in inference are removed. All EXACT.

Later rules may rely on: the short name of an op, `reshape` with its full shape, `permute` with non-negative axes,
`expand` and `slice.Tensor` with static bounds, `matmul`, `to.dtype(x, dtype)`, `pad`; in sums and products literals as
literals and the constant on the right.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from tsopt.compiler.analysis.intervals import wraps
from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.rewriting.rewrite import rule
from tsopt.passes import constants

WRAPS = "the value is not one of the dtype"
_LONG = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}

# An op that is another op, by its own definition in ATen.
NAMES: dict[Any, Any] = {
    aten.negative.default: aten.neg.default,
    aten.absolute.default: aten.abs.default,
    aten.fix.default: aten.trunc.default,
    aten.arctan.default: aten.atan.default,
    aten.arctan2.default: aten.atan2.default,
    aten.arctanh.default: aten.atanh.default,
    aten.arccos.default: aten.acos.default,
    aten.arccosh.default: aten.acosh.default,
    aten.arcsin.default: aten.asin.default,
    aten.arcsinh.default: aten.asinh.default,
    aten.special_expit.default: aten.sigmoid.default,
    aten.special_erf.default: aten.erf.default,
    aten.special_exp2.default: aten.exp2.default,
    aten.special_expm1.default: aten.expm1.default,
    aten.special_log1p.default: aten.log1p.default,
    aten.special_erfc.default: aten.erfc.default,
    aten.special_erfinv.default: aten.erfinv.default,
    aten.special_logit.default: aten.logit.default,
    aten.special_logsumexp.default: aten.logsumexp.default,
    aten.special_sinc.default: aten.sinc.default,
    aten.special_i0.default: aten.i0.default,
    aten.special_digamma.default: aten.digamma.default,
    aten.special_psi.default: aten.digamma.default,
    aten.special_polygamma.default: aten.polygamma.default,
    aten.special_gammaln.default: aten.lgamma.default,
    aten.special_multigammaln.default: aten.mvlgamma.default,
    aten.special_gammainc.default: aten.igamma.default,
    aten.special_gammaincc.default: aten.igammac.default,
    aten.special_xlogy.default: aten.xlogy.Tensor,
    aten.special_xlogy.self_scalar: aten.xlogy.Scalar_Self,
    aten.special_xlogy.other_scalar: aten.xlogy.Scalar_Other,
    aten.special_softmax.default: aten.softmax.int,
    aten.special_log_softmax.default: aten.log_softmax.int,
    aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default,
    aten.clip.default: aten.clamp.default,
    aten.clip.Tensor: aten.clamp.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor,
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.divide.Tensor: aten.div.Tensor,
    aten.true_divide.Tensor: aten.div.Tensor,
    aten.divide.Tensor_mode: aten.div.Tensor_mode,
    aten.divide.Scalar_mode: aten.div.Scalar_mode,
    **{getattr(aten, long).Tensor: getattr(aten, short).Tensor for long, short in _LONG.items()},
    **{getattr(aten, long).Scalar: getattr(aten, short).Scalar for long, short in _LONG.items()},
    aten.min.other: aten.minimum.default,
    aten.max.other: aten.maximum.default,
    aten.mv.default: aten.matmul.default,
    aten.dot.default: aten.matmul.default,
    aten.mm.default: aten.matmul.default,
    aten.bmm.default: aten.matmul.default,
}
# A literal becomes the same 0-d tensor, one that promotes nothing, under both overloads.
SCALAR_NAMES: dict[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.subtract.Scalar: aten.sub.Tensor,
    aten.multiply.Scalar: aten.mul.Tensor,
    aten.divide.Scalar: aten.div.Tensor,
    aten.true_divide.Scalar: aten.div.Tensor,
}


def _any_call(op: Any) -> Any:
    """A pattern of an op with any arguments."""
    by_arity = (lambda a: op(a), lambda a, b: op(a, b), lambda a, b, c: op(a, b, c))
    return by_arity[len(op._schema.arguments) - 1]


def _pair(op: Any) -> Any:
    return lambda a, b: op(a, b)


@rule(*map(_any_call, NAMES), *map(_pair, SCALAR_NAMES))
def short_name(at, *_):
    """multiply(x, y) -> mul(x, y), mul.Scalar(x, 2) -> mul.Tensor(x, 2), concat -> cat, mm -> matmul ..."""
    target, args = at.root.target, at.root.args
    if target in SCALAR_NAMES:
        return at.call(SCALAR_NAMES[target], *args[:2])
    return at.call(NAMES[target], *args, **at.root.kwargs)


@rule(lambda x: aten.square.default(x))
def square_power(at, x):
    """square(x) -> x ** 2"""
    return at.call(aten.pow.Tensor_Scalar, x, 2)


@rule(lambda xs: aten.hstack.default(xs), lambda xs: aten.vstack.default(xs), lambda xs: aten.row_stack.default(xs))
def stack_cat(at, xs):
    """hstack(xs) -> cat(xs, 1), vstack(xs) -> cat(xs, 0)"""
    ranks = {len(at.type(x).shape) for x in xs}
    axis = 1 if at.root.target is aten.hstack.default and ranks != {1} else 0
    lowest = 1 if at.root.target is aten.hstack.default else 2
    return at.call(aten.cat.default, xs, axis) if min(ranks) >= lowest and len(ranks) == 1 else None


# ---- what does nothing --------------------------------------------------------------------------------------


@rule(
    lambda x, w, b, mean, var, momentum, eps: operator.getitem(
        aten._native_batch_norm_legit_no_training.default(x, w, b, mean, var, momentum, eps), 0
    )
)
def batch_norm_inference(at, x, w, b, mean, var, momentum, eps):
    """_native_batch_norm_legit_no_training(x, ...)[0] -> batch_norm(x, ...)"""
    return at.call(aten.batch_norm.default, x, w, b, mean, var, False, momentum, eps, True)


@rule(
    lambda x, p, train: aten.dropout.default(x, p, train),
    lambda x, p, train: aten.feature_dropout.default(x, p, train),
    lambda x, p, train: aten.alpha_dropout.default(x, p, train),
    lambda x, p, train: aten.feature_alpha_dropout.default(x, p, train),
)
def dropout_eval(at, x, p, train):
    """dropout(x, p, train=False) -> x"""
    if train and p != 0:
        return at.skip("dropout is active")
    return x


@rule(
    lambda x: aten.alias.default(x),
    lambda x: aten.detach.default(x),
    lambda x: aten.lift_fresh.default(x),
    lambda x: aten.lift_fresh_copy.default(x),
    lambda x, m: aten.clone.default(x, memory_format=m),
    lambda x, m: aten.contiguous.default(x, memory_format=m),
)
def copy_of_value(at, x, m=None):
    """clone(x) -> x (also alias, detach, contiguous, lift_fresh): values are never written"""
    return x


@rule(
    lambda x, pad, mode, value: aten.pad.default(x, pad, mode, value),
    lambda x, pad, value: aten.constant_pad_nd.default(x, pad, value),
)
def pad_nothing(at, x, pad, *_):
    """pad(x, [0, 0, ...]) -> x"""
    return None if any(pad) else x


@rule(lambda x, pad, value: aten.constant_pad_nd.default(x, pad, value))
def pad_form(at, x, pad, value):
    """constant_pad_nd(x, pad, 0) -> pad(x, pad, "constant", 0.0)"""
    exact = isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53)
    if exact and wraps(value, x.meta["val"].dtype):
        return at.skip(WRAPS)
    return at.call(aten.pad.default, x, pad, "constant", float(value)) if exact else None


@rule(lambda xs, dim: aten.cat.default(xs, dim))
def cat_of_one(at, xs, dim):
    """cat([x]) -> x"""
    return xs[0] if len(xs) == 1 else None


# ---- casts --------------------------------------------------------------------------------------------------

_CASTS = (
    lambda x, d, y, v, p, n, m: aten._to_copy.default(
        x, dtype=d, layout=y, device=v, pin_memory=p, non_blocking=n, memory_format=m
    ),
    lambda x, d, n, c, m: aten.to.dtype(x, d, n, c, m),
    lambda x, d, y, v, p, n, c, m: aten.to.dtype_layout(
        x, dtype=d, layout=y, device=v, pin_memory=p, non_blocking=n, copy=c, memory_format=m
    ),
    lambda x, v, d, n, c, m: aten.to.device(x, v, d, n, c, m),
    lambda x, other, n, c, m: aten.to.other(x, other, n, c, m),
    lambda x, other: aten.type_as.default(x, other),
)


@rule(*_CASTS)
def cast_to_same(at, x, *_):
    """x.to(x.dtype, x.device) -> x"""
    return x if at.same_type(x) else None


@rule(*_CASTS)
def cast_form(at, x, *_):
    """_to_copy(x, dtype=d) -> x.to(d); also type_as(x, y), x.to(y), x.to(device, d) on the device of x"""
    before, after = at.type(x), at.type(at.root)
    is_form = at.root.target is aten.to.dtype and len(at.root.args) == 2 and not at.root.kwargs
    if is_form or before.device != after.device or before.dtype == after.dtype:
        return None
    return at.call(aten.to.dtype, x, getattr(torch, after.dtype))


# ---- moves --------------------------------------------------------------------------------------------------

_EXPANDS = (
    lambda x, size, implicit: aten.expand.default(x, size, implicit=implicit),
    lambda x, size: aten.broadcast_to.default(x, size),
    lambda x, other: aten.expand_as.default(x, other),
)
_RESHAPES = (
    lambda x, size: aten.view.default(x, size),
    lambda x, size: aten._unsafe_view.default(x, size),
    lambda x, size: aten.reshape.default(x, size),
    lambda x, other: aten.view_as.default(x, other),
    lambda x, other: aten.reshape_as.default(x, other),
    lambda x, first, last: aten.flatten.using_ints(x, first, last),
    lambda x: aten.ravel.default(x),
    lambda x, dim, sizes: aten.unflatten.int(x, dim, sizes),
    lambda x, dim: aten.unsqueeze.default(x, dim),
    lambda x: aten.squeeze.default(x),
    lambda x, dim: aten.squeeze.dim(x, dim),
    lambda x, dims: aten.squeeze.dims(x, dims),
    lambda x: aten.atleast_1d.default(x),
    lambda x: aten.atleast_2d.default(x),
    lambda x: aten.atleast_3d.default(x),
    lambda x, dim, index: aten.select.int(x, dim, index),
    lambda x, repeats: aten.repeat.default(x, repeats),
    lambda x, repeats: aten.tile.default(x, repeats),
    *_EXPANDS,
)
_SLICES = (
    lambda x, dim, start, end, step: aten.slice.Tensor(x, dim, start, end, step),
    lambda x, dim, start, length: aten.narrow.default(x, dim, start, length),
)


@rule(*_RESHAPES, *_SLICES)
def same_shape(at, x, *_):
    """view, reshape, expand, slice, repeat ... to the shape of x -> x"""
    return x if at.same_type(x) else None


@rule(*_RESHAPES)
def reshape_form(at, x, *_):
    """view(x, [2, -1]) -> reshape(x, [2, 3]); also flatten, squeeze, unsqueeze, and select or expand of size 1"""
    shape = list(at.type(at.root).shape)
    if at.type(x).numel != at.type(at.root).numel:
        return None
    is_form = at.root.target is aten.reshape.default and list(bind(at.root)["shape"]) == shape
    return None if is_form else at.call(aten.reshape.default, x, shape)


@rule(*_EXPANDS)
def expand_form(at, x, *_):
    """expand(x, [-1, 3]) -> expand(x, [2, 3]); also expand_as, broadcast_to"""
    shape, bound = list(at.type(at.root).shape), bind(at.root)
    is_form = at.root.target is aten.expand.default and list(bound["size"]) == shape and not bound["implicit"]
    return None if is_form else at.call(aten.expand.default, x, shape)


@rule(*_SLICES)
def slice_form(at, x, *_):
    """slice(x, -1, -2, 2**63 - 1) -> slice(x, 1, 2, 4); narrow(x, 1, 2, 2) -> slice(x, 1, 2, 4)"""
    bound, shape = bind(at.root), at.type(x).shape
    axis, step = bound["dim"] % len(shape), bound.get("step", 1)
    start, stop = slice(bound["start"], bound.get("end"), step).indices(shape[axis])[:2]
    if at.root.target is aten.narrow.default:
        stop = start + bound["length"]
    wanted = (axis, start, max(start, stop), step)
    if at.root.target is aten.slice.Tensor and tuple(bound[k] for k in ("dim", "start", "end", "step")) == wanted:
        return None
    return at.call(aten.slice.Tensor, x, *(wanted if step != 1 else wanted[:3]))


@rule(
    lambda x, a, b: aten.transpose.int(x, a, b),
    lambda x, a, b: aten.swapaxes.default(x, a, b),
    lambda x, a, b: aten.swapdims.default(x, a, b),
    lambda x: aten.t.default(x),
    lambda x: aten.mT.default(x),
    lambda x: aten.numpy_T.default(x),
    lambda x, source, to: aten.movedim.int(x, source, to),
    lambda x, source, to: aten.movedim.intlist(x, source, to),
    lambda x, source, to: aten.moveaxis.int(x, source, to),
    lambda x, source, to: aten.moveaxis.intlist(x, source, to),
    lambda x, axes: aten.permute.default(x, axes),
)
def permute_form(at, x, *moved):
    """transpose(x, 0, -1) -> permute(x, [2, 1, 0]), or x where no axis moves; also t, mT, movedim, swapaxes"""
    rank = len(at.type(x).shape)
    axes = _axes(at.root.target, rank, *moved)
    if axes == list(range(rank)):
        return x
    is_form = at.root.target is aten.permute.default and list(moved[0]) == axes
    return None if is_form else at.call(aten.permute.default, x, axes)


def _axes(target: Any, rank: int, *moved: Any) -> list[int]:
    """Which axis of the argument each axis of the result of a permuting op is."""
    axes = list(range(rank))
    if target is aten.permute.default:
        return [axis % rank for axis in moved[0]]
    if target is aten.numpy_T.default:
        return axes[::-1]
    if target in (aten.t.default, aten.mT.default):
        return axes[:-2] + axes[-2:][::-1]
    if not rank:
        return axes
    first, second = ([i % rank for i in (m if isinstance(m, (list, tuple)) else [m])] for m in moved)
    if target in (aten.transpose.int, aten.swapaxes.default, aten.swapdims.default):
        axes[first[0]], axes[second[0]] = axes[second[0]], axes[first[0]]
        return axes
    rest = iter(axis for axis in axes if axis not in first)
    return [first[second.index(i)] if i in second else next(rest) for i in axes]


CONVOLUTIONS = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


def _convolution(conv: Any) -> Any:
    return lambda x, w, b, s, p, d, g: conv(x, w, b, s, p, d, g)


@rule(*map(_convolution, CONVOLUTIONS))
def padding_form(at, x, w, b, s, p, d, g):
    """conv(x, w, padding="same") -> conv(x, w, padding=d * (k - 1) / 2), if that is an integer; "valid" -> 0"""
    kernel = at.type(w).shape[2:]
    dilation = list(d) * len(kernel) if len(d) == 1 else list(d)
    missing = [step * (size - 1) if p == "same" else 0 for step, size in zip(dilation, kernel, strict=True)]
    if any(total % 2 for total in missing):
        return None  # one more on one side: no padding of a convolution
    return at.call(CONVOLUTIONS[at.root.target], x, w, b, s, [total // 2 for total in missing], d, g)


RULES = (
    short_name,
    padding_form,
    square_power,
    stack_cat,
    batch_norm_inference,
    dropout_eval,
    copy_of_value,
    pad_nothing,
    pad_form,
    cat_of_one,
    cast_to_same,
    cast_form,
    same_shape,
    reshape_form,
    expand_form,
    slice_form,
    permute_form,
    *constants.FORMS,
)
