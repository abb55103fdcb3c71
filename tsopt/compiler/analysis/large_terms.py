"""Terms of sums so large that they take digits from the values: (x + 1.5 * 2**23) - 1.5 * 2**23 rounds x on purpose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.non_finite import PASSING
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program

Signs = frozenset[int]
Term = tuple[float, object]  # a factor, and the literal or constant that it belongs to
PLUS, MINUS, EITHER = frozenset({1}), frozenset({-1}), frozenset({1, -1})
# Of what they are given, large numbers remain large and keep their sign.
KEEPING = PASSING | frozenset(
    {"relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "amax", "amin", "mean"}
    | {f"{kind}_pool{axes}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for axes in (1, 2, 3)}
)
STEP = 2**-7  # what is rounded to finer steps is so by accident: (x - mean) / std ... * std + mean
SUMS = frozenset({"add", "sub", "rsub"})
NORMS = frozenset({"batch_norm", "native_batch_norm", "native_batch_norm_legit_no_training", "instance_norm"})
PRODUCTS_AND_SUMS = frozenset({"addmm", "addmv", "addr", "addbmm", "baddbmm"})


@dataclass(frozen=True, slots=True)
class Rounding:
    """A call that adds a large term; a later one subtracts such a term."""

    node: fx.Node
    term: float
    dtype: torch.dtype
    by_tensor: bool  # the term is a constant tensor, not a literal


def limit(dtype: torch.dtype) -> float:
    """From where on a term takes digits: half of those of float32; of the few of float16, what is below a quarter."""
    eps = torch.finfo(dtype).eps
    return 0.25 / eps if eps > 2**-16 else math.sqrt(1 / eps)


def absorbs(term: torch.Tensor | float, dtype: torch.dtype) -> bool:
    """Whether a term takes digits from what it is added to."""
    if not dtype.is_floating_point:
        return False
    size: Any = abs(term)
    return not bool((size < limit(dtype)).all() if isinstance(size, torch.Tensor) else size < limit(dtype))


def roundings(program: Program) -> Iterator[Rounding]:
    """What a program, or one within, rounds by adding a large term and then subtracting one."""
    found: dict[fx.Node, Rounding] = {}
    reached: dict[fx.Node, dict[Rounding, Signs]] = {}  # which large terms are part of a value, with which signs
    for node in program.calls():
        for block in getattr(node.target, "blocks", ()):  # NOTE: a term from outside is not followed into it
            yield from roundings(block)
        dtypes = [value.dtype for value in ops.tensors_of(node.meta.get("val")) if value.is_floating_point()]
        if not dtypes or not base_name(node):
            continue
        parts, terms = _parts(program, node), terms_of(program, node)
        own = reached[node] = {}
        for operand, signs in parts:
            for rounding, before in reached.get(operand, {}).items():
                own[rounding] = own.get(rounding, frozenset()) | {a * b for a in before for b in signs}
        for rounding, signs in own.items():
            if any(-sign in signs for term in terms for sign in _large(program, term, rounding.dtype)):
                found[rounding.node] = rounding
        for term in terms:
            for sign, size in _large(program, term, dtypes[0]).items():
                new = Rounding(node, size, dtypes[0], isinstance(term[1], fx.Node))
                own[new] = own.get(new, frozenset()) | {sign}
    yield from found.values()


def terms_of(program: Program, node: fx.Node) -> list[Term]:
    """What a call adds that is known."""
    name, call = base_name(node), ops.bind(node)
    found: list[Term] = []
    if name in SUMS:
        found = [(factor, call[key]) for key, factor in factors_of(name, call).items()]
    elif name in PRODUCTS_AND_SUMS:
        found = [(call["beta"], call["self"])]
    elif name in ("addcmul", "addcdiv"):
        found = [(1.0, call["self"])]
    elif call.get("bias") is not None:
        found = [(1.0, call["bias"])]
    if name in NORMS and call.get("running_mean") is not None:
        found.append((-1.0, call["running_mean"]))
    return [term for term in found if not isinstance(term[1], fx.Node) or constant_of(program, term[1]) is not None]


def factors_of(name: str, call: ops.Arguments) -> dict[str, float]:
    """What a sum multiplies each operand by, by the name of the operand."""
    alpha = float(call["alpha"]) if isinstance(call.get("alpha", 1), (int, float)) else 1.0
    if name == "rsub":
        return {"self": -alpha, "other": 1.0}
    return {"self": 1.0, "other": alpha if name == "add" else -alpha}


def _parts(program: Program, node: fx.Node) -> list[tuple[fx.Node, Signs]]:
    """The operands whose large terms are large terms of the result, and with which signs."""
    name, call = base_name(node), ops.bind(node)
    if name in KEEPING:
        return [(operand, PLUS) for operand in node.all_input_nodes]
    if name in SUMS:
        pairs = [(call[key], PLUS if factor > 0 else MINUS) for key, factor in factors_of(name, call).items()]
    elif name in ("addcmul", "addcdiv"):
        pairs = [(call["self"], PLUS)]
    elif name == "neg":
        pairs = [(call["self"], MINUS)]
    elif name == "abs" or name in NORMS:
        pairs = [(next(iter(call.values())), EITHER)]
    elif name == "mul" or (name == "div" and call.get("rounding_mode") is None):
        pairs = [(call["self"], _signs(program, call["other"])), (call["other"], _signs(program, call["self"]))]
        pairs = pairs[:1] if name == "div" else pairs
    else:
        return []
    return [(operand, signs) for operand, signs in pairs if isinstance(operand, fx.Node) and signs]


def _signs(program: Program, value: object) -> Signs:
    """The signs of a literal or constant; none where it is neither."""
    low, high = ends_of(program, value) or (0.0, 0.0)
    return (PLUS if high > 0 else frozenset()) | (MINUS if low < 0 else frozenset())


def _large(program: Program, term: Term, dtype: torch.dtype) -> dict[int, float]:
    """The largest magnitudes of a term that take digits from a value of this dtype, by their sign."""
    factor, value = term
    ends = [factor * end for end in ends_of(program, value) or ()]
    least = max(limit(dtype), STEP / torch.finfo(dtype).eps)
    return {1 if end > 0 else -1: abs(end) for end in ends if least <= abs(end) < math.inf}


def ends_of(program: Program, value: object) -> tuple[float, float] | None:
    """The smallest and the largest element of a literal or constant."""
    if isinstance(value, (int, float)):
        return float(value), float(value)
    constant = constant_of(program, value)
    if constant is None or constant.is_complex() or not constant.numel():
        return None
    low, high = constant.float().aminmax()
    return float(low), float(high)


def constant_of(program: Program, value: object) -> torch.Tensor | None:
    """A weight, of which parts may have been taken, and copies."""
    while isinstance(value, fx.Node) and base_name(value) in PASSING and len(value.all_input_nodes) == 1:
        value = value.all_input_nodes[0]
    return program.weights.get(str(value.target)) if isinstance(value, fx.Node) and value.op == "get_attr" else None
