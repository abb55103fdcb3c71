"""What torch.export says, in the words of somebody who has to change the model: the construct, why, what to write.

Families of failures, told apart by the error, by the line of the user's that raised it and by the functions it passed.
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
from tsopt.compiler.graph.origin import is_library, is_python, user_frame
from tsopt.compiler.protect import protected
from tsopt.errors import CaptureError, DataDependentError, GraphBreakError

DECISION = "a Python decision depends on the values of a tensor"
DECIDED = "it is decided while the model runs; a program is one graph, decided beforehand"
UNKNOWN_SIZE = "the program would need a size that is known only at run time"

# A word in the user's line -> what it is, what to write instead. The first that is found counts.
DECISIONS: tuple[tuple[str, str, str], ...] = (
    (
        r"\bwhile\b",
        "a while loop",
        "take a fixed number of steps and keep what is done: for _ in range(n): x = torch.where(active, step(x), x)",
    ),
    (
        r"\bassert\b",
        "an assert",
        "torch._assert(condition, 'message') of the tensor, or a check before the call",
    ),
    (
        r"\brange\(",
        "the number of steps of a loop",
        "loop to the largest number there can be, and mask: x = torch.where(i < n, step(x), x)",
    ),
    (
        r"torch\.(equal|allclose)\(|\.(equal|allclose)\(",
        "two tensors compared",
        "keep the answer a tensor, same = (a == b).all(), and select with torch.where(same, x, y)",
    ),
    (
        r"\.tolist\(|\.item\(|\bint\(|\bfloat\(|\bbool\(|\blen\(set\(",
        ".item(), .tolist(), int(), float() or bool() of a tensor",
        "keep it a tensor: x * scale with scale = t.max(); x.index_select(0, i) or x.gather(...) with a tensor i",
    ),
    (r"\b(if|and|or|not)\b", "an if", "compute both and select: y = torch.where(condition, a, b)"),
)

# An op whose result has as many elements as the values say -> what to write instead.
SIZES: dict[str, str] = {
    "index": "x[mask] as torch.where(mask, x, 0), and divide sums by mask.sum()",
    "masked_select": "masked_select(x, mask) as torch.where(mask, x, 0), and divide sums by mask.sum()",
    "nonzero": "torch.where(mask, a, b) at every place, or mask.float().topk(k).indices for k places",
    "argwhere": "torch.where(mask, a, b) at every place, or mask.float().topk(k).indices for k places",
    "unique": "number the values before the call, or torch.bincount(x, minlength=n) for how often each comes",
    "bincount": "F.one_hot(x, n).sum(0) with a fixed n",
    "repeat_interleave": "torch.repeat_interleave(x, repeats, output_size=n) with a fixed n",
    "slice": "keep all and mask: torch.where(torch.arange(n) < length, x, 0)",
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
        "a packed sequence has as many rows as the lengths say",
        "run the layer on the padded sequences and hide what is behind the end: "
        "out = torch.where((torch.arange(n) < lengths[:, None])[..., None], out, 0)",
    ),
    Family(
        lambda t: "tuple of ints" in t.text and "FakeTensor" in t.text,
        "a size is a tensor",
        "sizes are numbers, decided beforehand; this one depends on values",
        "a fixed size, and a mask for what is behind the end: torch.where(torch.arange(n) < length, x, 0)",
    ),
    Family(
        lambda t: "nested_tensor" in t.text,
        "the model makes a nested tensor",
        "a program computes with dense tensors of known sizes",
        "pad to one size and mask: torch.nn.utils.rnn.pad_sequence(list, batch_first=True)",
    ),
    Family(
        lambda t: ".numpy() is not supported" in t.text or ("numpy" in t.text and "subclass" in t.text),
        "the model goes through numpy",
        "what numpy computes cannot be seen from a graph of torch calls",
        'torch functions in its place; frontend="strict", which reads most of numpy; or an op of its own: '
        "torch.library.custom_op with register_fake",
    ),
    Family(
        lambda t: t.kind == "UnsupportedOperatorException" and "aten." not in t.text.split("\n")[0],
        "the custom op {0} has no fake kernel",
        "the shape of its result must be known without running it",
        '@torch.library.register_fake("{0}") on a function of the same arguments that returns an empty tensor of the '
        "right shape and dtype: return torch.empty_like(x)",
        names=r"^\s*([\w.]+)",
    ),
    Family(
        lambda t: t.kind == "UnsupportedOperatorException",
        "{0} has no rule for the shape of its result",
        "torch.export cannot trace through it",
        "write it with other ops, or hide it in an op of its own: torch.library.custom_op with register_fake",
        names=r"^\s*([\w.]+)",
    ),
    Family(
        lambda t: "serialization.py" in t.files or "pickle" in t.text,
        "the model writes or reads a file while it runs",
        "a program computes and does nothing else",
        "load before the call, in __init__; save what the model returns",
    ),
    Family(
        lambda t: "data pointer" in t.text or "data_ptr" in t.text or "deepcopy" in t.functions,
        "the model reads the memory of a tensor",
        "copy.deepcopy, data_ptr() and extensions in C see memory, and while the model is traced there is none",
        "x.clone() for a copy; an extension as an op of its own: torch.library.custom_op with register_fake",
    ),
    Family(
        lambda t: "constant's list" in t.text or ("Fake tensor" in t.text and "leak" in t.text),
        "a part of the model runs where it cannot be traced",
        "a thread, a process or a callback makes tensors that torch.export does not see being made",
        "call that part directly in forward",
    ),
    Family(
        lambda t: "Couldn't swap" in t.text,
        "the model converts its own weights while it runs",
        "weights are held still while the model is traced",
        "convert them before the call: model.to(torch.float32)",
    ),
    Family(
        lambda t: "leaf Variable" in t.text or "leaf variable" in t.text,
        "the model writes a parameter in place",
        "a parameter that wants gradients may not be written",
        "a buffer instead: self.register_buffer(name, value), or with torch.no_grad() around the write",
    ),
    Family(
        lambda t: "same device" in t.text or "different devices" in t.text or "Device Propagation" in t.text,
        "tensors on two devices meet",
        "a tensor that is made in forward stays where it was made",
        "torch.zeros(..., device=x.device), or a buffer, which moves with the model",
    ),
    Family(
        lambda t: "__torch_dispatch__" in t.text or "tensor subclass" in t.text.lower(),
        "the model computes with a subclass of torch.Tensor",
        "a program computes with plain tensors",
        "x.as_subclass(torch.Tensor), or convert the weights back before optimizing",
    ),
    Family(
        lambda t: "torch._C.Generator" in t.text,
        "the model holds a Generator, which is not a tensor",
        "what it does in a call cannot be part of a program",
        "use torch.manual_seed instead of a torch.Generator of one's own",
    ),
    Family(
        lambda t: any(
            said in t.text for said in ("modifying the input", "copy_.default' is not functional", "hop is expected")
        ),
        "a branch or a loop that values decide writes a tensor from outside of it",
        "control flow returns tensors, and changes none",
        "y = y + 1 instead of y += 1 or y.add_(1), in both branches",
    ),
    Family(
        lambda t: "merging two branches" in t.text,
        "the branches of a decision by values return tensors of different types",
        "whichever is taken, what follows must be the same program",
        "the same dtype and shape in both, y.to(x.dtype)",
    ),
    Family(
        lambda t: t.kind == "RecursionError",
        "the model nests too deep to be traced",
        "Python's stack has an end",
        "a loop instead of a function that calls itself",
    ),
)


def explain(error: Exception, model: Callable[..., Any], example: Example) -> CaptureError:
    """The user's view of a failed export: his own error if the model fails by itself, else the construct."""
    if isinstance(error, CaptureError):
        return error
    own = failure_of_the_model(model, example, error)
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
            why="torch.export reads Python modules",
            fix="put the nn.Module in its place that it was scripted or traced from",
        )
    return GraphBreakError(
        "torch.export cannot capture the model",
        where=where,
        why=f"{trouble.kind}: {first_lines(error)}",
        fix="replace the construct at that line by tensor operations",
    )


def failure_of_the_model(model: Callable[..., Any], example: Example, error: Exception) -> CaptureError | None:
    """What the model raises by itself, outside of every tracer; None where it runs."""
    own = _eager_failure(model, example)
    if own is None:
        return None
    return CaptureError(
        "the model itself fails on the example input",
        where=user_frame(own) or user_frame(error),
        why=f"{type(own).__name__}: {first_lines(own)}",
        fix="make model(*example) run in plain PyTorch first",
    )


def size_of_values(op: str, where: str | None) -> GraphBreakError:
    """The refusal of an op whose result has as many elements as the values of a tensor say."""
    name = op.removeprefix("aten.").removeprefix("_").partition(".")[0].rstrip("2")
    return GraphBreakError(
        f"the shape of {op} depends on values, not on shapes",
        where=where,
        why=UNKNOWN_SIZE,
        fix=SIZES.get(name, "a mask of fixed size (torch.where) instead of selecting by value"),
    )


def _decision(line: str, where: str | None) -> GraphBreakError:
    found = next(((what, fix) for pattern, what, fix in DECISIONS if re.search(pattern, line)), None)
    if found is None:
        found = "", "select with torch.where(condition, a, b), or decide on shapes and arguments instead"
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
    model = getattr(model, "original", model)  # of what reads TorchScript
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
