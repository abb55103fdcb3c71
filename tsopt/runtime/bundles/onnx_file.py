"""Checks an ONNX file before any engine opens it: its external references, its contents and its size.

Parses the protobuf directly, without building objects. The package `onnx` is not needed to run a bundle and would copy
every weight, and one strict parser gives the same answer whatever is installed. Strict means that an unknown field, or
a repeated field that should be singular, is rejected, so that no engine can read it differently.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tsopt.errors import BundleError
from tsopt.runtime.onnx.onnx_model import DATA, FILE

LARGEST = (1 << 31) - 1  # bytes: protobuf's own limit
MOST_NODES = 200_000  # with every call of a function in its place
MOST_FIELDS = 50 * MOST_NODES  # which take about ten seconds to read
MOST_DIMENSIONS = 64
DEEPEST = 32  # graphs within graphs, functions within functions
LATEST_OPSET = 1000

# Fields of each message: number -> what it holds. `*`: any number of them. A message that is not here (types, notes for
# people) refers to nothing and is not looked into.
INT, FLOAT, DOUBLE, TEXT, OTHER = "int", "float", "double", "text", "other"
MESSAGES: dict[str, dict[int, str]] = {
    "ModelProto": {
        **dict.fromkeys((1, 5), INT),
        **dict.fromkeys((2, 3, 4, 6), TEXT),
        7: "GraphProto",
        8: "*OperatorSetIdProto",
        14: "*other",
        20: "*TrainingInfoProto",
        25: "*FunctionProto",
        26: "*other",
    },
    "OperatorSetIdProto": {1: TEXT, 2: INT},
    "GraphProto": {
        1: "*NodeProto",
        2: TEXT,
        5: "*TensorProto",
        10: TEXT,
        **dict.fromkeys((11, 12, 13, 14, 16), "*other"),
        15: "*SparseTensorProto",
    },
    "NodeProto": {
        **dict.fromkeys((1, 2), "*text"),
        **dict.fromkeys((3, 4, 6, 7, 8), TEXT),
        5: "*AttributeProto",
        **dict.fromkeys((9, 10), "*other"),
    },
    "AttributeProto": {
        **dict.fromkeys((1, 4, 13, 21), TEXT),
        2: FLOAT,
        **dict.fromkeys((3, 20), INT),
        5: "TensorProto",
        6: "GraphProto",
        7: "*float",
        8: "*int",
        9: "*text",
        10: "*TensorProto",
        11: "*GraphProto",
        14: OTHER,
        15: "*other",
        22: "SparseTensorProto",
        23: "*SparseTensorProto",
    },
    "TensorProto": {
        1: "*int",
        2: INT,
        3: "Segment",
        4: "*float",
        **dict.fromkeys((5, 7, 11), "*int"),
        6: "*text",
        **dict.fromkeys((8, 9, 12), TEXT),
        10: "*double",
        13: "*StringStringEntryProto",
        14: INT,
        16: "*other",
    },
    "StringStringEntryProto": {1: TEXT, 2: TEXT},
    "FunctionProto": {
        **dict.fromkeys((1, 8, 10, 13), TEXT),
        **dict.fromkeys((4, 5, 6), "*text"),
        7: "*NodeProto",
        9: "*OperatorSetIdProto",
        11: "*AttributeProto",
        **dict.fromkeys((12, 14), "*other"),
    },
}
WIDTH = {FLOAT: 4, DOUBLE: 8}
WIRE = {FLOAT: 5, DOUBLE: 1, INT: 0}

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

Span = tuple[int, int]
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
        self.data, self.path, self.sizes, self.beside = data, path, sizes, beside
        self.main = _Body()
        self.functions: dict[Name, _Body] = {}
        self.read = 0  # fields

    def refuse(self, why: str) -> BundleError:
        return _refused(self.path, why)

    def model(self) -> None:
        whole, graphs = (0, len(self.data)), 0
        for number, value in self.fields("ModelProto", whole):
            graphs += number == 7
            if number == 25:  # before the graph: it is known then what it may call
                name = self.name_of_function(value)
                if name in self.functions:
                    raise self.refuse(f"the function {name[1][:40]!r} is defined twice")
                self.functions[name] = _Body()
        if graphs != 1:
            raise self.refuse("it has no graph")
        for number, value in self.fields("ModelProto", whole):
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
        version = dict(self.fields("OperatorSetIdProto", span)).get(2, 0)
        if not 0 < version < LATEST_OPSET:
            raise self.refuse(f"invalid opset version {version}")

    def name_of_function(self, span: Span) -> Name:
        fields = self.fields("FunctionProto", span)
        texts = {number: self.text(value) for number, value in fields if number in (1, 10, 13)}
        return _domain(texts.get(10, "")), texts.get(1, ""), texts.get(13, "")

    def function(self, span: Span) -> None:
        name = self.name_of_function(span)
        for number, value in self.fields("FunctionProto", span):
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
        for number, value in self.fields("GraphProto", span):
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
        for number, value in self.fields("NodeProto", span):
            if number == 4:
                op = self.text(value)
            elif number == 7:
                domain = _domain(self.text(value))
            elif number == 8:
                overload = self.text(value)
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
        for number, value in self.fields("AttributeProto", span):
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
        for number, value in self.fields("TensorProto", span):
            if number == 1:
                dims += self.numbers(value)
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
                elements[number] = elements.get(number, 0) + self.count(number, value)
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
        found = {number: self.text(value) for number, value in self.fields("StringStringEntryProto", span)}
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

    def count(self, number: int, value: Any) -> int:
        """How many numbers a field holds: one, or a packed list."""
        kind = MESSAGES["TensorProto"][number].removeprefix("*")
        if kind == TEXT or not isinstance(value, tuple):
            return 1
        start, end = value
        if kind == INT:  # each ends with a byte below 128
            return len(self.data[start:end].translate(None, bytes(range(128, 256))))
        if (end - start) % WIDTH[kind]:
            raise self.refuse("a tensor ends in the middle of an element")
        return (end - start) // WIDTH[kind]

    def numbers(self, value: Any) -> list[int]:
        if not isinstance(value, tuple):
            return [value]
        found, (at, end) = [], value
        while at < end:
            number, at = self.varint(at, end)
            found.append(number)
            if len(found) > MOST_DIMENSIONS:
                break
        return found

    def text(self, span: Span) -> str:
        return self.data[span[0] : min(span[1], span[0] + 4096)].decode()

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            if at >= end or shift > 63:
                raise self.refuse("it is truncated or not an ONNX file")
            byte = self.data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
            shift += 7

    def fields(self, message: str, span: Span) -> Iterator[tuple[int, Any]]:
        """(number, value) of each field: a number, or where its bytes are; None for a float."""
        table, (at, end) = MESSAGES[message], span
        seen: set[int] = set()
        while at < end:
            key, at = self.varint(at, end)
            number, wire = key >> 3, key & 7
            kind = table.get(number)
            if kind is None:
                raise self.refuse(f"unknown field {number} of a {message}")
            many = kind[0] == "*"
            if not many and number in seen:
                raise self.refuse(f"repeated field {number} of a {message}")
            seen.add(number)
            self.read += 1
            if self.read > MOST_FIELDS:
                raise self.refuse(f"it has more than {MOST_FIELDS} fields")
            kind = kind[1:] if many else kind
            if wire == 2 and (many or kind not in WIRE):
                size, at = self.varint(at, end)
                if at + size > end:
                    raise self.refuse("it is truncated or not an ONNX file")
                yield number, (at, at + size)
                at += size
            elif wire != WIRE.get(kind):
                raise self.refuse(f"field {number} of a {message} has the wrong wire type")
            elif wire == 0:
                value, at = self.varint(at, end)
                yield number, value
            else:
                at += WIDTH[kind]
                yield number, None
        if at != end:
            raise self.refuse("it is truncated or not an ONNX file")


def _domain(text: str) -> str:
    return "" if text in STANDARD else text
