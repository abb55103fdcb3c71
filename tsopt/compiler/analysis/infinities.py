"""Which values can be infinite without overflow: masks, and what is computed from them."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from tsopt.compiler.analysis.non_finite import BOUNDED, bounds
from tsopt.compiler.analysis.range_rules import may_miss
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program

# Infinite at the edge of their domain.
POLES = frozenset(
    {"log", "log2", "log10", "log1p", "logit", "atanh", "erfinv", "lgamma", "reciprocal", "rsqrt", "digamma"}
    | {"polygamma", "mvlgamma", "xlogy", "xlog1py", "entr", "ndtri", "zeta", "bessel_y0", "bessel_y1"}
    | {"modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1"}
)
# Second names in ATen. Programs that are not canonicalized have them.
ALIASES = {
    "arctanh": "atanh",
    "psi": "digamma",
    "gammaln": "lgamma",
    "multigammaln": "mvlgamma",
    "divide": "div",
    "true_divide": "div",
}
DIVISIONS = frozenset({"div", "floor_divide", "addcdiv"})
POWERS = frozenset({"pow", "float_power"})
POOLS = frozenset({"max_pool1d", "max_pool2d", "max_pool3d"})
# Sums over many terms: a window of infinities does not survive them.
MIXING = frozenset(
    {"linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "einsum", "conv1d", "conv2d", "conv3d", "convolution"}
    | {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"}
    | {"layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "softmax"}
)


def may_be_infinite(program: Program, value: fx.Node) -> bool:
    """Whether a value may be infinite: because of an input, of a constant in the program, or of an op at a pole.

    Inputs may be. Not considered: finite numbers that overflow, and infinities in weights of layers.
    """
    seen: set[fx.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        found = _sources(program, node)
        if found is None:
            return True
        pending += found
    return False


def _sources(program: Program, node: fx.Node) -> list[fx.Node] | None:
    """The operands that a value can take infinities from; None if it creates them itself."""
    if not any(value.is_floating_point() for value in ops.tensors_of(node.meta.get("val"))):
        return []
    if node.op == "placeholder" or ops.blocks_of(node):
        return None
    if not ops.is_call(node):
        constant = program.weights.get(str(node.target))
        return [] if constant is not None and not bool(constant.isinf().any()) else None
    name = _plain_name(node)
    if any(isinstance(item, float) and math.isinf(item) for item in ops.bind(node).values()):
        return None
    if ends := bounds(node):
        return [end for end in ends if isinstance(end, fx.Node)]
    if name == "batch_norm" and not ops.bind(node)["training"]:
        return [ops.bind(node)["input"]]  # scales each value by itself
    if name in BOUNDED or name in MIXING or name == "nan_to_num":
        return []
    if name == "view_dtype" or (name in POOLS and may_miss(ops.bind(node))):
        return None
    if name in POLES or (name in POWERS and not _is_power(node)) or (name in DIVISIONS and not _is_scaling(node)):
        return None
    return node.all_input_nodes


def _plain_name(node: fx.Node) -> str:
    """One name for all the names of an op, `lgamma` for `special_gammaln`."""
    name = base_name(node).removeprefix("special_")
    return ALIASES.get(name, name)


def _is_power(node: fx.Node) -> bool:
    exponent: Any = ops.bind(node).get("exponent")
    return isinstance(exponent, (int, float)) and exponent >= 0


def _is_scaling(node: fx.Node) -> bool:
    divisor: Any = ops.bind(node).get("other")
    return isinstance(divisor, (int, float)) and divisor != 0
