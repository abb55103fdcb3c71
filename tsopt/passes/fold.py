"""Constant folding: values that do not depend on the input are computed once, by torch itself, at compile time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import fresh_name, new_weight, reaches_output
from tsopt.compiler.graph.origin import origin_of, record_rewrite
from tsopt.compiler.graph.program import Program, type_of
from tsopt.compiler.rewriting.pass_base import Changes, Declined, Done, Limits, Pass
from tsopt.passes.cse import key_of

MEBI = 1 << 20
RULE = "fold_constant"
TOO_LARGE = "the result would be much larger than its inputs"
TRAPS = "an integer division that raises or crashes the process at run time"
RAISES = "it raises, and the error is left to run time"
QUANTIZED = "the weight is quantized, and engines that compute on integers read it as it is"

# Integer ops whose divisor must be looked at before they run: INT_MIN by -1 is a SIGFPE in torch and in ORT.
DIVIDES = ("div", "divide", "floor_divide", "remainder", "fmod", "true_divide", "__rshift__", "__lshift__")


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Evaluates pure calls on constants with torch on this machine, on clones, with eager's own dtype promotion.

    Only values that something input-dependent uses are stored, and those of equal calls as one weight: every layer may
    compute the same table. Not folded: random and uninitialized values, ops with effects, integer divisions that trap,
    results larger than `floor` bytes and than `growth` times the constants they are made of (an `expand` of a scalar to
    a gigabyte stays an `expand`).
    """

    name: str = "fold"
    floor: int = 16 * MEBI
    growth: float = 2.0
    ceiling: int = field(default=256 * MEBI)

    def run(self, program: Program, limits: Limits) -> Changes:
        values: dict[fx.Node, object] = {}
        first: dict[fx.Node, fx.Node] = {}
        declined = self._evaluate_all(program, values, first)
        done: list[Done] = []
        places = {_place(weight) for weight in program.weights.values()}
        made: dict[fx.Node, fx.Node] = {}
        replaced: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        tensors = {node for node, value in values.items() if ops.is_call(node) and isinstance(value, torch.Tensor)}
        returned = {node for node in tensors if reaches_output(node)}  # made in each call, of what is known before
        for node, value in values.items():
            needed = any(user not in values or user in returned for user in node.users)
            if not needed or not isinstance(value, torch.Tensor) or not ops.is_call(node):
                continue
            if node in returned:
                declined.append(Declined(RULE, origin_of(node), "an output would share memory with a weight"))
                continue
            if not limits.take():
                break
            if first[node] not in made:
                made[first[node]] = _store(program, node, value, places)
            replaced[made[first[node]]].append(node)
            node.replace_all_uses_with(made[first[node]])
            program.graph.erase_node(node)
            done.append(Done(RULE, origin_of(node)))
        for weight, nodes in replaced.items():
            record_rewrite([weight], RULE, nodes)
        return Changes(tuple(done), tuple(declined))

    def _evaluate_all(
        self, program: Program, values: dict[fx.Node, object], first: dict[fx.Node, fx.Node]
    ) -> list[Declined]:
        """Adds the value of each constant, and the first one that is equal to it; equal calls are made once."""
        sources: dict[fx.Node, dict[int, int]] = {}
        known: dict[object, fx.Node] = {}
        ids: dict[fx.Node, str] = {}
        declined: list[Declined] = []
        for number, node in enumerate(program.graph.nodes):
            is_weight = node.op == "get_attr"
            if not is_weight and not (ops.is_pure(node) and all(source in values for source in node.all_input_nodes)):
                continue
            first[node] = twin = known.setdefault(key_of(program, node, ids), node)
            ids[node] = ids.get(twin, f"%{number}")
            if is_weight:
                weight = program.weights[str(node.target)]
                values[node] = weight
                sources[node] = {_place(weight): weight.untyped_storage().nbytes()}
            elif twin in values:
                values[node], sources[node] = values[twin], sources[twin]
            else:
                sources[node] = {k: v for source in node.all_input_nodes for k, v in sources[source].items()}
                reason = self._evaluate(node, values, sum(sources[node].values()))
                if reason:
                    declined.append(Declined(RULE, origin_of(node), reason))
        return declined

    def _evaluate(self, node: fx.Node, values: dict[fx.Node, object], source_bytes: int) -> str | None:
        if ops.is_quantization(node.target):
            return QUANTIZED
        allowed = min(self.ceiling, max(self.floor, int(self.growth * source_bytes)))
        if sum(_dense_bytes(t) for t in ops.tensors_of(node.meta.get("val"))) > allowed:
            return TOO_LARGE
        if _traps(node, values):
            return TRAPS
        target: Any = node.target
        args, kwargs = cast(Any, fx.node.map_arg((node.args, dict(node.kwargs)), cast(Any, values.__getitem__)))
        try:
            with torch.no_grad():
                values[node] = target(*args, **kwargs)
        except Exception as error:  # the model's own error, at the time when the model would raise it
            return f"{RAISES} ({type(error).__name__})"
        return None


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _store(program: Program, node: fx.Node, value: torch.Tensor, places: set[int]) -> fx.Node:
    """Makes a weight of a value. `places` are those of all weights, kept: to look at each again takes the square."""
    expected = type_of(node)
    if isinstance(expected, TensorType) and not TensorType.of(value).matches(expected):
        value = torch.empty_strided(expected.shape, expected.stride, dtype=value.dtype, device=value.device).copy_(
            value
        )
    name = fresh_name(f"folded.{node.name}", program.weights)
    # NOTE: a view of a weight stays a view (no second copy); a view of a larger temporary would keep it alive.
    own = value.untyped_storage().nbytes() <= 2 * value.numel() * value.element_size()
    kept = value.detach() if own or _place(value) in places else value.detach().clone()
    places.add(_place(kept))
    return new_weight(program, node, name, kept)


def _dense_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _traps(node: fx.Node, values: dict[fx.Node, object]) -> bool:
    """An integer division by zero, or of the smallest integer by -1."""
    name = ops.name_of(node).split(".")[1] if "." in ops.name_of(node) else ""
    if name not in DIVIDES or len(node.args) < 2:
        return False
    top, bottom = (values.get(a, a) if isinstance(a, fx.Node) else a for a in node.args[:2])
    if _is_float(top) or _is_float(bottom):
        return False
    top, bottom = (torch.as_tensor(x, device=None if isinstance(x, torch.Tensor) else "cpu") for x in (top, bottom))
    if bool((bottom == 0).any()) and name not in ("__rshift__", "__lshift__"):
        return True
    common = torch.result_type(top, bottom)  # a 0-d int64 is divided as int32 where the other side is one
    if common == torch.bool:
        return False
    lowest = torch.iinfo(common).min
    return lowest < 0 and bool((bottom.to(common) == -1).any()) and bool((top.to(common) == lowest).any())


def _is_float(value: object) -> bool:
    return isinstance(value, (float, complex)) or (
        isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    )
