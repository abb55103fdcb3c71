"""Program -> ONNX, through torch's own exporter. The file that `tsopt export --format onnx` writes.

Needs onnx and onnxscript, not ONNX Runtime.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.infinities import may_be_infinite
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import Control, all_calls, with_blocks
from tsopt.compiler.graph.edit import new_call, without_idle_draws
from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program, attribute_name
from tsopt.compiler.quiet import quiet
from tsopt.compiler.sizes.generalize import through
from tsopt.errors import BackendError, UsageError
from tsopt.runtime.checking.inputs import exported
from tsopt.runtime.onnx import decomposition, doubles, registry
from tsopt.runtime.onnx.narrow_numbers import with_rounded_numbers
from tsopt.runtime.onnx.onnx_model import OnnxModel
from tsopt.runtime.onnx.optimize import optimize
from tsopt.runtime.onnx.pads import keep_pads
from tsopt.runtime.onnx.places import take_places, with_places
from tsopt.runtime.onnx.scattered_sums import PUTS, by_elements
from tsopt.runtime.onnx.translations import translations

# The exporter casts the result of these to the dtype that they are to compute in.
CAST_LATE = (
    *(aten.mean.dim, aten.softmax.int, aten.log_softmax.int),
    *(aten.special_softmax.default, aten.special_log_softmax.default),
)


def to_onnx(program: Program, opset: int | None = None) -> OnnxModel:
    """Exports a program; inputs, outputs and weights keep the user's names.

    Raises:
        BackendError: the exporter has no translation for an op; the message names it and its place. Or it
            cannot bring this model to the opset.
        UsageError: there is no such opset.
    """
    check_opset(opset)
    try:
        with (
            quiet(stdout=True),
            torch.no_grad(),
            registry.made_once(),
            decomposition.only_where_needed(),
            doubles.exact_literals(),
        ):
            lowered = through(program, lambda given: _as_exported(with_rounded_numbers(given)))
            made = torch.onnx.export(
                with_places(exported(lowered), lowered),
                dynamo=True,
                verbose=False,
                optimize=False,
                opset_version=opset,
                custom_translation_table=translations(),
            )
            narrowed = doubles.narrowed(made.model, lowered) if made is not None else None
            if made is not None and narrowed is None:
                optimize(made, by_rules=not _adds_zero(program))
                keep_pads(made.model)
    except Exception as error:
        raise _explain(error, program) from error
    if made is None:
        raise BackendError("the ONNX exporter returned nothing")
    if narrowed is not None:
        raise BackendError(narrowed.why, where=narrowed.where or None, fix="use another backend, or float32")
    _check_made(made.model, opset)
    take_places(made.model, lowered)
    _rename(made.model, program)
    _name_sizes(made.model.graph, program)
    return OnnxModel(made.model, program.weights_file)


def four_axes(program: Program) -> Program:
    """A copy in which attention has the four axes that the exporter knows: the leading ones become the first."""
    made = program.copy()
    for node in list(made.graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default and len(node.meta["val"].shape) != 4:
            _four_axes(made, node)
    return made


def _as_exported(program: Program) -> Program:
    """A copy in the words that the exporter and the runtimes know, where they do not know those of the program."""
    made = four_axes(without_idle_draws(program))
    for node in list(made.graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default:
            _zero_without_any(made, node)
        elif node.target is aten.mul.Tensor and node.meta["val"].dtype == torch.bool:
            node.target = aten.logical_and.default
        elif node.target is aten.rsub.Scalar:
            _in_its_dtype(made, node)
        elif node.target in CAST_LATE:
            _cast_first(made, node)
        elif base_name(node) in ("index_add", *PUTS):
            by_elements(made, node)
        elif node.target is aten.to.dtype:  # the exporter has a translation of the copy alone
            node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": bind(node)["dtype"]}
        elif node.target is aten.clamp.default:
            _of_one_type(node)
        elif ops.is_uninitialized(node):
            _zeros(made, node)
        elif isinstance(node.target, Control):
            node.target = with_blocks(node.target, _as_exported)
    return made


def _in_its_dtype(program: Program, node: fx.Node) -> None:
    """`1.0 - x` of whole numbers, in floating point from the start."""
    x: Any = node.args[0]
    dtype = node.meta["val"].dtype
    if x.meta["val"].dtype != dtype:
        node.args = (new_call(program, node, node, aten.to.dtype, (x, dtype), {}), *node.args[1:])


def _cast_first(program: Program, node: fx.Node) -> None:
    """`x.mean(dtype=...)` computes in that dtype, not in that of `x`."""
    x: Any = node.args[0]
    dtype = bind(node)["dtype"]
    if dtype not in (None, x.meta["val"].dtype):
        node.args = (new_call(program, node, node, aten._to_copy.default, (x,), {"dtype": dtype}), *node.args[1:])


def _of_one_type(clamp: fx.Node) -> None:
    """`clamp(x, 0.5, 2)` with two floats: the exporter makes a tensor of one bound, and no overload takes a mixture."""
    x, *bounds = bind(clamp).values()
    if {*map(type, bounds)} == {int, float}:
        clamp.args, clamp.kwargs = (x, *map(float, bounds)), {}


def _zeros(program: Program, node: fx.Node) -> None:
    """Memory that holds anything may as well hold zeros."""
    value = node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    made = new_call(program, node, node, aten.full.default, (list(value.shape), 0), options)
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)


def _zero_without_any(program: Program, node: fx.Node) -> None:
    """PyTorch answers 0 for a row that attends to nothing, what is exported a mean or NaN."""
    mask = bind(node)["attn_mask"]
    if mask is None:
        return
    is_added = mask.meta["val"].dtype != torch.bool
    constant = program.weights.get(str(mask.target)) if mask.op == "get_attr" else None
    if constant is not None and bool((constant != (-math.inf if is_added else False)).any(-1).all()):
        return
    if is_added and not may_be_infinite(program, mask):
        return
    keeps = new_call(program, node, node, aten.ne.Scalar, (mask, -math.inf), {}) if is_added else mask
    attends = new_call(program, node, node, aten.any.dim, (keeps, -1, True), {})
    users = list(node.users)
    with program.graph.inserting_after(node):
        result = program.graph.call_function(aten.where.ScalarOther, (attends, node, 0.0))
    result.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, result)


def _four_axes(program: Program, node: fx.Node) -> None:
    call = bind(node)
    lead = list(node.meta["val"].shape[:-2])
    batch = torch.Size(lead).numel()

    def made(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return new_call(program, node, node, target, args, kwargs)

    def flat(part: fx.Node) -> fx.Node:
        ends = list(part.meta["val"].shape[-2:])
        whole = made(aten.expand.default, part, [*lead, *ends])
        return made(aten.reshape.default, whole, [batch, 1, *ends])

    call |= {key: flat(call[key]) for key in ("query", "key", "value")}
    if call["attn_mask"] is not None:
        call["attn_mask"] = flat(call["attn_mask"])
    options = {key: call.pop(key) for key in ("scale", "enable_gqa")}
    target: Any = node.target
    result = made(aten.reshape.default, made(target, *call.values(), **options), list(node.meta["val"].shape))
    node.replace_all_uses_with(result)
    program.graph.erase_node(node)


def check_opset(opset: int | None) -> None:
    """Raises UsageError for an opset that the installed onnx does not know, BackendError where onnx is missing."""
    try:
        import onnx.defs
    except ImportError as error:
        raise BackendError("onnx is not installed", why=str(error), fix="pip install onnx onnxscript") from error
    highest = onnx.defs.onnx_opset_version()
    if opset is not None and opset > highest:
        raise UsageError(
            f"unknown ONNX opset {opset}",
            why=f"the installed onnx supports opsets up to {highest}",
            fix=f"use an opset up to {highest}",
        )


def _check_made(model: Any, opset: int | None) -> None:
    # NOTE: the exporter logs that a conversion has failed, and goes on with the opset that it had.
    made = model.graph.opset_imports.get("")
    if opset is not None and made is not None and made != opset:
        raise BackendError(
            f"the ONNX exporter cannot convert this model to opset {opset}",
            why=f"it produced opset {made}",
            fix=f"use opset {made}, or do not set an opset",
        )


def _free(name: str, taken: Collection[str]) -> str:
    """The name, or the first of `name_2`, `name_3`, ... that nobody has."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _rename(model: Any, program: Program) -> None:
    """Inputs keep the user's names; then outputs, weights by their path, and inner values take what is free."""
    import onnx_ir

    graph = model.graph
    _part_ends(graph)
    taken: set[str] = set()
    _name(graph.inputs, [item.name for item in program.signature.inputs], taken)
    _name(graph.outputs, [item.name for item in program.signature.outputs], taken)
    paths = {attribute_name(name): name for name in program.used_weights()}
    weights = sorted(graph.initializers.values(), key=lambda value: value.name not in paths)
    graph.initializers.clear()
    _name(weights, [paths.get(value.name, value.name) for value in weights], taken)
    for value in weights:
        graph.initializers[value.name] = value
        if value.const_value is not None:
            value.const_value.name = value.name
    ends = {id(value) for value in graph.outputs}
    nodes = onnx_ir.traversal.RecursiveGraphIterator(graph)
    inner = [v for node in nodes for v in node.outputs if v.name and id(v) not in ends]  # no name: an unused output
    _name(inner, [str(value.name) for value in inner], taken)


def _name_sizes(graph: Any, program: Program) -> None:
    """Sizes that differ from call to call get the names that the user knows, wherever they are."""
    import onnx_ir

    names: dict[str, str] = {}
    for value, item in zip(graph.inputs, program.signature.inputs, strict=True):
        for size, name in zip(value.shape or (), item.axes, strict=False):
            if name is not None and isinstance(size, onnx_ir.SymbolicDim):
                names[str(size.value)] = name
    if not names:
        return
    nodes = onnx_ir.traversal.RecursiveGraphIterator(graph)
    for value in (*graph.inputs, *(value for node in nodes for value in node.outputs)):
        if value.shape is not None and value.shape.frozen:  # the exporter freezes those of some sizes
            value.shape = value.shape.copy()
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, onnx_ir.SymbolicDim) and str(size.value) in names:
                value.shape[axis] = names[str(size.value)]


def _part_ends(graph: Any) -> None:
    """An output that is an input or a weight becomes a value, and gets a name, of its own."""
    import onnx_ir

    begins = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for position, value in enumerate(graph.outputs):
        if id(value) in begins:
            node = onnx_ir.node("Identity", [value])
            graph.append(node)
            graph.outputs[position] = node.outputs[0]
            graph.outputs[position].type, graph.outputs[position].shape = value.type, value.shape


def _name(values: Iterable[Any], names: Iterable[str], taken: set[str]) -> None:
    for value, name in zip(values, names, strict=True):
        value.name = _free(name, taken)
        taken.add(value.name)


_OVERLOAD = re.compile(r"OpOverload\(op='([\w:.]+)', overload='(\w*)'\)|'(aten\.[\w.]+)'|\b(aten\.\w+\.\w+)")


def _adds_zero(program: Program) -> bool:
    """Whether `x + 0` is left, which turns -0.0 into 0.0, and which the exporter's rewrite rules remove."""
    sums = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)
    return any(node.target in sums and node.args[1] == 0 for node in all_calls(program))


def _explain(error: Exception, program: Program) -> BackendError:
    cause: BaseException | None = error
    text = ""
    while cause is not None:
        text += f"\n{cause}"
        cause = cause.__cause__
    found = _OVERLOAD.search(text)
    op = next((group for group in found.groups() if group), "") if found else ""
    place = _place(op.replace("::", "."), program) if op else None
    verb = "has no translation for" if _MISSING in text else "failed on"
    what = f"the ONNX exporter {verb} {op or 'this model'}"
    return BackendError(
        what, where=(origin_of(place) or None) if place else None, why=f"{type(error).__name__}: {_last_line(text)}"
    )


_MISSING = "No ONNX function found"
_FAMILIES = ("linalg_", "special_", "fft_")
_ALIKE = 3  # letters: `eigvalsh` becomes `_linalg_eigh`, `svdvals` becomes `_linalg_svd`


def _place(op: str, program: Program) -> fx.Node | None:
    """The node of an op; failing that, the one that the exporter has most likely decomposed into it."""
    calls = list(all_calls(program))
    exact = next((node for node in calls if f"{node.target}.".startswith(f"{op}.")), None)
    if exact is not None:
        return exact
    wanted = _plain(op)
    near: dict[fx.Node, int] = {}
    for node in calls:
        name = _plain(str(node.target))
        alike = _common(name, wanted)
        # Core ops are translated as they are: `exp` is not where an `expm1` comes from.
        if (
            alike >= _ALIKE
            and 2 * alike > min(len(name), len(wanted))
            and torch.Tag.core not in getattr(node.target, "tags", ())
        ):
            near[node] = alike
    return max(near, key=near.__getitem__, default=None)


def _plain(op: str) -> str:
    """`aten._linalg_eigh.default` -> `eigh`."""
    name = [*op.split("."), ""][1].lstrip("_")
    for family in _FAMILIES:
        name = name.removeprefix(family)
    return name


def _common(a: str, b: str) -> int:
    """How many letters two names have in common from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("  ", "Use tlparse"))]
    return (lines[-1] if lines else "")[:200]
