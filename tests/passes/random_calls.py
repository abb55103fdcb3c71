"""Single calls with arguments that fit, drawn with Hypothesis, for a program under construction.

What the calls are put together to is in random_programs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from tests.passes.program_builder import Builder
from tsopt.compiler.graph.ops import aten

FLOATS = (torch.float32, torch.float64, torch.float16)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.bfloat16)
CASTS = (torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.int32)
LITERALS = (1, 0, 2, 1.0, 0.0, -0.0, 0.5, -1, 4.0, 3, -2.0, 0.1, -1.0, 1e-5, 0.125, float("inf"), True)
EPS = (1e-5, 1e-6, 1e-12, 0.1)


# ---- arguments --------------------------------------------------------------------------------------------


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point()


def rank(low: int, high: int | None = None) -> Callable[[torch.Tensor], bool]:
    return lambda t: t.is_floating_point() and low <= t.dim() <= (low if high is None else high)


def broadcasts(small: torch.Tensor, large: torch.Tensor) -> bool:
    return all(i in (1, j) for i, j in zip(small.shape[::-1], large.shape[::-1], strict=False))


def other(b: Builder, x: fx.Node) -> Any:
    """The second operand of arithmetic: a literal, a weight that broadcasts, or a value."""
    kind = b.integer(0, 5)
    t = b.fake(x)
    if kind <= 2:
        return b.pick(LITERALS)
    if kind == 3:
        return b.value(lambda u: u.dim() <= t.dim() and broadcasts(u, t))
    size = list(t.shape)
    shape = b.pick([size, size[-1:], [1] * len(size), [], [1, *size[1:2], *[1] * (len(size) - 2)] if size else []])
    dtype = t.dtype if b.often() else b.pick(DTYPES)
    return b.random(shape, dtype)


def axis(b: Builder, x: fx.Node) -> int:
    n = max(b.fake(x).dim(), 1)
    return b.integer(-n, n - 1)


def permutation(b: Builder, x: fx.Node) -> list[int]:
    n = b.fake(x).dim()
    order = list(b.draw(st.permutations(range(n))))
    return [i - n if b.integer(0, 5) == 5 else i for i in order]


def shape_for(b: Builder, x: fx.Node) -> list[int]:
    """Another shape of as many elements."""
    t = b.fake(x)
    n, size = t.numel(), list(t.shape)
    factors = [[i, n // i] for i in (2, 3, 4, 6) if n and n % i == 0]
    forms = [[n], size, [1, n], [*size, 1], [-1], *factors, [2, -1], [-1, *size[-1:]], [*size[:-2], -1], size[::-1]]
    return list(b.pick(forms))


def layer(b: Builder, x: fx.Node, shape: Sequence[int], bias: int | None) -> tuple[fx.Node, fx.Node | None]:
    dtype = b.fake(x).dtype
    with_bias = b.often(3) and bias is not None
    return b.random(shape, dtype), b.random([bias], dtype) if with_bias else None


def linear_args(b: Builder, x: fx.Node) -> dict[str, Any]:
    n, out = b.fake(x).shape[-1], b.integer(1, 4)
    w, bias = layer(b, x, [out, n], out)
    return {"input": x, "weight": w, "bias": bias}


def conv_args(b: Builder, x: fx.Node, transposed: bool = False) -> dict[str, Any]:
    n = 2 if b.fake(x).dim() == 4 else b.fake(x).dim() - 2
    channels, groups = b.fake(x).shape[1], 1
    if channels and channels % 2 == 0 and not b.often(3):
        groups = 2
    out, kernel = groups * b.integer(1, 2), b.integer(1, 3)
    shape = [channels, out // groups] if transposed else [out, channels // groups]
    w, bias = layer(b, x, [*shape, *[kernel] * n], out)
    stride, padding, dilation = [b.integer(1, 2)] * n, [b.integer(0, 1)] * n, [1] * n
    args = {"input": x, "weight": w, "bias": bias, "stride": stride, "padding": padding, "groups": groups}
    return args | {"dilation": dilation} | ({"output_padding": [0] * n} if transposed else {})


def batch_norm_args(b: Builder, x: fx.Node) -> dict[str, Any]:
    c, dtype = b.fake(x).shape[1], b.fake(x).dtype
    affine, variance = b.often(), b.random([c], dtype)
    b.program.weights[str(variance.target)] = b.real[variance] = b.real[variance].abs() + 0.25
    gamma, beta = (b.random([c], dtype) if affine else None for _ in range(2))
    return {
        "input": x, "weight": gamma, "bias": beta, "running_mean": b.random([c], dtype), "running_var": variance,
        "training": False, "momentum": 0.1, "eps": b.pick(EPS), "cudnn_enabled": True,
    }  # fmt: skip


def layer_norm_args(b: Builder, x: fx.Node) -> dict[str, Any]:
    t = b.fake(x)
    shape = list(t.shape[-b.integer(1, min(2, t.dim())) :])
    w = [b.random(shape, t.dtype) if b.often(3) else None for _ in range(2)]
    return {"input": x, "normalized_shape": shape, "weight": w[0], "bias": w[1], "eps": b.pick(EPS)}


def attention_args(b: Builder, q: fx.Node) -> dict[str, Any]:
    t = b.fake(q)
    like = lambda u: u.dtype == t.dtype and u.dim() == t.dim() and u.shape[-1] == t.shape[-1]  # noqa: E731
    k, v = b.value(like) or q, b.value(like) or q
    length, keys = t.shape[-2], b.fake(k).shape[-2]
    mask = b.pick([None, None, b.random([length, keys], t.dtype), b.random([length, keys], torch.bool)])
    return {"query": q, "key": k, "value": v, "attn_mask": mask, "scale": b.pick([None, None, 0.5, 1.0])}


def embedding_args(b: Builder, x: fx.Node) -> dict[str, Any]:
    return {"weight": b.random([7, b.integer(1, 4)], b.pick(FLOATS)), "indices": x}


# How to call an op on a value: which values it takes, and the arguments around one. A target without an entry is filled
# by the types of its schema.
Fill = tuple[Callable[[torch.Tensor], bool], Callable[[Builder, fx.Node], dict[str, Any]]]
FILL: dict[Any, Fill] = {
    aten.linear.default: (rank(1, 4), linear_args),
    aten.conv1d.default: (rank(3), conv_args),
    aten.conv2d.default: (rank(4), conv_args),
    aten.conv_transpose2d.input: (rank(4), lambda b, x: conv_args(b, x, transposed=True)),
    aten.batch_norm.default: (rank(2, 4), batch_norm_args),
    aten._native_batch_norm_legit_no_training.default: (rank(2, 4), batch_norm_args),
    aten.layer_norm.default: (rank(1, 4), layer_norm_args),
    aten.scaled_dot_product_attention.default: (rank(3, 4), attention_args),
    aten.embedding.default: (lambda t: t.dtype == torch.int64, embedding_args),
    aten.permute.default: (lambda t: True, lambda b, x: {"self": x, "dims": permutation(b, x)}),
    aten.view.default: (lambda t: True, lambda b, x: {"self": x, "size": shape_for(b, x)}),
    aten.reshape.default: (lambda t: True, lambda b, x: {"self": x, "shape": shape_for(b, x)}),
    aten._unsafe_view.default: (lambda t: True, lambda b, x: {"self": x, "size": shape_for(b, x)}),
    aten.softmax.int: (is_float, lambda b, x: {"self": x, "dim": axis(b, x)}),
    aten.log_softmax.int: (is_float, lambda b, x: {"self": x, "dim": axis(b, x)}),
    aten.expand.default: (
        lambda t: True,
        lambda b, x: {"self": x, "size": [*b.pick([(), (2,)]), *(3 if s == 1 else s for s in b.fake(x).shape)]},
    ),
    aten.slice.Tensor: (
        lambda t: t.dim() > 0,
        lambda b, x: {"self": x, "dim": axis(b, x), "start": b.pick((0, 1, -1, None)),
                      "end": b.pick((9223372036854775807, -1, 2, None)), "step": b.pick((1, 1, 2))},
    ),
    aten.split.Tensor: (
        lambda t: t.dim() > 0, lambda b, x: {"self": x, "split_size": b.integer(1, 2), "dim": axis(b, x)}
    ),
    aten.pad.default: (
        lambda t: t.dim() > 0,
        lambda b, x: {"self": x, "pad": list(b.pick(((1, 1), (0, 0), (0, 1), (-1, 0), (1, 1, 1, 1), (2, 2, 0, 0))))},
    ),
    aten.constant_pad_nd.default: (
        lambda t: t.dim() > 0,
        lambda b, x: {"self": x, "pad": list(b.pick(((1, 1), (0, 0), (1, 1, 1, 1)))), "value": b.pick((0, 0.0, 1))},
    ),
    aten.max_pool2d.default: (rank(4), lambda b, x: {"self": x, "kernel_size": [2, 2], "stride": [1, 1]}),
    aten.avg_pool2d.default: (rank(4), lambda b, x: {"self": x, "kernel_size": [2, 2], "stride": [1, 1]}),
    aten.adaptive_avg_pool2d.default: (rank(4), lambda b, x: {"self": x, "output_size": [b.integer(1, 2)] * 2}),
    aten.dropout.default: (is_float, lambda b, x: {"input": x, "p": b.pick((0.1, 0.0)), "train": False}),
    aten.repeat.default: (
        lambda t: True, lambda b, x: {"self": x, "repeats": [b.pick((1, 1, 2)) for _ in b.fake(x).shape]}
    ),
    aten.pow.Tensor_Scalar: (
        lambda t: True, lambda b, x: {"self": x, "exponent": b.pick((2, 1, 0.5, 3, -1, 2.0, -0.5, 0, 1.0, 1.5, 4))}
    ),
    aten.masked_fill.Scalar: (
        lambda t: True, lambda b, x: {"self": x, "mask": mask_for(b, x), "value": b.pick(LITERALS)}
    ),
    aten.where.self: (
        lambda t: True,
        lambda b, x: {"condition": mask_for(b, x), "self": x, "other": b.random(b.fake(x).shape, b.fake(x).dtype)},
    ),
    aten.clamp.default: (
        lambda t: True, lambda b, x: {"self": x, "min": b.pick((0, -1.0, None)), "max": b.pick((1, 6.0))}
    ),
    aten.hardtanh.default: (is_float, lambda b, x: {"self": x, "min_val": b.pick((-1, 0)), "max_val": b.pick((1, 6))}),
}  # fmt: skip


def mask_for(b: Builder, x: fx.Node) -> fx.Node:
    t = b.fake(x)
    fits = lambda u: u.dtype == torch.bool and u.shape in (t.shape, t.shape[-1:])  # noqa: E731
    return b.value(fits) or b.random(b.pick([t.shape, t.shape[-1:]]), torch.bool)


def arguments(b: Builder, target: Any, known: dict[str, Any]) -> dict[str, Any] | None:
    """All arguments of a call by name, some of them given; None where no value fits."""
    schema = target._schema.arguments
    first = next(a.name for a in schema if "Tensor" in str(a.type))
    fits, fill = FILL.get(target, (lambda t: True, lambda b, x: {}))
    x = known.get(first)
    if first not in known and "List" not in str(next(a.type for a in schema if a.name == first)):
        x = b.wanted(fits)
        if x is None:
            return None
    x = x if isinstance(x, fx.Node) else None  # a literal, or a list of values
    made = dict(fill(b, x)) | known if x is not None and fits(b.fake(x)) else dict(known)
    for item in schema:
        if item.name in made:
            continue
        if item.name == first and x is not None:
            made[item.name] = x
        elif item.has_default_value() and b.often(6):
            made[item.name] = item.default_value
        else:
            made[item.name] = by_type(b, str(item.real_type), item.name, x)
    return {item.name: made[item.name] for item in schema}


def by_type(b: Builder, kind: str, name: str, x: fx.Node | None) -> Any:
    """An argument of a schema's type."""
    x = x if x is not None else b.value()
    if x is None:
        return None
    if kind.startswith("Optional["):
        if not b.often(3):
            return None
        kind = kind.removeprefix("Optional[").removesuffix("]")
    choices: dict[str, Callable[[], Any]] = {
        "Tensor": lambda: other(b, x),
        "List[Tensor]": lambda: [x, *([] if b.integer(0, 2) else [b.value(lambda t: t.shape == b.fake(x).shape) or x])],
        "List[int]": lambda: b.pick([[axis(b, x)], list(b.fake(x).shape), shape_for(b, x), permutation(b, x)]),
        "bool": lambda: not b.often(),
        "int": lambda: axis(b, x) if name.startswith(("dim", "start_dim", "end_dim", "axis")) else b.integer(0, 2),
        "float": lambda: b.pick(EPS),
        "number": lambda: b.pick(LITERALS),
        "ScalarType": lambda: b.pick(CASTS),
        "Device": lambda: torch.device("cpu"),
        "MemoryFormat": lambda: b.pick((torch.contiguous_format, torch.preserve_format)),
    }
    return choices[kind]() if kind in choices else None


def make(b: Builder, target: Any, known: dict[str, Any] | None = None) -> fx.Node | None:
    """One call of an op, with arguments that fit."""
    found = arguments(b, target, known or {})
    if found is None:
        return None
    args, kwargs = [], {}
    for item in target._schema.arguments:
        if item.kwarg_only and item.has_default_value() and found[item.name] == item.default_value:
            continue
        if item.kwarg_only:
            kwargs[item.name] = found[item.name]
        else:
            args.append(found[item.name])
    return b.call(target, *args, **kwargs)


# ---- single ops -------------------------------------------------------------------------------------------

ELEMENTWISE = (
    aten.neg.default, aten.relu.default, aten.abs.default, aten.sigmoid.default, aten.tanh.default, aten.sqrt.default,
    aten.rsqrt.default, aten.reciprocal.default, aten.exp.default, aten.log.default, aten.sin.default, aten.erf.default,
    aten.silu.default, aten.gelu.default, aten.square.default, aten.floor.default, aten.sign.default,
    aten.logical_not.default, aten.bitwise_not.default, aten.softplus.default, aten.hardswish.default,
    aten.hardsigmoid.default, aten.leaky_relu.default, aten.elu.default, aten.relu6.default, aten.clamp.default,
    aten.hardtanh.default, aten.log1p.default, aten.expm1.default,
)  # fmt: skip
ARITHMETIC = (
    aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.add.Scalar, aten.mul.Scalar,
    aten.sub.Scalar, aten.div.Scalar, aten.rsub.Scalar, aten.maximum.default, aten.minimum.default,
    aten.pow.Tensor_Scalar, aten.pow.Tensor_Scalar, aten.where.self, aten.masked_fill.Scalar, aten.gt.Scalar,
    aten.eq.Tensor, aten.lt.Tensor, aten.logical_and.default, aten.remainder.Scalar,
)  # fmt: skip
DATA_MOVEMENT = (
    aten.permute.default, aten.transpose.int, aten.t.default, aten.view.default, aten.reshape.default,
    aten.flatten.using_ints, aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default, aten.expand.default,
    aten.slice.Tensor, aten.select.int, aten.cat.default, aten.stack.default, aten.repeat.default, aten.flip.default,
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.pad.default,
    aten.constant_pad_nd.default, aten.to.dtype, aten.to.dtype, aten._to_copy.default, aten.type_as.default,
    aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
)  # fmt: skip
REDUCTIONS = (
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.argmax.default, aten.any.dim, aten.cumsum.default,
    aten.var.correction, aten.sum.default,
)  # fmt: skip
LAYERS = (
    aten.linear.default, aten.linear.default, aten.conv2d.default, aten.conv2d.default, aten.conv1d.default,
    aten.conv_transpose2d.input, aten.batch_norm.default, aten.layer_norm.default, aten.softmax.int,
    aten.log_softmax.int, aten.scaled_dot_product_attention.default, aten.matmul.default, aten.max_pool2d.default,
    aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.dropout.default, aten.embedding.default,
)  # fmt: skip
