"""The exporter's registry of translations, made once: for each export, torch parses the source of 500 functions.

It contains only translations of ops that are registered, so it is made again when there are more of these.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tsopt.compiler import forks

_KEPT: dict[Any, Any] = {}
_CHANGING = forks.Lock()


@contextmanager
def made_once() -> Iterator[None]:
    """A block in which an export gets a copy of the registry of an earlier one, to which it can add its own."""
    registry = _class()
    if registry is None:
        yield
        return
    with _CHANGING.held():
        make = registry.from_torchlib

        def kept(*args: Any, **options: Any) -> Any:
            key = args, tuple(options.items()), len(torch._C._dispatch_get_all_op_names())
            if key not in _KEPT:
                with _without_parsing():
                    _KEPT[key] = make(*args, **options)
            made = copy.copy(_KEPT[key])
            made.functions = {target: list(known) for target, known in made.functions.items()}
            return made

        with patch.object(registry, "from_torchlib", staticmethod(kept)):
            yield


@contextmanager
def _without_parsing() -> Iterator[None]:
    """A block in which this thread gets the domain of a traced function without its source being parsed (0.2 s).

    The registry needs nothing else of `function_ir`, which onnxscript makes from the source at each access.
    """
    import onnxscript

    traced = getattr(onnxscript, "TracedOnnxFunction", None)
    parsed, here = getattr(traced, "function_ir", None), threading.get_ident()
    if not isinstance(parsed, property):  # another version of onnxscript
        yield
        return

    def function_ir(self: Any) -> Any:
        is_here = threading.get_ident() == here
        return SimpleNamespace(domain=self.opset.domain) if is_here else parsed.__get__(self)

    with patch.object(traced, "function_ir", property(function_ir)):
        yield


def prepare() -> None:
    """Makes the registry of an export whose opset is not given."""
    from torch.onnx import _constants

    registry, opset = _class(), getattr(_constants, "ONNX_DEFAULT_OPSET", None)
    if registry is not None and opset is not None:
        with made_once():
            registry.from_torchlib(opset_version=opset)


def _class() -> Any:
    """torch's class, or None where a version of torch makes its registry in another way."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        return None
    known = hasattr(ONNXRegistry, "from_torchlib") and hasattr(torch._C, "_dispatch_get_all_op_names")
    return ONNXRegistry if known else None
