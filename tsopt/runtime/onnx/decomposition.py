"""torch's exporter without its second trace, where no call needs it.

Before it translates, the exporter traces the program again to decompose the ops for which it has no translation. Where
it has one for every op, this changes nothing, and is most of the time of an export.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tsopt.compiler import forks
from tsopt.compiler.graph.ops import aten

REMOVED = {  # by the exporter, whether it has traced the program again or not
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range_for_size.default,
}
_CHANGING = forks.Lock()


@contextmanager
def only_where_needed() -> Iterator[None]:
    """A block in which this thread's exports decompose only programs with an op that has no translation."""
    passes = _passes()
    if passes is None:
        yield
        return
    with _CHANGING.held():
        decompose, here = passes.decompose_with_registry, threading.get_ident()

        def where_needed(program: Any, registry: Any) -> Any:
            is_left = threading.get_ident() == here and _is_translated(program, registry)
            return program if is_left else decompose(program, registry)

        with patch.object(passes, "decompose_with_registry", where_needed):
            yield


def _is_translated(program: Any, registry: Any) -> bool:
    return all(
        node.target in REMOVED or registry.is_registered(node.target)
        for graph_module in program.graph_module.modules()
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    )


def _passes() -> Any:
    """torch's module, or None where a version of torch decomposes in another way."""
    try:
        from torch.onnx._internal.exporter import _fx_passes
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        return None
    known = hasattr(_fx_passes, "decompose_with_registry") and hasattr(ONNXRegistry, "is_registered")
    return _fx_passes if known else None
