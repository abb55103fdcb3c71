"""Reads the fields of ONNX's protobuf messages where they lie, without building objects.

Strict: an unknown field, or a repeated field that should be singular, is rejected, so that no engine can read it
differently.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

from tsopt.errors import BundleError

MOST_FIELDS = 10_000_000  # which take about ten seconds to read
MOST_DIMENSIONS = 64

Span = tuple[int, int]

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


class Wire:
    """The bytes of a model.

    Args:
        refuse: makes the error for what is wrong with them.
    """

    def __init__(self, data: mmap.mmap, refuse: Callable[[str], BundleError]) -> None:
        self._data, self._refuse = data, refuse
        self._read = 0  # fields

    def count(self, number: int, value: Any) -> int:
        """How many numbers a field holds: one, or a packed list."""
        kind = MESSAGES["TensorProto"][number].removeprefix("*")
        if kind == TEXT or not isinstance(value, tuple):
            return 1
        start, end = value
        if kind == INT:  # each ends with a byte below 128
            return len(self._data[start:end].translate(None, bytes(range(128, 256))))
        if (end - start) % WIDTH[kind]:
            raise self._refuse("a tensor ends in the middle of an element")
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
        return self._data[span[0] : min(span[1], span[0] + 4096)].decode()

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            if at >= end or shift > 63:
                raise self._refuse("it is truncated or not an ONNX file")
            byte = self._data[at]
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
                raise self._refuse(f"unknown field {number} of a {message}")
            many = kind[0] == "*"
            if not many and number in seen:
                raise self._refuse(f"repeated field {number} of a {message}")
            seen.add(number)
            self._read += 1
            if self._read > MOST_FIELDS:
                raise self._refuse(f"it has more than {MOST_FIELDS} fields")
            kind = kind[1:] if many else kind
            if wire == 2 and (many or kind not in WIRE):
                size, at = self.varint(at, end)
                if at + size > end:
                    raise self._refuse("it is truncated or not an ONNX file")
                yield number, (at, at + size)
                at += size
            elif wire != WIRE.get(kind):
                raise self._refuse(f"field {number} of a {message} has the wrong wire type")
            elif wire == 0:
                value, at = self.varint(at, end)
                yield number, value
            else:
                at += WIDTH[kind]
                yield number, None
        if at != end:
            raise self._refuse("it is truncated or not an ONNX file")
