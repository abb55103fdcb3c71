"""Where a value comes from: module path and source line in the user's code, and the rewrites that produced it."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from tsopt.compiler.graph import ops

LIBRARIES = tuple(Path(p).resolve().parent for p in (torch.__file__, np.__file__, Path(__file__).parents[1]))
PYTHON = Path(sysconfig.get_path("stdlib")).resolve()
PROVENANCE = ("module", "source", "rule", "origins")  # keys of `meta` that say where a value comes from
SHOWN = 2  # origins in a line
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_SLICED = re.compile(r"\.?slice\([^)]*\)")


def origin_in(meta: dict[str, Any]) -> dict[str, str]:
    origin = {}
    stack = meta.get("nn_module_stack")
    if stack:
        path = _SLICED.sub("", str(next(reversed(stack.values()))[0]))
        path = path.removeprefix("L['self'].").removeprefix("model").strip(".")
        if path:
            origin["module"] = path
    for file, line, _ in reversed(_FRAME.findall(meta.get("stack_trace") or "")):
        if not is_library(file):
            origin["source"] = f"{short_path(file)}:{line}"
            break
    return origin


def origin_of_meta(meta: dict[str, Any]) -> str:
    return ", ".join(origin_in(meta).values())


def origin_of(node: fx.Node) -> str:
    """`encoder.layer.0.attention, model.py:12`: where in the user's model a value comes from."""
    return ", ".join(part for part in (node.meta.get("module"), node.meta.get("source")) if part)


def origins_of(node: fx.Node) -> tuple[str, ...]:
    """The origins of all that a value stands for: its own, and those of the values that it has replaced."""
    return node.meta.get("origins") or tuple(filter(None, (origin_of(node),)))


def module_of(node: fx.Node) -> str:
    """The path of the module that owns the weight of a call, or else of the call; the name of its value without any.

    A weight that rules have made for several layers is named after the first of them; what the path of another one has
    in common with that name is a module around both.
    """
    weight = ops.bind(node).get("weight")
    name = str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""
    module: str = node.meta.get("module") or node.name
    owner = max((path for path in paths_of(node) if name.startswith(f"{path}.")), key=len, default=module)
    return module if module.startswith(f"{owner}.") else owner


def paths_of(node: fx.Node) -> list[str]:
    """The module paths of a value: its own, and those of modules that were folded into it, such as a batch norm."""
    return [origin.partition(",")[0] for origin in origins_of(node)]


def rule_of(node: fx.Node) -> str:
    """The rule that made a value, or the pass where it was no rule; empty for a value as it was captured."""
    return str(node.meta.get("rule", ""))


def comment_on(node: fx.Node) -> str:
    """`conv1, model.py:9 + bn1, model.py:9; by conv_batch_norm`; empty where nothing is known."""
    origins, rule = origins_of(node), rule_of(node)
    more = f" + {len(origins) - SHOWN} more" if len(origins) > SHOWN else ""
    return "; ".join(filter(None, (" + ".join(origins[:SHOWN]) + more, f"by {rule}" if rule else "")))


def provenance(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a copy of a value says of where it comes from."""
    return {key: meta[key] for key in PROVENANCE if key in meta}


def record_rewrite(made: Iterable[fx.Node], rule: str, replaced: Iterable[fx.Node]) -> None:
    """Notes on new values which rule made them, and where all that they replace came from."""
    origins = tuple(dict.fromkeys(origin for node in replaced for origin in origins_of(node)))
    for node in made:
        node.meta["rule"] = rule
        if origins and origins != (origin_of(node),):
            node.meta["origins"] = origins


def record_merge(kept: fx.Node, dropped: fx.Node) -> None:
    """Notes on a value that it stands for another one, too."""
    origins = tuple(dict.fromkeys((*origins_of(kept), *origins_of(dropped))))
    if len(origins) > 1:
        kept.meta["origins"] = origins


def is_library(file: str) -> bool:
    return file.startswith("<") or any(map(Path(file).resolve().is_relative_to, LIBRARIES))


def is_python(file: str) -> bool:
    """Whether a file belongs to the standard library; installed packages do not."""
    path = Path(file).resolve()
    return path.is_relative_to(PYTHON) and "site-packages" not in path.parts


def short_path(file: str) -> str:
    """A path as a user would say it: from the working directory, or from site-packages."""
    path = Path(file)
    if "site-packages" in path.parts:
        return str(Path(*path.parts[path.parts.index("site-packages") + 1 :]))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def user_frame(error: BaseException) -> str | None:
    """`file:line, in function` of the deepest frame of an error that is the user's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_library(frame.filename) and not is_python(frame.filename):
            line = f": {frame.line}" if frame.line else ""
            return f"{short_path(frame.filename)}:{frame.lineno}, in {frame.name}{line}"
    return None
