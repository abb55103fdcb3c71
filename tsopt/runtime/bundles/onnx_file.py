"""Checks an ONNX file before any engine opens it: its external references, its contents and its size.

Parses the protobuf directly. The package `onnx` is not needed to run a bundle and would copy every weight, and one
strict parser gives the same answer whatever is installed.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tsopt.errors import BundleError
from tsopt.runtime.bundles.onnx_wire import MOST_DIMENSIONS, Span, Wire
from tsopt.runtime.onnx.onnx_model import DATA, FILE

LARGEST = (1 << 31) - 1  # bytes: protobuf's own limit
MOST_NODES = 200_000  # with every call of a function in its place
DEEPEST = 32  # graphs within graphs, functions within functions
LATEST_OPSET = 1000

# data_type -> bits of an element; the fields of TensorProto that hold elements when `raw_data` does not.
BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    15: 128,
    **dict.fromkeys((21, 22, 23), 4),
    **dict.fromkeys((25, 26), 2),
}
STRINGS = 8
TYPED = (4, 5, 6, 7, 10, 11)
COMPLEX = (14, 15)

# Never exported by tsopt, with the reason.
REFUSED = {
    **dict.fromkeys(
        ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"),
        "it does not use PyTorch's random number generator",
    ),
    "MaxUnpool": "it writes to unchecked indices",
}
# ONNX Runtime's own operators that `ort_kernels.py` and `ort_int8.py` write. Among the others are some that open files.
CONTRIBUTED = frozenset({"MultiHeadAttention", "QuickGelu", "MatMulNBits", "MatMulIntegerToFloat"})
STANDARD, MICROSOFT = ("", "ai.onnx"), "com.microsoft"
# Begins the domains in which the exporter defines functions. No engine has operators of its own there: where it has one
# of the same domain and name, it runs that, and not the function of the file.
FUNCTIONS = "pkg."

Name = tuple[str, str, str]  # of a function: domain, name, overload


def check_onnx(directory: Path, sizes: Mapping[str, int], data: Collection[str] = (DATA,)) -> None:
    """Looks through the ONNX model of a bundle.

    Args:
        sizes: bytes of each file of the bundle: there is nothing else that the model may refer to.
        data: those that may contain weights.

    Raises:
        BundleError: it refers to something outside, holds less than it says, calls what is not known, or is too
            large when all its functions are in place.
    """
    path = directory / FILE
    size = sizes.get(FILE)
    if size is None:
        raise BundleError("the bundle is damaged", where=str(directory), why=f"it does not contain {FILE}")
    if not 0 < size <= LARGEST:
        raise _refused(path, f"its size is {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        try:
            _Scan(mapped, path, sizes, data).model()
        except (IndexError, UnicodeDecodeError) as error:  # it ends in the middle of something
            raise _refused(path, f"it is truncated or not an ONNX file: {error}") from error


def _refused(path: Path, why: str) -> BundleError:
    plain = "".join(c if c.isprintable() else "?" for c in why[:300])
    return BundleError("the ONNX model is rejected", where=str(path), why=plain, fix="export the model again")


@dataclass
class _Body:
    """What a graph or a function calls, with all graphs within."""

    nodes: int = 0
    calls: list[Name] = field(default_factory=list)


class _Scan:
    def __init__(self, data: mmap.mmap, path: Path, sizes: Mapping[str, int], beside: Collection[str]) -> None:
        self.end, self.path, self.sizes, self.beside = len(data), path, sizes, beside
        self.main = _Body()
        self.functions: dict[Name, _Body] = {}
        self.wire = Wire(data, self.refuse)

    def refuse(self, why: str) -> BundleError:
        return _refused(self.path, why)

    def model(self) -> None:
        whole, graphs = (0, self.end), 0
        for number, value in self.wire.fields("ModelProto", whole):
            graphs += number == 7
            if number == 25:  # before the graph: it is known then what it may call
                name = self.name_of_function(value)
                if not name[0].startswith(FUNCTIONS):
                    raise self.refuse(
                        f"it defines {name[1][:40]!r} in the domain {name[0][:40]!r}, in which an engine may have an "
                        "operator of that name"
                    )
                if name in self.functions:
                    raise self.refuse(f"the function {name[1][:40]!r} is defined twice")
                self.functions[name] = _Body()
        if graphs != 1:
            raise self.refuse("it has no graph")
        for number, value in self.wire.fields("ModelProto", whole):
            if number == 7:
                self.graph(value, self.main, 0)
            elif number == 8:
                self.opset(value)
            elif number == 20:
                raise self.refuse("it contains training information")
            elif number == 25:
                self.function(value)
        known: dict[Name, int] = {}
        bodies = ((self.main, ()), *((body, (name,)) for name, body in self.functions.items()))
        if max(self.expanded(body, within, known) for body, within in bodies) > MOST_NODES:
            raise self.refuse(f"it has more than {MOST_NODES} nodes after inlining its functions")

    def opset(self, span: Span) -> None:
        version = dict(self.wire.fields("OperatorSetIdProto", span)).get(2, 0)
        if not 0 < version < LATEST_OPSET:
            raise self.refuse(f"invalid opset version {version}")

    def name_of_function(self, span: Span) -> Name:
        fields = self.wire.fields("FunctionProto", span)
        texts = {number: self.wire.text(value) for number, value in fields if number in (1, 10, 13)}
        return _domain(texts.get(10, "")), texts.get(1, ""), texts.get(13, "")

    def function(self, span: Span) -> None:
        name = self.name_of_function(span)
        for number, value in self.wire.fields("FunctionProto", span):
            if number == 7:
                self.node(value, self.functions[name], 0)
            elif number == 9:
                self.opset(value)
            elif number == 11:
                self.attribute(value, self.functions[name], 0)

    def expanded(self, body: _Body, within: tuple[Name, ...], known: dict[Name, int]) -> int:
        """How many nodes there are when each call of a function is replaced by what is in it."""
        if len(within) > DEEPEST:
            raise self.refuse(f"its functions are nested more than {DEEPEST} levels deep")
        total = body.nodes
        for name in body.calls:
            if name in within:
                raise self.refuse(f"the function {name[1][:40]!r} calls itself")
            if name not in known:
                known[name] = self.expanded(self.functions[name], (*within, name), known)
            total += known[name]
        return total

    def graph(self, span: Span, body: _Body, depth: int) -> None:
        if depth > DEEPEST:
            raise self.refuse(f"its graphs are nested more than {DEEPEST} levels deep")
        for number, value in self.wire.fields("GraphProto", span):
            if number == 1:
                self.node(value, body, depth)
            elif number == 5:
                self.tensor(value)
            elif number == 15:
                raise self.refuse("it contains sparse weights")

    def node(self, span: Span, body: _Body, depth: int) -> None:
        body.nodes += 1
        if body.nodes > MOST_NODES:
            raise self.refuse(f"it has more than {MOST_NODES} nodes")
        op = domain = overload = ""
        for number, value in self.wire.fields("NodeProto", span):
            if number == 4:
                op = self.wire.text(value)
            elif number == 7:
                domain = _domain(self.wire.text(value))
            elif number == 8:
                overload = self.wire.text(value)
            elif number == 5:
                self.attribute(value, body, depth)
        if (domain, op, overload) in self.functions:
            body.calls.append((domain, op, overload))
        elif domain == MICROSOFT and op not in CONTRIBUTED:
            raise self.refuse(f"it calls {domain}.{op[:40]}, which tsopt never exports")
        elif domain not in ("", MICROSOFT):
            raise self.refuse(
                f"it calls {op[:40]!r} of {domain[:40]!r}, which is neither standard nor defined in the file"
            )
        elif not domain and op in REFUSED:
            raise self.refuse(f"it calls {op}: {REFUSED[op]}")

    def attribute(self, span: Span, body: _Body, depth: int) -> None:
        for number, value in self.wire.fields("AttributeProto", span):
            if number in (5, 10):
                self.tensor(value)
            elif number in (6, 11):
                self.graph(value, body, depth + 1)
            elif number in (22, 23):
                raise self.refuse("it contains a sparse constant")

    def tensor(self, span: Span) -> None:
        """As many elements as its shape says, in the file or in a file of the bundle."""
        dims: list[int] = []
        kind, outside, elements = 0, False, dict[int, int]()
        where: dict[str, str] = {}
        for number, value in self.wire.fields("TensorProto", span):
            if number == 1:
                dims += self.wire.numbers(value)
                if len(dims) > MOST_DIMENSIONS:
                    raise self.refuse(f"a tensor has more than {MOST_DIMENSIONS} dimensions")
            elif number == 2:
                kind = value
            elif number == 14:
                outside |= value != 0
            elif number == 13:
                self.entry(value, where)
            elif number == 9:
                elements[9] = value[1] - value[0]
            elif number in TYPED:
                elements[number] = elements.get(number, 0) + self.wire.count(number, value)
            elif number == 3:
                raise self.refuse("a tensor is stored in segments")
        if any(not 0 <= size < 1 << 48 for size in dims) or math.prod(dims) >= 1 << 48:
            raise self.refuse(f"a tensor has the invalid shape {str(dims)[:80]}")
        if kind not in BITS and kind != STRINGS:
            raise self.refuse(f"a tensor has the unknown data type {kind}")
        if outside or where:
            self.external(where, -(-math.prod(dims) * BITS.get(kind, 0) // 8), bool(elements), kind)
        elif not self.is_whole(kind, math.prod(dims), {n: c for n, c in elements.items() if c}):
            raise self.refuse(f"the number of elements of a tensor does not match its shape {str(dims)[:80]}")

    def entry(self, span: Span, where: dict[str, str]) -> None:
        found = {number: self.wire.text(value) for number, value in self.wire.fields("StringStringEntryProto", span)}
        key = found.get(1, "")
        if key not in ("location", "offset", "length") or key in where:
            raise self.refuse(f"a tensor has the unknown or repeated external data key {key[:40]!r}")
        where[key] = found.get(2, "")

    def external(self, where: Mapping[str, str], needed: int, held: bool, kind: int) -> None:
        location = where.get("location", "")
        if location not in self.beside or location not in self.sizes:
            raise self.refuse(f"a tensor is stored in {location[:80]!r}, which is not a file of the bundle")
        numbers = [where.get("offset", "0"), where.get("length", str(needed))]
        if not all(text.isascii() and text.isdigit() and len(text) < 16 for text in numbers):
            raise self.refuse(f"a tensor has the invalid offset and length {str(numbers)[:80]} in {location!r}")
        offset, length = map(int, numbers)
        if held or kind == STRINGS or length != needed or offset + length > self.sizes[location]:
            raise self.refuse(
                f"a tensor of {needed} bytes cannot be stored at {offset} to {offset + length} of {location!r}"
            )

    def is_whole(self, kind: int, count: int, elements: Mapping[int, int]) -> bool:
        if not elements:
            return count == 0
        ((place, found),) = elements.items() if len(elements) == 1 else ((0, 0),)
        if place == 9:
            return kind != STRINGS and found == -(-count * BITS[kind] // 8)
        if kind == STRINGS or place == 6:
            return kind == STRINGS and place == 6 and found == count
        many = 2 if kind in COMPLEX else 1
        packed = BITS[kind] if BITS[kind] < 8 and place == 5 else 8  # several of 4 bits in one number
        return found in (count * many, -(-count * packed // 8))


def _domain(text: str) -> str:
    return "" if text in STANDARD else text
