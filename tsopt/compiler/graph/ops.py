"""Facts about ATen ops, read from their schema and tags. The exceptions are in one table, each with its reason."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

aten = torch.ops.aten
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by the name of the precision

Arguments = dict[str, Any]

# What a call on fake tensors raises where its result depends on values, which only the tracing in capture can work out.
UNDECIDED = (DataDependentOutputException, DynamicOutputShapeException)

# An op tagged as random that is not, for the arguments given: name -> (is random, why).
RANDOM_ONLY_IF: dict[str, tuple[Callable[[Arguments], bool], str]] = {
    "aten::dropout": (lambda a: a["train"] and a["p"] > 0, "does nothing in eval mode"),
    "aten::feature_dropout": (lambda a: a["train"] and a["p"] > 0, "does nothing in eval mode"),
    "aten::alpha_dropout": (lambda a: a["train"] and a["p"] > 0, "does nothing in eval mode"),
    "aten::feature_alpha_dropout": (lambda a: a["train"] and a["p"] > 0, "does nothing in eval mode"),
    "aten::rrelu": (lambda a: a["training"], "uses a fixed slope in eval mode"),
    "aten::scaled_dot_product_attention": (lambda a: a["dropout_p"] > 0, "random only if dropout is active"),
    "aten::lstm": (lambda a: a["train"] and a["dropout"] > 0, "random only if dropout is active"),
    "aten::gru": (lambda a: a["train"] and a["dropout"] > 0, "random only if dropout is active"),
    "aten::rnn_tanh": (lambda a: a["train"] and a["dropout"] > 0, "random only if dropout is active"),
    "aten::rnn_relu": (lambda a: a["train"] and a["dropout"] > 0, "random only if dropout is active"),
}

# Ops whose contents are whatever was in memory: as little a constant as a random number.
UNINITIALIZED = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::empty_quantized",
    }
)

# Ops that write their running statistics although their schema denies it: name -> the argument that makes them do so.
SECRET_WRITES = {
    "aten::batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
}

# Namespaces whose functional ops do what their schema says; a custom op may log, count or talk to a device.
QUANTIZATION = "quantized_decomposed"  # a namespace of compositions of ATen ops, without kernels of their own
KNOWN_PURE = frozenset({"aten", "prims", QUANTIZATION, "torchvision", "tsopt"})
KNOWN_PURE_OPS = frozenset({"transformers::grouped_mm_fallback"})  # products of experts, in a loop of Python

DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod", "divide"})

# Composite ops that compute, whatever their arguments, and are too frequent to be asked (see `may_alias`).
ALWAYS_NEW = frozenset(
    {f"aten::conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
    | {f"aten::{kind}_norm" for kind in ("layer", "group", "batch", "instance", "rms")}
    | {"aten::linear", "aten::matmul", "aten::scaled_dot_product_attention", "aten::lstm", "aten::gru"}
    | {"aten::max_pool1d", "aten::max_pool2d", "aten::adaptive_avg_pool1d", "aten::adaptive_avg_pool2d"}
)


# Computing with sizes, in programs for more than one: numbers from numbers, and the one call that reads a size.
SIZE = aten.sym_size.int
NUMBERS: dict[str, Callable[..., Any]] = {
    **{f: getattr(operator, f) for f in ("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "truediv")},
    "sym_max": torch.sym_max,
    "sym_min": torch.sym_min,
    "sym_float": torch.sym_float,
    "sym_int": torch.sym_int,
}
_NUMBERS = {id(function): name for name, function in NUMBERS.items()}


def is_number(node: fx.Node) -> bool:
    """Whether a call computes a number from sizes."""
    return node.target is SIZE or id(node.target) in _NUMBERS


def number_name(target: object) -> str | None:
    """The name of what computes with sizes; None for another call."""
    return _NUMBERS.get(id(target))


def blocks_of(node: fx.Node) -> tuple[Any, ...]:
    """The programs within a call of control flow; none for any other call."""
    return getattr(node.target, "blocks", ())


def is_call(node: fx.Node) -> bool:
    return node.op == "call_function"


def is_overload(target: object) -> bool:
    return isinstance(target, OpOverload)


def name_of(node: fx.Node) -> str:
    """`aten.linear` for the default overload, `aten.add.Tensor` for others, `getitem`."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


@functools.cache
def parameters(target: OpOverload) -> tuple[tuple[str, bool, Any], ...]:
    """(name, has a default, default) of each argument of the schema, in order."""
    return tuple((a.name, a.has_default_value(), a.default_value) for a in target._schema.arguments)


def bind(node: fx.Node) -> Arguments:
    """Arguments by schema name, defaults filled in. Calls without a schema: by position."""
    if not isinstance(node.target, OpOverload):
        return {str(i): arg for i, arg in enumerate(node.args)} | dict(node.kwargs)
    bound: Arguments = {}
    for position, (name, _, default) in enumerate(parameters(node.target)):
        bound[name] = node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return bound


def whole_literals(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[int]:
    """The integers that a call is given as numbers, rather than as sizes or axes."""
    if not isinstance(node.target, OpOverload):
        return []
    kinds = {item.name: str(item.type).removeprefix("Optional[").rstrip("]") for item in node.target._schema.arguments}
    given = [item for name, item in bind(node).items() if kinds[name] in ("number", "Tensor")]
    found = [values.get(item) if isinstance(item, fx.Node) else item for item in given]
    return [item for item in found if type(item) is int]


@functools.cache
def writes(target: object) -> bool:
    """Whether the call changes one of its arguments."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def is_quantization(target: object) -> bool:
    """Whether a call quantizes or dequantizes."""
    return isinstance(target, OpOverload) and target.namespace == QUANTIZATION


def writes_in_secret(node: fx.Node) -> bool:
    """Whether the call changes one of its arguments although its schema says that it does not."""
    flag = SECRET_WRITES.get(node.target._schema.name) if isinstance(node.target, OpOverload) else None
    if flag is None:
        return False
    bound = bind(node)
    return bool(bound[flag]) and bound["running_mean"] is not None


def is_uninitialized(node: fx.Node) -> bool:
    """Whether the result is whatever was in memory."""
    return isinstance(node.target, OpOverload) and node.target._schema.name in UNINITIALIZED


def is_random(node: fx.Node) -> bool:
    """Whether two calls with the same arguments may differ."""
    target = node.target
    if not isinstance(target, OpOverload):
        return any(is_random(inner) for block in blocks_of(node) for inner in block.calls())
    name = target._schema.name
    if is_uninitialized(node):
        return True
    exception = RANDOM_ONLY_IF.get(name)
    if exception is not None:
        return bool(exception[0](bind(node)))
    return torch.Tag.nondeterministic_seeded in target.tags


def draws(node: fx.Node) -> bool:
    """Whether the call takes numbers from a generator: what is drawn after it is another number without it."""
    if blocks := blocks_of(node):
        return any(draws(inner) for block in blocks for inner in block.calls())
    return is_random(node) and not is_uninitialized(node)


def has_effect(node: fx.Node) -> bool:
    """Whether the call matters even if its result is unused: a write, a check, or an unknown call."""
    target = node.target
    if target is operator.getitem or is_number(node):
        return False
    if not isinstance(target, OpOverload):
        blocks = blocks_of(node)
        return not blocks or any(has_effect(inner) for block in blocks for inner in block.calls())
    if writes(target) or writes_in_secret(node):
        return True
    pure = target.namespace in KNOWN_PURE or target._schema.name in KNOWN_PURE_OPS
    return not target._schema.returns or not pure


def is_check(node: fx.Node) -> bool:
    """Whether a call looks at its arguments and makes nothing."""
    return isinstance(node.target, OpOverload) and not node.target._schema.returns


def is_settled_check(node: fx.Node) -> bool:
    """A check of dtype, shape or device that holds by the recorded type, whatever the values."""
    if name_of(node) != "aten._assert_tensor_metadata":
        return False
    claim = bind(node)
    found = claim["a"].meta.get("val")
    return isinstance(found, torch.Tensor) and (
        claim["dtype"] in (None, found.dtype)
        and (claim["size"] is None or tuple(claim["size"]) == tuple(found.shape))
        and (claim["stride"] is None or tuple(claim["stride"]) == found.stride())
        and claim.get("device") in (None, found.device)
    )


def is_pure(node: fx.Node) -> bool:
    """Whether the call depends only on its arguments: it may be dropped, merged and computed ahead of time."""
    return is_call(node) and not has_effect(node) and not is_random(node)


@functools.cache
def _viewed_positions(target: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that the schema says a result is a view of."""
    arguments = enumerate(target._schema.arguments)
    return tuple(i for i, argument in arguments if argument.alias_info is not None and not argument.alias_info.is_write)


@functools.cache
def _is_composite(target: OpOverload) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(target.name(), "CompositeImplicitAutograd"))


def may_alias(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the value may live in (views, reshape, getitem, dropout in eval ...).

    Schemas of composite ops do not tell: `type_as`, `einsum` or `dropout` return their input when there is nothing to
    do, and `to` says that it may where it copies. So these are run on fake tensors, and asked.
    """
    target = node.target
    if target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if blocks_of(node):
        return []  # PyTorch asks that of branches
    if not isinstance(target, OpOverload):
        return list(node.all_input_nodes) if is_call(node) else []
    if target._schema.name in ALWAYS_NEW:
        return []
    if _is_composite(target):
        return _observed(node)
    found: list[fx.Node] = []
    for position in _viewed_positions(target):
        argument = node.args[position] if position < len(node.args) else None
        found += [
            a for a in (argument if isinstance(argument, (list, tuple)) else [argument]) if isinstance(a, fx.Node)
        ]
    return found


def _observed(node: fx.Node) -> list[fx.Node]:
    """The inputs that share memory with the result when the call is made on fake tensors."""
    # By place, not by node: a rule may put one node in two places, and `all_input_nodes` names it once.
    places: list[fx.Node] = []
    fx.node.map_arg((node.args, dict(node.kwargs)), places.append)
    known = node.meta.get("shares")
    if known is None:
        fakes = [tensor for source in places for tensor in tensors_of(source.meta["val"])]
        memory = _memory_of_call(node, fakes) if fakes else set()
        shares = [memory & memory_of(source.meta["val"]) for source in places]
        node.meta["shares"] = known = tuple(i for i, shared in enumerate(shares) if shared)
    return list(dict.fromkeys(places[i] for i in known))


def _memory_of_call(node: fx.Node, fakes: list[Any]) -> set[int]:
    args, kwargs = cast(Any, fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"]))
    call: Any = node.target
    try:
        with torch.no_grad(), fakes[0].fake_mode:
            return memory_of(call(*args, **kwargs))
    except Exception:  # it looks at values that a fake tensor does not have, or torch's rule for it is mistaken
        return memory_of(fakes)  # the result may be any of them


def memory_of(value: object) -> set[int]:
    """Which storages the tensors of a value live in."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(value)}


Roots = frozenset[Any]


def storage_roots(nodes: Iterable[fx.Node]) -> dict[fx.Node, Roots]:
    """For each value, the memory it may live in: names that two values share when they may overlap."""
    roots: dict[fx.Node, Roots] = {}
    for node in nodes:
        roots[node] = roots_of(node, roots)
    return roots


def roots_of(node: fx.Node, roots: Mapping[fx.Node, Roots]) -> Roots:
    """The memory that one value may live in, from that of its arguments."""
    sources = may_alias(node)
    if not sources:
        return frozenset({(node, None)})
    if node.target is operator.getitem and roots[sources[0]] == {(sources[0], None)}:
        return frozenset({(sources[0], node.args[1])})  # one of several results, each new memory
    return frozenset().union(*(roots[source] for source in sources))


# What reads memory by strides would read other values in another layout.
STRIDED = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
BY_STRIDES = (*STRIDED, aten.view.dtype)


def reads_within(call: fx.Node, held: torch.Tensor) -> bool:
    """Whether an `as_strided` reads nothing but the elements of a value that its argument is, or is a view of."""
    read, source = call.meta["val"], bind(call)["self"].meta["val"]
    if call.target is not aten.as_strided.default or source.dtype != held.dtype:
        return False
    start = read.storage_offset() - held.storage_offset()
    return _reach(held) == held.numel() and 0 <= start <= held.numel() - _reach(read)


def _reach(tensor: torch.Tensor) -> int:
    """How many elements there are in memory from the first to the last one of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0


def tensors_of(value: object) -> list[Any]:
    """The tensors in the value of a node: one, or those of a multi-output op."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return []


def is_of_default_dtype(given: object, result: object) -> bool:
    """Whether the default dtype decided that of a call's result: nothing that was given says another."""
    default = torch.get_default_dtype()
    return any(t.dtype in (default, default.to_complex()) for t in tensors_of(result)) and not _says_a_dtype(given)


def _says_a_dtype(given: object) -> bool:
    """Whether there is a tensor, an array or a dtype of real or complex numbers."""
    if isinstance(given, (list, tuple)):
        return any(map(_says_a_dtype, given))
    if isinstance(given, dict):
        return _says_a_dtype(list(given.values()))
    dtype = getattr(given, "dtype", given)
    if isinstance(dtype, torch.dtype):
        return dtype.is_floating_point or dtype.is_complex
    return getattr(dtype, "kind", "") in ("f", "c")  # of numpy


def may_trap(node: fx.Node) -> bool:
    """Whether a call divides whole numbers by what may be 0 or -1, which can end the process (INT_MIN by -1)."""
    parts = str(node.target).split(".")
    if len(parts) < 2 or parts[1] not in DIVISIONS or len(node.args) < 2:
        return False
    operands: Any = node.args[:2]
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else torch.as_tensor(arg, device="cpu") for arg in operands]
    if any(value.is_floating_point() or value.is_complex() for value in values):
        return False
    rounds = parts[1] != "div" or node.kwargs.get("rounding_mode") is not None
    literal = isinstance(node.args[1], int) and node.args[1] not in (0, -1)
    return rounds and not literal


def is_plain(value: object) -> bool:
    """Whether it is a tensor of PyTorch's own, not of a subclass: nothing that a tracer puts in its place either."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)
