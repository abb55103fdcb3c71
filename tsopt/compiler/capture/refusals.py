"""Models, inputs and results that capture rejects, and the errors it raises. Never runs a capture.

Every message says what happened, where, why and what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn

from tsopt.compiler.calls.effects import Effect, containers_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.memory import is_repeated, overlaps
from tsopt.compiler.calls.snapshot import FUNCTIONS, is_iterator
from tsopt.compiler.calls.structure import Structure, flatten
from tsopt.compiler.capture.question import PRESENT, Question
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.errors import CaptureError, GraphBreakError, NotReady

CALLED = (*FUNCTIONS, functools.partial)
PURE = ("torch", "math", "_operator")  # modules whose functions only compute


def check_model(model: object, *, allow_nan: bool) -> None:
    if not callable(model):
        raise NotReady(
            f"the model is a {type(model).__name__}", why="it is not callable", fix="pass an nn.Module or a function"
        )
    if not isinstance(model, nn.Module):
        return
    devices: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _check_tensor(name, tensor, allow_nan=allow_nan)
        devices.setdefault(str(tensor.device), name)
    if len(devices) > 1:
        raise CaptureError(
            "the model's weights are on different devices",
            where=", ".join(f"{name} on {device}" for device, name in devices.items()),
            fix=f"move the model to one device: model.to({next(iter(devices))!r})",
        )


def _check_tensor(name: str, tensor: torch.Tensor, *, allow_nan: bool) -> None:
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise NotReady(
            "a lazy module has no weights yet", where=name, fix="call the model once on an example before optimizing"
        )
    if tensor.device.type == "meta":
        raise NotReady(
            "a weight is on the meta device and has no values", where=name, fix="load the weights: model.to_empty(...)"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise CaptureError(f"a weight is a {kind} tensor", where=name, fix="convert it to a dense float tensor first")
    if not allow_nan and (bad := _nan_count(tensor)):
        raise NotReady(
            f"a weight contains NaN in {bad} of {tensor.numel()} values",
            where=name,
            why="every result that depends on it is NaN, so no comparison could detect a wrong one",
            fix="load a valid checkpoint, or pass allow_nan=True (--allow-nan) to continue anyway",
        )


def _nan_count(tensor: torch.Tensor) -> int:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0
    values = tensor.detach()
    # NOTE: the sum is NaN wherever an element is; it is also NaN for inf - inf, so look closer only then. There is
    # none for floats of one byte.
    return int(values.isnan().sum()) if values.itemsize == 1 or bool(values.sum().isnan()) else 0


def check_inputs(model: object, example: Example) -> None:
    leaves, structure = flatten((example.args, example.kwargs))
    paths = dict(structure.paths())
    for where, function in _functions(structure, ""):
        raise CaptureError(
            f"an input is a function: {getattr(function, '__qualname__', type(function).__name__)}"[:200],
            where=f"input {where}",
            why="compiled calls would never call it, whatever else it does",
            fix="leave it out, or make it part of the model if it only computes with tensors",
        )
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    for index, leaf in enumerate(leaves):
        where = f"input {paths[index]}"
        if not isinstance(leaf, torch.Tensor):
            raise CaptureError(f"an input is a {type(leaf).__name__}", where=where, fix="pass a torch.Tensor")
        if not ops.is_plain(leaf):
            raise CaptureError(
                f"an input is a {type(leaf).__name__}",
                where=where,
                why="a program supports only plain tensors; the behavior of the subclass would be lost",
                fix="pass a torch.Tensor: x.as_subclass(torch.Tensor)",
            )
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested or leaf.device.type == "meta":
            raise CaptureError(
                "an input is sparse, nested, quantized or on the meta device",
                where=where,
                fix="pass a dense tensor with values",
            )
        if first is not None and leaf.device != first.device and leaf.dim() > 0:
            raise CaptureError(
                f"the model is on {first.device}, but an input is on {leaf.device}",
                where=where,
                fix=f"move the input, x.to({str(first.device)!r}), or the model",
            )


def _functions(node: Structure, path: str) -> Iterator[tuple[str, Any]]:
    """Functions among the arguments that are not torch's own, with their paths; not those that objects hold."""
    if node.kind == "const" and isinstance(node.value, CALLED):
        if not (getattr(node.value, "__module__", None) or "").startswith(PURE):
            yield path, node.value
    elif node.kind in ("tuple", "list", "dict", "namedtuple"):
        for key, child in zip(node.labels(), node.children, strict=True):
            yield from _functions(child, f"{path}.{key}" if path else str(key))


def check_overlap(example: Example, written: Container[int]) -> None:
    """Refuses a call whose tensors overlap in memory, if the model writes to one of them."""
    leaves, structure = flatten((example.args, example.kwargs))
    paths = dict(structure.paths())
    found = next((pair for pair in overlaps(leaves) if pair[0] in written or pair[1] in written), None)
    if found is not None:
        names = " and ".join(paths[position] for position in found)
        raise GraphBreakError(
            "two inputs overlap in memory, and the model writes to one of them",
            where=f"inputs {names}",
            why="a write to one would have to be visible in the other",
            fix="pass tensors that do not overlap, or the same tensor twice",
        )


def check_attributes(example: Example, asked: Sequence[Sequence[Question]]) -> None:
    """Refuses a call whose tensors have attributes of the user's that the model reads: a program sees only values."""
    leaves, structure = flatten((example.args, example.kwargs))
    paths = dict(structure.paths())
    for index, (leaf, questions) in enumerate(zip(leaves, asked, strict=True)):
        for question in questions:
            if question.name == PRESENT and not question.answered_by(leaf):
                raise CaptureError(
                    f"the model reads the attribute {question.args[0]!r} of an input",
                    where=f"input {paths[index]}",
                    why="a program computes with the values of a tensor; its attributes would be baked in",
                    fix="pass what the attribute holds as an argument of its own",
                )


def check_repeated(example: Example, written: Container[int]) -> None:
    """Refuses a call with a tensor whose elements share memory (`expand`), if the model writes to it."""
    leaves, structure = flatten((example.args, example.kwargs))
    paths = dict(structure.paths())
    found = next((i for i, leaf in enumerate(leaves) if i in written and is_repeated(leaf)), None)
    if found is not None:
        raise GraphBreakError(
            "elements of an input share memory, and the model writes to it",
            where=f"input {paths[found]}",
            why="a write to one would have to be visible in the others",
            fix="pass a tensor with memory for each element: x.contiguous()",
        )


def check_apart(example: Example, held: Container[int]) -> None:
    """Refuses an argument that is also stored on the model: the arguments of a program must not alias its state."""
    given = next((item for item in containers_of((example.args, example.kwargs)) if id(item) in held), None)
    if given is not None:
        raise GraphBreakError(
            f"the {type(given).__name__} passed to the model is also stored on the model",
            why="an argument must not alias an object stored on the model",
            fix="pass a copy, or leave it out of the call",
        )


def check_result(result: Structure, effects: Sequence[Effect], held: Container[int]) -> None:
    if _holds_number(result):
        raise GraphBreakError(
            "the model returns a Python number that depends on the input",
            why="a program returns only tensors; the number would be baked in",
            fix="return the tensor instead of tensor.item()",
        )
    for effect in effects:
        if _holds_number(effect.parts):
            raise GraphBreakError(
                "the model stores a Python number that depends on the input in one of its arguments",
                where=f"input {effect}",
                why="a program computes only with tensors; the number would be baked in",
                fix="store a tensor: torch.tensor(0) instead of 0, tensor instead of tensor.item()",
            )
    for structure in (result, *(effect.parts for effect in effects)):
        for value in _changing(structure):
            if id(value) not in held or is_iterator(value):
                raise GraphBreakError(
                    f"the model creates a {type(value).__name__} during the call",
                    why="every call of the program would return or store the same object",
                    fix="use tensors, lists, dicts, dataclasses or objects with plain attributes",
                )
    if result.leaf_count == 0 and not any(effect.parts.leaf_count for effect in effects):
        raise CaptureError(
            "the model does not return a tensor", why=f"it returns {result}", fix="return the tensors it computes"
        )


def _changing(node: Structure) -> Iterator[Any]:
    """Constants that can change."""
    if node.kind == "const" and (node.contents or is_iterator(node.value)):
        yield node.value
    for child in node.children:
        yield from _changing(child)


def _holds_number(node: Structure) -> bool:
    """Whether a returned Python number is symbolic: its value is known only in the call."""
    if node.kind == "const":
        return isinstance(node.value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return any(map(_holds_number, node.children))


def check_training(trained: Program, evaluated: Program) -> None:
    """Refuses a model whose output depends on the training flag."""
    pairs = list(zip_longest(trained.calls(), evaluated.calls()))
    differing = next((a or b for a, b in pairs if a is None or b is None or not _same_in_both(a, b)), None)
    if differing is None:
        return
    raise NotReady(
        f"the model is in training mode, which changes its output ({ops.name_of(differing)})",
        where=origin_of(differing) or None,
        why="dropout stays active and batch norm uses batch statistics",
        fix="call model.eval() first, or pass eval_mode=True (--eval on the command line)",
    )


def _same_in_both(a: fx.Node, b: fx.Node) -> bool:
    if a.target == b.target and ops.name_of(a).startswith("aten.") and str(a.target).split(".")[1] in _HARMLESS:
        return not ops.is_random(a) and not ops.is_random(b)  # dropout of 0: the flag makes no difference
    return _call_text(a) == _call_text(b)


_HARMLESS = frozenset(name.removeprefix("aten::") for name in ops.RANDOM_ONLY_IF if "dropout" in name)


def _call_text(node: fx.Node) -> str:
    within = [block.text for block in ops.blocks_of(node)]
    return f"{node.target}{within}{[a for a in node.args if not isinstance(a, fx.Node)]}{dict(node.kwargs)}"
