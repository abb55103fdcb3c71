"""Folds scales and shifts into the weights of the preceding convolution or linear layer. All ROUNDING.

Scales and shifts are computed in float64. Source of the method: Jacob et al. 2018,
arXiv:1712.05877, section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.large_terms import absorbs
from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.match import same
from tsopt.compiler.rewriting.rewrite import Site, Skip, rule
from tsopt.passes.constants import ABSORBS

CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
)
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
LITERAL_PADDED = CONVOLUTIONS[:3]

COMPUTED = "a weight is computed at run time"
NO_STATISTICS = "batch norm without running statistics uses batch statistics"
TRAINING = "batch norm in training mode uses batch statistics"
NOT_REAL = "the weights are not real floating-point numbers"
NO_BATCH = "the input has no batch axis, so the norm is over a different axis"
NOT_FINITE = "a folded weight would not be finite"
NO_MEMORY = "others read the weight as it is, and folded copies of it would take too much memory"
TOO_SMALL = "the folded weights would be too small for their dtype to hold all digits"

MEMORY = 256 << 20  # bytes of copies in all
COPIED = ".folded_copy"  # in the names of weights whose originals were still read when they were made


def fold(at: Site, layer: fx.Node, scale: torch.Tensor, shift: torch.Tensor) -> fx.Node | Skip:
    """The layer with `y * scale + shift` (float64, one value for each output channel) inside its weights."""
    arguments = bind(layer)
    weight, bias = at.value(arguments["weight"]), arguments["bias"]
    old_bias = None if bias is None else at.value(bias)
    if weight is None or (bias is not None and old_bias is None):
        return at.skip(COMPUTED)
    if not weight.is_floating_point():
        return at.skip(NOT_REAL)
    # NOTE: scales are made in float64 and rounded once; products in float64 would cost 10x the time for half an ulp.
    wide = torch.promote_types(weight.dtype, torch.float32)
    factor = scale.to(wide)
    is_scaled = bool((factor != 1).any())
    is_copied = is_scaled and not all(_is_alike(at.root, layer, other) for other in arguments["weight"].users)
    if is_copied and weight.nbytes > MEMORY:
        return at.skip(NO_MEMORY)
    new = _scaled(layer, weight, factor).to(weight.dtype) if is_scaled else weight
    new_bias = (shift if old_bias is None else old_bias.double() * scale + shift).to(weight.dtype)
    # NOTE: a sum is finite only where every element is; it may overflow by itself, so look closer then.
    suspect = not bool(new.sum().isfinite() and new_bias.isfinite().all())
    if suspect and bool(weight.isfinite().all()) and not bool(new.isfinite().all() and new_bias.isfinite().all()):
        return at.skip(NOT_FINITE)
    if old_bias is not None and absorbs(old_bias, weight.dtype):
        return at.skip(ABSORBS)
    smallest = torch.finfo(weight.dtype).smallest_normal
    if bool(factor.any()) and _largest(new) < smallest <= _largest(weight):
        return at.skip(TOO_SMALL)
    # NOTE: what is that small in float32 is a dead channel of a batch norm; in float16, it is an ordinary number.
    if weight.numel() and smallest > torch.finfo(torch.float32).smallest_normal:
        largest = _by_channel(layer, new)
        lost = (largest < smallest) & (_by_channel(layer, weight) >= smallest) & (factor != 0)
        hidden = new_bias.abs().double() * torch.finfo(weight.dtype).eps >= largest  # below the digits of the bias
        if bool((lost & ~hidden).any()):
            return at.skip(TOO_SMALL)
    name = str(arguments["weight"].target)
    if is_scaled:
        arguments["weight"] = at.constant(new, name + (COPIED if is_copied else ".folded"))
    if is_copied and at.made.bytes_of(COPIED) > MEMORY:
        return at.skip(NO_MEMORY)
    arguments["bias"] = at.constant(new_bias, f"{name.removesuffix('weight')}bias.folded")
    target: Any = layer.target
    return at.call_from(layer, target, *arguments.values())


def _is_alike(root: fx.Node, layer: fx.Node, other: fx.Node) -> bool:
    """Whether another reader of a layer's weight is such a layer, and has only what the root does behind it.

    Then both become one layer with one folded weight, and neither of them reads the old one.
    """
    if other is layer:
        return True
    if other.target is not layer.target or len(other.users) != 1:
        return False
    (behind,) = other.users
    mine, theirs = layer.meta["val"], other.meta["val"]
    is_same_layer = mine.dim() == theirs.dim() and _same_call(layer, bind(layer)["input"], other, bind(other)["input"])
    return is_same_layer and behind.target is root.target and _same_call(root, layer, behind, other)


def _same_call(first: fx.Node, its: object, second: fx.Node, others: object) -> bool:
    """Whether two calls of an op have the same arguments, but for what each of them is applied to."""
    mine, theirs = bind(first), bind(second)
    return all((mine[key] is its and theirs[key] is others) or same(mine[key], theirs[key]) for key in mine)


def _scaled(layer: fx.Node, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The weight times a factor for each output channel."""
    if layer.target not in TRANSPOSED:
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
    groups = bind(layer)["groups"]
    split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    return (split * factor.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))).reshape(weight.shape)


def _largest(weight: torch.Tensor) -> float:
    """The largest magnitude; beside it, the digits that smaller weights lose do not matter."""
    return max(map(abs, map(float, weight.aminmax()))) if weight.numel() else 0.0


def _by_channel(layer: fx.Node, weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each output channel."""
    if layer.target not in TRANSPOSED:
        return weight.flatten(1).abs().amax(1)
    groups = bind(layer)["groups"]
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).abs().amax((1, 3)).flatten()


def _batch_norm_patterns() -> list[Any]:
    def over(conv: Any) -> Any:
        return lambda x, w, b, s, p, d, g, gamma, beta, mean, var, training, eps, m, c: aten.batch_norm.default(
            conv(x, w, b, s, p, d, g), gamma, beta, mean, var, training, m, eps, c
        )

    def over_transposed(conv: Any) -> Any:
        return lambda x, w, b, s, p, o, g, d, gamma, beta, mean, var, training, eps, m, c: aten.batch_norm.default(
            conv(x, w, b, s, p, o, g, d), gamma, beta, mean, var, training, m, eps, c
        )

    def over_linear(x, w, b, gamma, beta, mean, var, training, eps, m, c):
        return aten.batch_norm.default(aten.linear.default(x, w, b), gamma, beta, mean, var, training, m, eps, c)

    return [*map(over, CONVOLUTIONS), *map(over_transposed, TRANSPOSED), over_linear]


@rule(*_batch_norm_patterns(), numerics=Numerics.ROUNDING)
def conv_batch_norm(at, *holes):
    """batch_norm(conv(x, w, b)) -> conv(x, w * s, (b - mean) * s + beta), s = gamma / sqrt(var + eps)"""
    norm = bind(at.root)
    layer = norm["input"]
    if norm["running_mean"] is None:
        return at.skip(NO_STATISTICS)
    if norm["training"]:
        return at.skip(TRAINING)
    if layer.target is not aten.linear.default and len(at.type(layer).shape) != len(at.type(weight_of(layer)).shape):
        return at.skip(NO_BATCH)
    if layer.target is aten.linear.default and len(at.type(layer).shape) != 2:
        return at.skip("the channels of the norm are not the output features of the linear layer")
    if layer.target is aten.linear.default and len(at.type(weight_of(layer)).shape) != 2:
        return None  # a vector of weights: a dot product, without output features
    gamma, beta, mean, var = (at.value(norm[k]) for k in ("weight", "bias", "running_mean", "running_var"))
    if (
        mean is None
        or var is None
        or any(norm[k] is not None and at.value(norm[k]) is None for k in ("weight", "bias"))
    ):
        return at.skip(COMPUTED)
    if beta is not None and absorbs(beta, at.root.meta["val"].dtype):
        return at.skip(ABSORBS)
    scale = (var.double() + norm["eps"]).rsqrt()
    if gamma is not None:
        scale = scale * gamma.double()
    shift = -mean.double() * scale
    return fold(at, layer, scale, shift if beta is None else shift + beta.double())


def _layer_patterns(then: Any) -> list[Any]:
    def over(conv: Any) -> Any:
        return lambda x, w, b, s, p, d, g, k: then(conv(x, w, b, s, p, d, g), k)

    def over_transposed(conv: Any) -> Any:
        return lambda x, w, b, s, p, o, g, d, k: then(conv(x, w, b, s, p, o, g, d), k)

    return [
        *map(over, CONVOLUTIONS),
        *map(over_transposed, TRANSPOSED),
        lambda x, w, b, k: then(aten.linear.default(x, w, b), k),
    ]


@rule(*_layer_patterns(lambda y, k: aten.mul.Tensor(y, k)), numerics=Numerics.ROUNDING)
def conv_mul(at, *holes):
    """conv(x, w, b) * k -> conv(x, w * k, b * k), k a constant for each channel"""
    layer, factor = at.root.args[:2]
    scale = per_channel(at, layer, factor)
    return None if scale is None else fold(at, layer, scale, torch.zeros_like(scale))


@rule(*_layer_patterns(lambda y, k: aten.add.Tensor(y, k)), numerics=Numerics.ROUNDING)
def conv_add(at, *holes):
    """conv(x, w, b) + k -> conv(x, w, b + k), k a constant for each channel"""
    layer, term = at.root.args[:2]
    shift = per_channel(at, layer, term)
    if shift is not None and absorbs(shift, at.root.meta["val"].dtype):
        return at.skip(ABSORBS)
    return None if shift is None else fold(at, layer, torch.ones_like(shift), shift)


def weight_of(layer: fx.Node) -> fx.Node:
    """The weight argument of a layer."""
    found: fx.Node = bind(layer)["weight"]
    return found


def per_channel(at: Site, layer: fx.Node, factor: object) -> torch.Tensor | None:
    """A literal or constant as one float64 value for each output channel of a layer; None when it is not."""
    if not at.same_type(layer):
        return None
    if layer.target is aten.linear.default and len(at.type(weight_of(layer)).shape) != 2:
        return None  # a vector of weights: a dot product, without output features
    shape = at.type(layer).shape
    axis = len(shape) - 1 if layer.target is aten.linear.default else 1
    if layer.target is not aten.linear.default and len(shape) == bind(layer)["weight"].meta["val"].dim() - 1:
        axis = 0  # a convolution without batch
    if isinstance(factor, (int, float)) and not isinstance(factor, bool):
        return torch.full((shape[axis],), float(factor), dtype=torch.float64, device=at.type(layer).device)
    value = at.value(factor)
    if value is None or value.is_complex():
        return None
    full = (1,) * (len(shape) - value.dim()) + tuple(value.shape)
    if any(size != 1 for i, size in enumerate(full) if i != axis):
        return None
    return value.double().reshape(-1).expand(shape[axis])


def _padded(conv: Any) -> Any:
    return lambda x, pad, mode, value, w, b, s, p, d, g: conv(aten.pad.default(x, pad, mode, value), w, b, s, p, d, g)


@rule(*map(_padded, LITERAL_PADDED), numerics=Numerics.ROUNDING)
def pad_conv(at, x, pad, mode, value, w, b, s, p, d, g):
    """conv(pad(x, p, 0), w, padding=q) -> conv(x, w, padding=p + q)"""
    spatial = len(at.type(w).shape) - 2
    if mode != "constant" or value not in (None, 0, 0.0):
        return at.skip("the padding is not zero padding")
    before, after = list(pad[0::2])[::-1], list(pad[1::2])[::-1]
    if before != after or len(before) > spatial or min(before, default=0) < 0:
        return at.skip("the padding is asymmetric, negative or not only on spatial axes")
    added = [0] * (spatial - len(before)) + before
    own = list(p) * spatial if len(p) == 1 else list(p)
    return at.call(at.root.target, x, w, b, s, [i + j for i, j in zip(own, added, strict=True)], d, g)


RULES = (conv_batch_norm, conv_mul, conv_add, pad_conv)
