"""A Signature as JSON, and back from a file that may be damaged or hostile. Imports no torch."""

from __future__ import annotations

import re
from typing import Any

from tsopt.compiler.calls import structure_json
from tsopt.compiler.calls.conditions import MOST, MOST_SIZES, Condition, function_of, plain
from tsopt.compiler.calls.counters import axes_of
from tsopt.compiler.calls.effects import Effect, check_given
from tsopt.compiler.calls.result_views import INPUT, JOINT, View, of_copies
from tsopt.compiler.calls.signature import DERIVED, Axes, Dim, Input, Output, Signature, dim_of
from tsopt.compiler.calls.types import SHORT, TensorType
from tsopt.compiler.capture.question import Question
from tsopt.errors import BundleError

_DEVICE = re.compile(r"(cpu|cuda|xpu|mps)(:\d{1,3})?")
DEFAULT_DTYPES = ("float16", "bfloat16", "float32", "float64")  # those that torch takes


def to_json(signature: Signature) -> dict[str, Any]:
    """What a file says of it. The weights that a bundle returns are copies: it has no model to share them with."""
    written = [item for item in signature.outputs if item.writes]
    views = [*(item.view for item in written), *of_copies([item.view for item in signature.returned])]
    return {
        "inputs": [
            {"name": i.name, "type": _type_json(i), "state": i.state}
            | ({"asked": [question.to_json() for question in i.asked]} if i.asked else {})
            for i in signature.inputs
        ],
        "outputs": [
            {"name": o.name, "type": _type_json(o), "writes": o.writes}
            | ({"view": view.to_json()} if view is not None else {})
            | ({"lasting": True} if o.lasting else {})
            for o, view in zip(signature.outputs, views, strict=True)
        ],
        "outer": structure_json.to_json(signature.outer),
        "result": structure_json.to_json(signature.result),
        **({"dims": [[d.name, d.low, d.high, d.step] for d in signature.dims]} if signature.dims else {}),
        **({"effects": [effect.to_json() for effect in signature.effects]} if signature.effects else {}),
        **({"aliasing": True} if signature.aliasing else {}),
        **({"modes": [list(mode) for mode in signature.modes]} if signature.modes else {}),
        **({"collected": list(signature.collected)} if signature.collected else {}),
        **({"default_dtype": signature.default_dtype} if signature.default_dtype else {}),
        **({"conditions": list(map(_condition_json, signature.conditions))} if signature.conditions else {}),
    }


def from_json(data: Any) -> Signature:
    """Raises BundleError when the data is not a signature."""
    try:
        dims = tuple(_dim_from(item) for item in data.get("dims", ()))
        names = {dim.name for dim in dims}
        inputs = tuple(
            Input(
                *(str(i["name"]), _type_from(i["type"]), bool(i["state"]), _axes_from(i["type"], names)),
                tuple(map(Question.from_json, i.get("asked", ()))),
            )
            for i in data["inputs"]
        )
        outputs = tuple(
            Output(
                *(str(o["name"]), _type_from(o["type"]), o["writes"], _axes_from(o["type"], {*names, DERIVED})),
                View.from_json(o["view"]) if "view" in o else None,
                o.get("lasting", False) is True,
            )
            for o in data["outputs"]
        )
        outer, objects = structure_json.from_json(data["outer"]), [0]
        result = structure_json.from_json(data["result"], objects)
        effects = tuple(Effect.from_json(item, outer, objects) for item in data.get("effects", ()))
        check_given(outer, None)
        check_given(result, outer)
        if len({effect.path for effect in effects}) != len(effects):
            raise ValueError("an object is modified twice")
        modes = tuple((str(name), on is True) for name, on in data.get("modes", ()))
        aliasing, collected = data.get("aliasing", False) is True, tuple(map(str, data.get("collected", ())))
        default_dtype = data.get("default_dtype", "")
        if default_dtype not in ("", *DEFAULT_DTYPES):
            raise ValueError(f"invalid default dtype {str(default_dtype)[:40]!r}")
        further = aliasing, modes, collected, default_dtype
        conditions = _conditions_from(data.get("conditions", ()), names)
        made = Signature(inputs, outputs, outer, result, dims, effects, *further, conditions)
        _check_indices(made)
        _check_sizes(made)
        _check_views(made)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise BundleError("the stored signature is damaged", why=repr(error)) from error
    return made


def _check_views(signature: Signature) -> None:
    """Raises BundleError where a view reaches past its tensor, or is one of another view."""
    for item in signature.outputs:
        if item.view is None:
            continue
        bases = signature.inputs if item.view.kind == INPUT else signature.returned
        base = bases[item.view.of] if item.view.of < len(bases) else None
        # What it is a view of has memory of its own; what lies in JOINT memory lies in it together with another.
        within: View | None = getattr(base, "view", None)
        sound = base is not None and item.writes is None
        if item.view.kind == JOINT:
            sound = sound and within is not None and (within.kind, within.layout) == (JOINT, item.view.layout)
        else:
            sound = sound and within is None
        names = {dim.name for dim in signature.dims}
        if item.view.places is not None and (item.view.kind == JOINT or not names.issuperset(item.view.places.dims)):
            sound = False
        if not names.issuperset(name for name, _ in item.view.where):
            sound = False
        if not sound or base is None or not item.view.fits(base.type, item.type):
            raise BundleError("the stored signature is damaged", why=f"{item.name} is not a valid view")


def _check_indices(signature: Signature) -> None:
    if [child.kind for child in signature.outer.children] != ["tuple", "dict"]:
        raise BundleError("the stored input structure is damaged", why="it must be a pair of args and kwargs")
    returned = len(signature.returned)
    if {dim.name for dim in signature.dims} != {
        dim_of(name)[0] for item in signature.user_inputs for name in item.axes if name
    }:
        raise BundleError("the stored sizes are damaged", why="they do not match the inputs")
    for structure, count, what in (
        (signature.outer, len(signature.user_inputs), "input"),
        *((structure, returned, "output") for structure in (signature.result, *(e.parts for e in signature.effects))),
    ):
        if structure.highest() >= count:
            raise BundleError(
                f"the stored {what} structure is damaged", why=f"a tensor index is out of range for {count} tensors"
            )


def _check_sizes(signature: Signature) -> None:
    """Raises BundleError where an integer is the size of an axis that no input has."""
    paths = {axis.path: axis.leaf for axis in axes_of(signature.outer, [item.type for item in signature.user_inputs])}
    todo = [signature.outer, signature.result, *(effect.parts for effect in signature.effects)]
    while todo:
        node = todo.pop()
        todo += node.children
        if node.kind != "size":
            continue
        leaf = paths.get(node.keys)
        if leaf != node.index or node.value[0] >= len(signature.user_inputs[node.index].type.shape):
            raise BundleError("the stored signature is damaged", why="a size is not that of an input")


def _type_json(item: Input | Output) -> dict[str, Any]:
    type_ = item.type
    out = {"dtype": type_.dtype, "shape": list(type_.shape), "stride": list(type_.stride), "device": type_.device}
    return out | ({"axes": list(item.axes)} if item.axes else {})


def _axes_from(data: Any, names: set[str]) -> Axes:
    axes = tuple(data.get("axes", ()))
    if axes and (
        len(axes) != len(data["shape"]) or any(name is not None and dim_of(name)[0] not in names for name in axes)
    ):
        raise ValueError(f"invalid axes: {str(axes)[:80]}")
    return axes


def _dim_from(data: Any) -> Dim:
    name, low, high, step = data
    ends = (low, low if high is None else high, step)
    if not isinstance(name, str) or not all(type(n) is int and 0 <= n < 2**48 for n in ends) or step < 1:
        raise ValueError(f"invalid dimension: {str(data)[:80]}")
    return Dim(name, low, high, step)


def _condition_json(condition: Condition) -> list[Any]:
    return [condition.text, list(condition.dims), condition.where]


def _conditions_from(data: Any, names: set[str]) -> tuple[Condition, ...]:
    if len(data) > MOST:
        raise ValueError("too many conditions on sizes")
    found = []
    for text, dims, where in data:
        known = isinstance(dims, list) and 0 < len(dims) <= MOST_SIZES and names.issuperset(dims)
        if not (known and isinstance(text, str) and isinstance(where, str)):
            raise ValueError(f"invalid condition: {str((text, dims))[:80]}")
        function_of(text, len(dims))
        found.append(Condition(plain(text), tuple(dims), where if where.isprintable() else ""))
    return tuple(found)


def _type_from(data: Any) -> TensorType:
    shape, stride = tuple(map(int, data["shape"])), tuple(map(int, data["stride"]))
    dtype, device = str(data["dtype"]), str(data["device"])
    sound = len(shape) == len(stride) <= 64 and all(0 <= size < 2**48 for size in (*shape, *stride))
    if not sound or dtype not in SHORT or not _DEVICE.fullmatch(device):
        raise ValueError(f"invalid tensor type: {str(data)[:80]}")
    return TensorType(dtype, shape, stride, device)
