"""Where a value comes from: module path and source line in the user's code."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

LIBRARIES = tuple(Path(p).resolve().parent for p in (torch.__file__, np.__file__, Path(__file__).parents[1]))
PYTHON = Path(sysconfig.get_path("stdlib")).resolve()
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
