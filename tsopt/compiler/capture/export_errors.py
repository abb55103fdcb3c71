"""Turns an error of torch.export into advice for the author of the model: the construct, why it fails, what to write.

Failures are classified by the error, by the line of user code that raised it, and by the functions in its traceback.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import jit, nn

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.capture.scripted import original_of
from tsopt.compiler.graph.origin import is_library, is_python, user_frame
from tsopt.compiler.protect import protected
from tsopt.errors import CaptureError, DataDependentError, GraphBreakError

DECISION = "the model has data-dependent control flow"
DECIDED = "the value is known only at run time, but torch.export traces one graph ahead of time"
UNKNOWN_SIZE = "the program would need a size that is known only at run time"

# A word in the user's line -> what it is, what to write instead. The first that is found counts.
DECISIONS: tuple[tuple[str, str, str], ...] = (
    (
        r"\bwhile\b",
        "a while loop",
        "run a fixed number of steps and mask finished ones: for _ in range(n): x = torch.where(active, step(x), x)",
    ),
    (
        r"\bassert\b",
        "an assert",
        "use torch._assert(condition, 'message') on the tensor, or check before the call",
    ),
    (
        r"\brange\(",
        "the trip count of a loop",
        "loop up to the largest possible count and mask: x = torch.where(i < n, step(x), x)",
    ),
    (
        r"torch\.(equal|allclose)\(|\.(equal|allclose)\(",
        "a comparison of two tensors",
        "keep the result a tensor, same = (a == b).all(), and select with torch.where(same, x, y)",
    ),
    (
        r"\.tolist\(|\.item\(|\bint\(|\bfloat\(|\bbool\(|\blen\(set\(",
        ".item(), .tolist(), int(), float() or bool() on a tensor",
        "keep it a tensor: x * scale with scale = t.max(); x.index_select(0, i) or x.gather(...) with a tensor i",
    ),
    (r"\b(if|and|or|not)\b", "an if", "compute both branches and select: y = torch.where(condition, a, b)"),
)

# An op whose result has as many elements as the values say -> what to write instead.
SIZES: dict[str, str] = {
    "index": "replace x[mask] with torch.where(mask, x, 0), and divide sums by mask.sum()",
    "masked_select": "replace masked_select(x, mask) with torch.where(mask, x, 0), and divide sums by mask.sum()",
    "nonzero": "use torch.where(mask, a, b) on all elements, or mask.float().topk(k).indices for k of them",
    "argwhere": "use torch.where(mask, a, b) on all elements, or mask.float().topk(k).indices for k of them",
    "unique": "map the values to indices before the call, or count them with torch.bincount(x, minlength=n)",
    "bincount": "use F.one_hot(x, n).sum(0) with a fixed n",
    "repeat_interleave": "use torch.repeat_interleave(x, repeats, output_size=n) with a fixed n",
    "slice": "keep all elements and mask them: torch.where(torch.arange(n) < length, x, 0)",
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """A failed export: the error's type and text, the user's line, and the functions on the way to it."""

    kind: str
    text: str
    line: str
    functions: frozenset[str]
    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class Family:
    """Failures of one kind. `what` may hold {0}: the first group of the pattern in the error's text."""

    found: Callable[[Trouble], bool]
    what: str
    why: str
    fix: str
    names: str = ""  # a pattern whose first group goes into `what` and `fix`


FAMILIES: tuple[Family, ...] = (
    Family(
        lambda t: bool({"pack_padded_sequence", "pad_packed_sequence", "pack_sequence"} & t.functions),
        "the model packs sequences",
        "the number of rows in a packed sequence depends on the lengths",
        "run the layer on the padded sequences and mask the padding: "
        "out = torch.where((torch.arange(n) < lengths[:, None])[..., None], out, 0)",
    ),
    Family(
        lambda t: "tuple of ints" in t.text and "FakeTensor" in t.text,
        "a size is a tensor",
        "sizes must be known ahead of time, but this one depends on tensor values",
        "use a fixed size and mask the padding: torch.where(torch.arange(n) < length, x, 0)",
    ),
    Family(
        lambda t: "nested_tensor" in t.text,
        "the model creates a nested tensor",
        "a program supports only dense tensors of known sizes",
        "pad to one size and mask: torch.nn.utils.rnn.pad_sequence(list, batch_first=True)",
    ),
    Family(
        lambda t: ".numpy() is not supported" in t.text or ("numpy" in t.text and "subclass" in t.text),
        "the model calls numpy",
        "numpy calls cannot be traced into a graph of torch ops",
        'use torch functions, pass frontend="strict", which supports most of numpy, or wrap the code in a custom op: '
        "torch.library.custom_op with register_fake",
    ),
    Family(
        lambda t: t.kind == "UnsupportedOperatorException" and "aten." not in t.text.split("\n")[0],
        "the custom op {0} has no fake kernel",
        "the shape of its result must be known without running it",
        'add @torch.library.register_fake("{0}") to a function with the same arguments that returns an empty tensor of '
        "the right shape and dtype: return torch.empty_like(x)",
        names=r"^\s*([\w.]+)",
    ),
    Family(
        lambda t: t.kind == "UnsupportedOperatorException",
        "{0} has no fake kernel",
        "torch.export cannot infer the shape of its result",
        "rewrite it with other ops, or wrap it in a custom op: torch.library.custom_op with register_fake",
        names=r"^\s*([\w.]+)",
    ),
    Family(
        lambda t: "serialization.py" in t.files or "pickle" in t.text,
        "the model reads or writes a file while it runs",
        "a program has no side effects",
        "load the file in __init__, before the call, and save the results after it",
    ),
    Family(
        lambda t: "data pointer" in t.text or "data_ptr" in t.text or "deepcopy" in t.functions,
        "the model accesses the memory of a tensor directly",
        "copy.deepcopy, data_ptr() and C extensions need real memory, which traced tensors do not have",
        "copy with x.clone(), and wrap an extension in a custom op: torch.library.custom_op with register_fake",
    ),
    Family(
        lambda t: "constant's list" in t.text or ("Fake tensor" in t.text and "leak" in t.text),
        "a part of the model runs where it cannot be traced",
        "a thread, a process or a callback creates tensors outside the trace",
        "call that part directly in forward",
    ),
    Family(
        lambda t: "Couldn't swap" in t.text,
        "the model converts its own weights while it runs",
        "weights cannot be replaced during tracing",
        "convert them before the call: model.to(torch.float32)",
    ),
    Family(
        lambda t: "leaf Variable" in t.text or "leaf variable" in t.text,
        "the model writes to a parameter in place",
        "a parameter that requires grad cannot be modified in place",
        "use a buffer instead: self.register_buffer(name, value), or wrap the write in torch.no_grad()",
    ),
    Family(  # torch wraps what it compiles then, and does not expect that itself
        lambda t: "compiled_fn to be GraphModule" in t.text,
        "the model writes to a tensor that shares memory with another one that it holds",
        "a program holds them as separate tensors, and a write to one would not be visible in the other",
        "take the view in forward, x + self.cache[:2], or give it memory of its own: self.cache[:2].clone()",
    ),
    Family(
        lambda t: "same device" in t.text or "different devices" in t.text or "Device Propagation" in t.text,
        "the model combines tensors on different devices",
        "a tensor created in forward stays on the device where it was created",
        "create it with torch.zeros(..., device=x.device), or register a buffer, which moves with the model",
    ),
    Family(
        lambda t: "__torch_dispatch__" in t.text or "tensor subclass" in t.text.lower(),
        "the model computes with a subclass of torch.Tensor",
        "a program supports only plain tensors",
        "use x.as_subclass(torch.Tensor), or convert the weights back before optimizing",
    ),
    Family(
        lambda t: "torch._C.Generator" in t.text,
        "the model holds a Generator, which is not a tensor",
        "its side effects cannot be part of a program",
        "use torch.manual_seed instead of your own torch.Generator",
    ),
    Family(
        lambda t: any(
            said in t.text for said in ("modifying the input", "copy_.default' is not functional", "hop is expected")
        ),
        "a data-dependent branch or loop writes in place to a tensor defined outside it",
        "control flow ops must be functional: they return tensors and modify none",
        "write y = y + 1 instead of y += 1 or y.add_(1), in both branches",
    ),
    Family(
        lambda t: "merging two branches" in t.text,
        "the branches of a data-dependent if return tensors of different types",
        "the code after the if must see the same types from both branches",
        "return the same dtype and shape from both, for example with y.to(x.dtype)",
    ),
    Family(
        lambda t: t.kind == "RecursionError",
        "the model is nested too deeply to be traced",
        "tracing exceeded Python's recursion limit",
        "use a loop instead of recursion",
    ),
)


def explain(error: Exception, model: Callable[..., Any], example: Example, *, runs: bool = False) -> CaptureError:
    """The user's view of a failed export: the model's own error if it fails in eager, else the construct.

    Args:
        runs: whether the model is known to run on its example.
    """
    if isinstance(error, CaptureError):
        return error
    own = None if runs else failure_of_the_model(model, example, error)
    if own is not None:
        return own
    where = user_frame(error)
    trouble = _trouble(error)
    for family in FAMILIES:
        if family.found(trouble):
            found = re.search(family.names, trouble.text) if family.names else None
            name = found.group(1).replace(".default", "").replace(".", "::") if found else ""
            return GraphBreakError(
                family.what.replace("{0}", name), where=where, why=family.why, fix=family.fix.replace("{0}", name)
            )
    if trouble.kind.startswith("DynamicOutputShape"):
        return size_of_values(first_lines(error), where)
    if "data-dependent" in trouble.text or trouble.kind.startswith(("GuardOnDataDependent", "DataDependentOutput")):
        return _decision(trouble.line, where)
    scripted = _scripted_part(model)
    if scripted and trouble.kind == "TypeError":
        return GraphBreakError(
            f"a part of the model is TorchScript: {scripted}",
            where=where,
            why="torch.export captures only Python modules",
            fix="replace it with the original nn.Module that it was scripted or traced from",
        )
    return GraphBreakError(
        "torch.export cannot capture the model",
        where=where,
        why=f"{trouble.kind}: {first_lines(error)}",
        fix="replace the construct at that line with tensor operations",
    )


def failure_of_the_model(model: Callable[..., Any], example: Example, error: Exception) -> CaptureError | None:
    """What the model raises by itself, outside of every tracer; None where it runs."""
    own = _eager_failure(model, example)
    if own is None:
        return None
    return CaptureError(
        "the model fails on the example input in eager mode",
        where=user_frame(own) or user_frame(error),
        why=f"{type(own).__name__}: {first_lines(own)}",
        fix="make model(*example) run in eager mode first",
    )


def size_of_values(op: str, where: str | None) -> GraphBreakError:
    """The refusal of an op whose result size depends on the values of a tensor."""
    name = op.removeprefix("aten.").removeprefix("_").partition(".")[0].rstrip("2")
    return GraphBreakError(
        f"{op} has a data-dependent output shape",
        where=where,
        why=UNKNOWN_SIZE,
        fix=SIZES.get(name, "use a mask of fixed size (torch.where) instead of selecting by value"),
    )


def _decision(line: str, where: str | None) -> GraphBreakError:
    found = next(((what, fix) for pattern, what, fix in DECISIONS if re.search(pattern, line)), None)
    if found is None:
        found = "", "select with torch.where(condition, a, b), or branch on shapes and arguments instead"
    what = f"{DECISION}: {found[0]}" if found[0] else DECISION
    return DataDependentError(what, where=where, why=DECIDED, fix=found[1])


def _trouble(error: Exception) -> Trouble:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename) and not is_python(frame.filename)]
    return Trouble(
        type(error).__name__,
        str(error),
        (own[-1].line or "") if own else "",
        frozenset(frame.name for frame in frames),
        frozenset(frame.filename.replace("\\", "/").rpartition("/")[2] for frame in frames),
    )


def _scripted_part(model: object) -> str:
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return next((name for name, module in modules if isinstance(module, jit.ScriptModule)), "")


def _eager_failure(model: Callable[..., Any], example: Example) -> Exception | None:
    args, kwargs = unflatten_clones(example)
    model = original_of(model)
    try:
        with protected(model, written=list(model.parameters()) if isinstance(model, nn.Module) else ()):
            model(*args, **kwargs)
    except Exception as error:
        return error
    return None


def unflatten_clones(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with every tensor cloned: what the model writes stays here."""
    leaves, structure = flatten((example.args, example.kwargs))
    args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in leaves])
    return args, kwargs


def first_lines(error: BaseException, limit: int = 300) -> str:
    """The beginning of an error's text, without what torch.export says about itself."""
    said = str(error).partition("The error above occurred when calling torch.export")[0]
    text = " ".join(line.strip() for line in said.strip().splitlines()[:4]).strip()
    return text if len(text) <= limit else text[:limit] + " ..."
