"""How much work the ops of a program are: multiply-accumulates, and the bytes that they read and write."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program

GATHERS = ("embedding", "gather", "index_select", "index")  # of a table they read no more than they return


@dataclass(frozen=True, slots=True)
class Work:
    """What some ops do together in a call.

    Attributes:
        macs: multiply-accumulates of their products, by torch's FlopCounterMode; elementwise ops count as none.
        inputs, weights, outputs: bytes that they read from others, or write for others, each value once.
    """

    macs: int = 0
    inputs: int = 0
    weights: int = 0
    outputs: int = 0

    @property
    def bytes(self) -> int:
        """The working set."""
        return self.inputs + self.weights + self.outputs

    @property
    def intensity(self) -> float | None:
        """MACs for each byte; None where nothing is read or written."""
        return self.macs / self.bytes if self.bytes else None


@dataclass(slots=True)
class _Op:
    """One op: its MACs, the bytes that it reads of each value, and those that it writes; a view does neither."""

    macs: int
    reads: dict[fx.Node, int] = field(default_factory=dict)
    writes: int = 0


class OpWork:
    """The work of each op of a program in a call.

    Args:
        inputs: flat, in the order of the signature, state included.
    """

    def __init__(self, program: Program, inputs: Sequence[Any]) -> None:
        counted = _Counted(program)
        with torch.no_grad(), counted.counter:
            counted.run(*inputs)
        self._ops = counted.ops
        self._readers: dict[fx.Node, set[fx.Node]] = {}
        for node, op in self._ops.items():
            for source in op.reads:
                self._readers.setdefault(source, set()).add(node)
        for node in program.outputs:
            self._readers.setdefault(counted.bases.get(node, node), set()).add(program.output_node)

    def __iter__(self) -> Any:
        return iter(self._ops)

    def of(self, nodes: Collection[fx.Node]) -> Work:
        """The work of some of the ops together: what one of them makes for another is neither read nor written."""
        made = [self._ops[node] for node in nodes]
        own = set(nodes)
        read: dict[fx.Node, int] = {}
        for op in made:
            for source, size in op.reads.items():
                if source not in own:
                    read[source] = max(read.get(source, 0), size)
        weights = sum(size for source, size in read.items() if source.op == "get_attr")
        written = sum(self._ops[node].writes for node in own if self._readers.get(node, set()) - own)
        return Work(sum(op.macs for op in made), sum(read.values()) - weights, weights, written)


def macs_of_call(model: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Multiply-accumulates of a call in eager mode, by torch's FlopCounterMode."""
    counter = FlopCounterMode(display=False, custom_mapping=MISSING)
    with torch.no_grad(), counter:
        model(*args, **kwargs)
    return counter.get_total_flops() // 2


class _Counted(fx.Interpreter):
    """Runs a program once, and keeps what each op does.

    Attributes:
        bases: of each view, the value whose memory it shows.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program.module())
        self._nodes: Mapping[str, fx.Node] = {node.name: node for node in program.graph.nodes}
        self.ops: dict[fx.Node, _Op] = {}
        self.bases: dict[fx.Node, fx.Node] = {}
        self.counter = FlopCounterMode(display=False, custom_mapping=MISSING)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        before = self.counter.get_total_flops()
        result = super().run_node(n)
        node, results = self._nodes[n.name], ops.tensors_of(result)
        op = self.ops[node] = _Op((self.counter.get_total_flops() - before) // 2)
        values = [(self._nodes[source.name], ops.tensors_of(self.env[source])) for source in n.all_input_nodes]
        for source, tensors in values:
            if any(_is_view(mine, theirs) for mine in results for theirs in tensors):
                self.bases[node] = self.bases.get(source, source)
                return result
        op.writes = sum(map(_bytes, results))
        gathers = any(str(node.target).startswith(f"aten.{name}.") for name in GATHERS)
        for source, tensors in values:
            size = sum(map(_bytes, tensors))
            op.reads[self.bases.get(source, source)] = min(size, op.writes) if gathers else size
        return result


def _bytes(tensor: torch.Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _is_view(result: torch.Tensor, source: torch.Tensor) -> bool:
    return result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


# ---- formulas that torch's counter has not: in FLOPs, from shapes -------------------------------------------


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _lstm(steps: Any, of_input: Any, of_state: Any, *_: Any, **__: Any) -> int:
    """Of one direction of one layer; steps [sequence, batch, features], weights [gates * hidden, features]."""
    sequence, batch, _features = steps
    return int(2 * sequence * batch * sum(rows * columns for rows, columns in (of_input, of_state)))


def _matrix_by_vector(matrix: Any, *_: Any, **__: Any) -> int:
    rows, columns = matrix
    return int(2 * rows * columns)


def _added_matrix_by_vector(_: Any, matrix: Any, *__: Any, **___: Any) -> int:
    return _matrix_by_vector(matrix)


def _added_batches(_: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
    return int(2 * math.prod(left) * right[-1])


def _distances(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Of each row of one matrix from each of another, in batches that broadcast."""
    batch = math.prod(max(pair) for pair in itertools.zip_longest(left[-3::-1], right[-3::-1], fillvalue=1))
    return int(2 * batch * left[-2] * right[-2] * left[-1])


def _trilinear(a: Any, b: Any, c: Any, *expands: Any, **_: Any) -> int:
    """Of products of three tensors, summed over some dimensions: what nn.Bilinear is.

    The sum over the first of these is taken of two tensors, and then multiplied by the third.
    """
    *new, summed = expands[:4]
    shapes = [_with_ones(shape, places) for shape, places in zip((a, b, c), new, strict=True)]
    sizes = [max(column) for column in zip(*shapes, strict=True)]
    terms = math.prod(sizes)
    return int(2 * (terms + (terms // max(1, sizes[summed[0]]) if len(summed) > 1 else terms)))


def _with_ones(shape: Any, places: Any) -> list[int]:
    sizes = list(shape)
    for place in sorted(places):
        sizes.insert(place, 1)
    return sizes


def _vectors(vector: Any, *_: Any, **__: Any) -> int:
    return int(2 * vector[0])


MISSING = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten.mkldnn_rnn_layer: _lstm,
    torch.ops.aten.mv: _matrix_by_vector,
    torch.ops.aten.addmv: _added_matrix_by_vector,
    torch.ops.aten.addbmm: _added_batches,
    torch.ops.aten.dot: _vectors,
    torch.ops.aten.vdot: _vectors,
    torch.ops.aten._trilinear: _trilinear,
    torch.ops.aten._cdist_forward: _distances,
}
