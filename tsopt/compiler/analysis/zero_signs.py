"""Whether the sign of a zero is ever seen: `atan2(-0.0, -1.0)` is -pi, and 1 / -0.0 is -inf.

Everywhere else -0.0 is 0.0, and a rewrite may make one of the other.
"""

from __future__ import annotations

from torch import fx

from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops

# By the operands that it is read of.
READING: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("atan2", "arctan2"), ("self", "other")),
    **dict.fromkeys(("div", "divide", "true_divide", "floor_divide"), ("other",)),
    **dict.fromkeys(
        ("reciprocal", "rsqrt", "signbit", "digamma", "special_digamma", "special_psi", "angle"), ("self",)
    ),
    "copysign": ("other",),
    "addcdiv": ("tensor2",),
    "view_dtype": ("self",),
    "complex": ("real", "imag"),  # roots and logarithms have two sides
    "polar": ("abs", "angle"),
    "view_as_complex": ("self",),
}
# Sums, whose zeros are positive unless all terms are negative zeros, and what is the same for both zeros.
ENDING = frozenset(
    {"linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "einsum", "conv1d", "conv2d", "conv3d", "convolution"}
    | {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"}
    | {"layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "softmax", "log_softmax", "sigmoid"}
    | {"exp", "exp2", "cos", "cosh", "abs", "sum", "mean", "var", "std", "norm", "linalg_vector_norm", "cumsum"}
    | {"softplus", "log", "log2", "log10", "logsumexp", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d"}
)
POWERS = frozenset({"pow", "float_power"})


def is_sign_of_zero_read(value: fx.Node) -> bool:
    """Whether a call behind a value tells its negative zeros from positive ones; what the program returns does not."""
    seen, pending = {value}, [value]
    while pending:
        node = pending.pop()
        for user in node.users:
            if not ops.is_call(user) or user in seen:
                continue
            if _reads(user, node):
                return True
            if _passes(user, node):
                seen.add(user)
                pending.append(user)
    return False


def _reads(call: fx.Node, operand: fx.Node) -> bool:
    if ops.blocks_of(call):
        return True  # it would have to be followed into them
    name, given = base_name(call), ops.bind(call)
    if name in POWERS:
        exponent = given["exponent"]
        return given["self"] is operand and not (isinstance(exponent, (int, float)) and exponent >= 0)
    return any(given.get(key) is operand for key in READING.get(name, ()))


def _passes(call: fx.Node, operand: fx.Node) -> bool:
    """Whether a zero in the result may have its sign from one in the operand."""
    if not any(item.is_floating_point() or item.is_complex() for item in ops.tensors_of(call.meta.get("val"))):
        return False
    name, given = base_name(call), ops.bind(call)
    if name in ENDING:
        return False
    if name in POWERS:
        return isinstance(given["exponent"], (int, float)) and given["exponent"] % 2 == 1
    if name == "mul":
        return given["self"] is not given["other"]
    if name in ("add", "sub", "rsub"):
        other = given["other"] if given["self"] is operand else given["self"]
        return not isinstance(other, (int, float)) or other == 0
    return True
