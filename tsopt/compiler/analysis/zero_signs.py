"""Whether the sign of a zero is ever seen: `atan2(-0.0, -1.0)` is -pi, and 1 / -0.0 is -inf.

Everywhere else -0.0 is 0.0, and a rewrite may make one of the other.
"""

from __future__ import annotations

from torch import fx

from tsopt.compiler.analysis.next_calls import read_again
from tsopt.compiler.analysis.range_rules import SAME_VALUES
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program

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
# Results that are never -0.0, and what has one only if its operand has.
POSITIVE = frozenset({"abs", "exp", "exp2", "sigmoid", "softmax", "var", "std", "norm", "linalg_vector_norm", "cosh"})
KEEPING = frozenset({"sum", "mean", "amax", "amin", "cumsum", "sqrt", "relu"}) | SAME_VALUES


def is_sign_of_zero_read(program: Program, value: fx.Node) -> bool:
    """Whether a call behind a value tells its negative zeros from positive ones; what the program returns does not.

    What a call of the model keeps is followed into the next one.
    """
    seen, pending = {value}, [value]
    while pending:
        node = pending.pop()
        again = [item for item in read_again(program, node) if item not in seen]
        seen.update(again)
        pending += again
        for user in node.users:
            if not ops.is_call(user) or user in seen:
                continue
            if _reads(user, node):
                return True
            if _passes(user, node):
                seen.add(user)
                pending.append(user)
    return False


def may_be_negative_zero(value: fx.Node) -> bool:
    """Whether a value may have a negative zero; squares and their sums have none."""
    while ops.is_call(value):
        name, given = base_name(value), ops.bind(value)
        if any(item.is_complex() for item in ops.tensors_of(value.meta.get("val"))):
            return True
        if name in POSITIVE:
            return False
        if name == "mul" and given["self"] is given["other"]:
            return False
        if name in POWERS:
            exponent = given["exponent"]
            return not (isinstance(exponent, (int, float)) and exponent % 2 == 0)
        if name == "add":  # x + c is zero where x is -c, and then positive; in 16 bits also where it is rounded to zero
            other, is_wide = given["other"], value.meta["val"].dtype.itemsize > 2
            return not (is_wide and isinstance(other, (int, float)) and other > 0 and given["alpha"] > 0)
        if name not in KEEPING or not value.all_input_nodes:
            return True
        value = value.all_input_nodes[0]
    return True


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
