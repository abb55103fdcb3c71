"""An ONNX model in memory, and how it is written: as a file for other tools, or in a directory for an engine.

ONNX stores weights contiguously. A weight that the program reads as a transposed view is passed to an engine in its
memory order, followed by a Transpose that the engine folds, so it need not be copied. A weight that this process has
mapped from a file is mapped from the same file by the engine. Needs onnx_ir.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tsopt.compiler.graph.program import Program

FILE = "model.onnx"  # in the directory of a bundle or of a candidate
DATA = f"{FILE}.data"  # beside it: weights that are not in the program's file
INLINE = 1024  # bytes: shape inference wants to see small constants, sessions get large ones handed over
SINGLE_FILE = (1 << 31) - (1 << 24)  # a protobuf ends at 2 GiB
BESIDE = ".data"  # ends the name of a file of weights beside a larger model
STORED = ".stored"  # suffix of the name of a weight that is stored in its memory order
LINK = "weights"  # in the directory of a model: a hard link to the program's file of weights


@dataclass(frozen=True)
class OnnxModel:
    """An exported model, whose weights are shared with the program or mapped from a file.

    Attributes:
        model: an `onnx_ir.Model`.
        weights_file: that of the program (see `Program`).
    """

    model: Any
    weights_file: Path | None = None

    @classmethod
    def read(cls, path: Path, program: Program | None = None) -> OnnxModel:
        """Reads what `save` has written. The file may be removed afterwards, but not written to.

        Args:
            program: weights that are in its file are taken from memory, where this process has them.

        NOTE: onnx_ir would map the whole file once for each weight, which a limit of the address space forbids.
        """
        import numpy as np
        import onnx_ir

        model, mapped = onnx_ir.load(path), cache(partial(np.memmap, mode="r"))
        held = _Memory(program, path.parent / LINK)
        for value in (value for graph in model.graphs() for value in graph.initializers.values()):
            stored = value.const_value
            if isinstance(stored, onnx_ir.ExternalTensor):
                start, size = stored.offset or 0, stored.nbytes
                part = held.bytes_at(start, size) if stored.location == LINK else None
                if part is None:
                    part = mapped(stored.path)[start : start + size] if size else b""
                array = np.frombuffer(part, stored.dtype.numpy()).reshape(stored.shape.numpy())
                value.const_value = onnx_ir.Tensor(array, stored.dtype, name=stored.name)
        _read_transposed(model.graph)
        return cls(model, program.weights_file if program is not None else None)

    def save(self, place: Path) -> None:
        """Writes the model: to a file for other tools, or, if `place` is a directory, into it for an engine.

        In a directory, weights are stored in their memory order, in a file beside the model. Weights that are in the
        program's file are not written again; the directory gets a hard link to that file. A file contains its weights,
        up to the limit of protobuf.
        """
        if place.is_dir():
            self._store(place)
            return
        import onnx_ir

        size = sum(v.const_value.nbytes for v in self.model.graph.initializers.values() if v.const_value is not None)
        onnx_ir.save(self.model, place, external_data=f"{place.name}{BESIDE}" if size > SINGLE_FILE else None)

    def _store(self, directory: Path) -> None:
        import onnx_ir
        from onnx_ir.external_data import convert_tensors_to_external

        model = self._in_memory_order()
        mapped = _mapped(self.weights_file) if self.weights_file and _link(self.weights_file, directory) else []
        written = []
        for _, value in _large(model.graph):
            offset = _offset(value.const_value.numpy(), mapped)
            if offset is None:
                written.append(value)
            else:
                value.const_value = _external(value.const_value, offset)
        if written:
            tensors = convert_tensors_to_external([value.const_value for value in written], directory, DATA)
            for value, tensor in zip(written, tensors, strict=True):
                value.const_value = tensor
        onnx_ir.save(model, directory / FILE)

    @property
    def op_types(self) -> dict[str, int]:
        """The kinds of its operators, also within branches, loops and functions; the most tensors that one connects."""
        found: dict[str, int] = {}
        for scope in (self.model, *self.model.functions.values()):
            for node in (node for graph in scope.graphs() for node in graph):
                size = max(len(node.inputs), len(node.outputs))
                found[node.op_type] = max(size, found.get(node.op_type, 0))
        return found

    def detached(self) -> tuple[bytes, dict[str, Any]]:
        """The model without its large weights, and these as numpy arrays over the program's memory."""
        import onnx_ir

        model = self._in_memory_order()
        arrays: dict[str, Any] = {}
        for key, value in _large(model.graph):
            arrays[key] = value.const_value.numpy()
            value.const_value = _external(value.const_value)
        return onnx_ir.to_proto(model).SerializeToString(), arrays

    def _in_memory_order(self) -> Any:
        """A copy of the model that shares its memory; large transposed weights are stored in their memory order."""
        import numpy as np
        import onnx_ir

        # NOTE: not integers: OpenVINO's int8 kernels need weights that are constants, not the result of a Transpose.
        transposed = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE)
        model = self.model.clone()
        graph = model.graph
        taken = {value.name for node in model.graph.all_nodes() for value in node.outputs} | graph.initializers.keys()
        for key, value in _large(graph):
            array = value.const_value.numpy()
            order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
            dense = array.transpose(order)
            if value.const_value.dtype not in transposed or array.flags.c_contiguous or not dense.flags.c_contiguous:
                continue
            name = f"{key}{STORED}"
            while name in taken:
                name += STORED
            tensor = onnx_ir.Tensor(dense, value.const_value.dtype, name=name)
            stored = onnx_ir.Value(name=name, type=value.type, shape=tensor.shape, const_value=tensor)
            node = onnx_ir.node("Transpose", [stored], {"perm": np.argsort(order).tolist()}, name=name)
            made = node.outputs[0]
            made.name, made.type, made.shape = key, value.type, value.shape
            del graph.initializers[key]
            value.replace_all_uses_with(made)
            graph.insert_before(graph[0], node)
            graph.initializers[name] = stored
        return model


class _Memory:
    """The weights of a program in this process, found by where its file of weights has them."""

    def __init__(self, program: Program | None, file: Path) -> None:
        self._parts: list[tuple[int, Any]] = []
        if program is not None and file.exists():
            from tsopt.compiler.graph.weights_file import bytes_in_memory

            found = bytes_in_memory(program.weights, file)
            self._parts = sorted(((start, part.numpy()) for start, part in found), key=itemgetter(0))

    def bytes_at(self, start: int, size: int) -> Any | None:
        """The bytes at an offset in the file; None if they are not in the memory of one weight."""
        position = bisect_right(self._parts, start, key=itemgetter(0)) - 1
        if position < 0:
            return None
        first, part = self._parts[position]
        return part[start - first : start - first + size] if start - first + size <= part.size else None


def _read_transposed(graph: Any) -> None:
    """Turns weights that are stored in their memory order back into transposed views."""
    import onnx_ir

    for node in list(graph):
        stored, made = (*node.inputs, None)[0], node.outputs[0]
        if stored is not None and stored.name == node.name and stored.name.startswith(f"{made.name}{STORED}"):
            array = stored.const_value.numpy().transpose(node.attributes["perm"].as_ints())
            tensor = onnx_ir.Tensor(array, stored.const_value.dtype, name=made.name)
            weight = onnx_ir.Value(name=made.name, type=stored.type, shape=tensor.shape, const_value=tensor)
            made.replace_all_uses_with(weight)
            graph.remove(node, safe=True)
            del graph.initializers[stored.name]
            graph.initializers[weight.name] = weight


def _large(graph: Any) -> Iterator[tuple[str, Any]]:
    """The weights that are not stored inside the model itself, by name."""
    for key, value in list(graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > INLINE:
            yield key, value


def _external(tensor: Any, offset: int = 0) -> Any:
    import onnx_ir

    size, shape, name = tensor.nbytes, tensor.shape, tensor.name
    return onnx_ir.ExternalTensor(LINK, offset, size, tensor.dtype, shape=shape, name=name)


def _link(file: Path, directory: Path) -> bool:
    """Creates a hard link in the directory of a model. Returns False where the file system does not allow it."""
    try:
        os.link(file, directory / LINK)
    except OSError:
        return False
    return True


def _mapped(file: Path) -> list[tuple[int, int, int]]:
    """Where a file is mapped in this process: the first address, the end, and the offset in the file of each part."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # another system
        return []
    found, name = [], str(file.resolve())
    for addresses, _, offset, _, _, *names in (line.split(None, 5) for line in lines):
        if names == [name]:
            start, _, end = addresses.partition("-")
            found.append((int(start, 16), int(end, 16), int(offset, 16)))
    return found


def _offset(array: Any, mapped: list[tuple[int, int, int]]) -> int | None:
    """The offset of an array in the file, or None if it is not in the file or not contiguous."""
    first = array.__array_interface__["data"][0]
    inside = (offset + first - start for start, end, offset in mapped if start <= first <= end - array.nbytes)
    return next(inside, None) if array.flags.c_contiguous else None
