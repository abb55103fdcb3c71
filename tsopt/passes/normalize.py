"""One form for things that can be written in several; what does nothing in inference goes. All EXACT."""

from __future__ import annotations

import operator

from tsopt.compiler.ops import aten
from tsopt.compiler.rewrite import rule


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
        return at.skip("the dropout is active")
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
    lambda x, d, y, v, p, n, m: aten._to_copy.default(
        x, dtype=d, layout=y, device=v, pin_memory=p, non_blocking=n, memory_format=m
    ),
    lambda x, d, n, c, m: aten.to.dtype(x, d, n, c, m),
    lambda x, d, y, v, p, n, c, m: aten.to.dtype_layout(
        x, dtype=d, layout=y, device=v, pin_memory=p, non_blocking=n, copy=c, memory_format=m
    ),
    lambda x, v, d, n, c, m: aten.to.device(x, v, d, n, c, m),
    lambda x, other: aten.type_as.default(x, other),
)
def cast_to_same(at, x, *_):
    """x.to(its own dtype and device) -> x"""
    return x if at.same_type(x) else None


@rule(
    lambda x, size, implicit: aten.expand.default(x, size, implicit=implicit),
    lambda x, other: aten.expand_as.default(x, other),
    lambda x, size: aten.view.default(x, size),
    lambda x, size: aten._unsafe_view.default(x, size),
    lambda x, size: aten.reshape.default(x, size),
    lambda x, first, last: aten.flatten.using_ints(x, first, last),
    lambda x: aten.squeeze.default(x),
    lambda x, dim: aten.squeeze.dim(x, dim),
    lambda x, dims: aten.squeeze.dims(x, dims),
    lambda x, dim, start, end, step: aten.slice.Tensor(x, dim, start, end, step),
    lambda x, dim, start, length: aten.narrow.default(x, dim, start, length),
    lambda x, repeats: aten.repeat.default(x, repeats),
)
def same_shape(at, x, *_):
    """view, reshape, expand, slice, repeat to the shape that x has -> x"""
    return x if at.same_type(x) else None


@rule(
    lambda x, pad, mode, value: aten.pad.default(x, pad, mode, value),
    lambda x, pad, value: aten.constant_pad_nd.default(x, pad, value),
)
def pad_nothing(at, x, pad, *_):
    """pad(x, [0, 0, ...]) -> x"""
    return None if any(pad) else x


@rule(lambda xs, dim: aten.cat.default(xs, dim))
def cat_of_one(at, xs, dim):
    """cat([x]) -> x"""
    return xs[0] if len(xs) == 1 else None


RULES = (
    batch_norm_inference,
    dropout_eval,
    copy_of_value,
    cast_to_same,
    same_shape,
    pad_nothing,
    cat_of_one,
)
