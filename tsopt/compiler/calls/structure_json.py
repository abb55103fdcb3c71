"""Structures in files. Files are untrusted: nothing that a file names is imported."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from tsopt.compiler.calls.structure import CHANGEABLE, Path, Structure, name_of
from tsopt.errors import BackendError, BundleError

PLAIN: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict}
KEYS = (str, int, bool, float, type(None))  # of a dict; and tuples of these
TORCH = ("dtype", "device", "layout", "memory_format", "qscheme")  # constants of torch that have a name
SIZE = "torch:Size"


def to_json(structure: Structure) -> dict[str, Any]:
    """A JSON value. Classes are named, not stored.

    Raises:
        BundleError: a constant is not a plain value, one of torch or a class; a key is not a plain value.
    """
    out: dict[str, Any] = {"kind": structure.kind}
    if structure.kind in ("leaf", "shared"):
        return out | {"index": structure.index}
    if structure.kind == "given":
        return out | {"keys": [list(step) for step in structure.keys]}
    if structure.kind == "size":
        return out | {
            "index": structure.index,
            "keys": [list(step) for step in structure.keys],
            "value": list(structure.value),
        }
    if structure.kind == "const":
        return out | _const_to_json(structure.value)
    if structure.kind not in PLAIN or structure.cls not in (None, PLAIN[structure.kind]):
        out["class"] = structure.named or name_of(structure.cls)
    if structure.keys:
        out["keys"] = [_key_to_json(key) for key in structure.keys]
    return out | {"children": [to_json(child) for child in structure.children]}


def _const_to_json(value: object) -> dict[str, Any]:
    if value is None or type(value) in (bool, int, str):
        return {"value": value}
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, type):
        return {"class": name_of(value)}
    if type(value).__module__ == "torch" and type(value).__name__ in TORCH:
        return {"torch": type(value).__name__, "text": str(value)}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    raise BundleError(
        f"the call takes, returns or stores a {type(value).__name__}, which cannot be saved to a file",
        where=repr(value)[:80],
        fix="use a plain value, such as a number, a string or a dtype",
    )


def _key_to_json(key: Any) -> Any:
    if type(key) is tuple:
        return [_key_to_json(part) for part in key]
    if type(key) not in KEYS:  # such as a member of an enum, which JSON would turn into its value
        raise BundleError(
            f"the call takes, returns or stores a dict with a {type(key).__name__} as key, which cannot be saved",
            where=repr(key)[:80],
            fix="use strings or numbers as keys",
        )
    return key


def check_made(structure: Structure) -> None:
    """Raises BundleError for what a file cannot return: it stores only the name of a class, to compare with."""
    if structure.kind == "const" and (structure.named or isinstance(structure.value, type)):
        raise BundleError(
            f"the model returns the class {structure.named or name_of(structure.value)}, which a bundle cannot store",
            why="a bundle imports nothing that it names",
            fix="return the name of the class, or nothing in its place",
        )
    for child in structure.children:
        check_made(child)


def from_json(data: Any, objects: list[int] | None = None) -> Structure:
    """Reads what `to_json` wrote, from an untrusted file.

    A class is looked up among the modules already imported and taken only when it is a named tuple or a
    dataclass; anything else is compared by the name of its class, and comes back as a plain namespace with the same
    attributes. Nothing is imported.

    Args:
        objects: how many objects there are before it, in a list; those in it are added.

    Raises:
        BundleError: the data is not a structure.
    """
    try:
        made = _from_json(data)
        hash(made)
        _check_shared(made, [0] if objects is None else objects)
    except (TypeError, ValueError, KeyError, RuntimeError, RecursionError) as error:
        raise BundleError("the stored structure is damaged", why=str(error)[:200]) from error
    return made


def _from_json(data: Any) -> Structure:
    match data:
        case {"kind": "leaf" | "shared" as kind, "index": int(index)} if index >= 0:
            return Structure(kind, index=index)
        case {"kind": "given", "keys": list(steps)}:
            return Structure("given", keys=path_from(steps))
        case {"kind": "size", "index": int(index), "keys": list(steps), "value": [int(axis), int(more)]} if (
            index >= 0 and axis >= 0
        ):
            return Structure("size", index=index, keys=path_from(steps), value=(axis, more))
        case {"kind": "const"}:
            if "class" in data:
                return Structure("const", type, named=str(data["class"]))
            value = _const_from_json(data)
            return Structure("const", type(value), value=value)
        case {"kind": "tuple" | "list" | "dict" | "namedtuple" | "object" as kind, "children": list(children)}:
            keys = tuple(map(key_from, data.get("keys", ())))
            cls = _known_class(str(data.get("class", ""))) if kind in ("namedtuple", "object") else PLAIN[kind]
            if data.get("class") == name_of(OrderedDict) and kind == "dict":
                cls = OrderedDict
            named = str(data.get("class", "")) if kind in ("object", "tuple") else ""
            if kind == "tuple" and named:
                cls = _size_class() if named == SIZE else None
            if kind == "namedtuple" and cls is not None and not issubclass(cls, tuple):
                cls = None  # a dataclass under this kind would have its __init__ called
            check_keys(kind, keys, len(children), cls)
            nodes = tuple(_from_json(child) for child in children)
            if kind == "namedtuple" and cls is None:
                keys, kind, named = tuple(("attr", key) for key in keys), "object", str(data.get("class", ""))
            return Structure(kind, cls, keys, nodes, named=named if cls is None else "")
        case _:
            raise ValueError(f"invalid structure: {str(data)[:80]}")


def path_from(steps: Sequence[Any]) -> Path:
    """A path as JSON has it; raises ValueError for anything else."""
    path = tuple((str(place), key_from(key)) for place, key in steps)
    if not all(isinstance(key, (int, str, tuple, type(None))) and not isinstance(key, bool) for _, key in path):
        raise ValueError(f"not a path: {str(path)[:80]}")
    return path


def key_from(key: Any) -> Any:
    """A key as JSON has it: tuples are lists there."""
    return tuple(map(key_from, key)) if isinstance(key, list) else key


def check_keys(kind: str, keys: tuple[Any, ...], count: int, cls: type | None) -> None:
    """Raises ValueError for keys that a container of this kind and size cannot have."""
    if kind in ("tuple", "list"):
        if keys:
            raise ValueError(f"a {kind} has keys")
        return
    if len(keys) != count:
        raise ValueError("the number of keys differs from the number of children")
    if len(set(keys)) != count:
        raise ValueError("duplicate key")
    pairs = all(isinstance(key, tuple) and len(key) == 2 and key[0] in ("item", "attr") for key in keys)
    if kind == "object" and not pairs:
        raise ValueError("a key of an object is neither an item nor an attribute")
    if kind == "object" and any(place == "attr" and not _is_plain_name(key) for place, key in keys):
        raise ValueError("an attribute has an invalid name")
    if kind == "namedtuple" and not all(isinstance(key, str) for key in keys):
        raise ValueError("a field name of a named tuple is not a string")
    if kind == "namedtuple" and cls is not None and getattr(cls, "_fields", None) != keys:
        raise ValueError(f"{cls.__name__} has different fields in this process")


def _is_plain_name(key: Any) -> bool:
    return isinstance(key, str) and not (key.startswith("__") and key.endswith("__"))


def _check_shared(structure: Structure, made: list[int]) -> None:
    """`shared` must name a container that is complete before it."""
    if structure.kind == "shared" and structure.index >= made[0]:
        raise ValueError("an object is used before it is defined")
    for child in structure.children:
        _check_shared(child, made)
    made[0] += structure.kind in CHANGEABLE


def _const_from_json(data: Mapping[str, Any]) -> Any:
    if "float" in data:
        return float.fromhex(str(data["float"]))
    if "bytes" in data:
        return bytes.fromhex(str(data["bytes"]))
    if "torch" in data:
        return _constant_of_torch(str(data["torch"]), str(data["text"]))
    value = data["value"]
    if not isinstance(value, (bool, int, str, type(None))):
        raise ValueError(f"invalid constant: {str(value)[:40]}")
    return value


def _constant_of_torch(kind: str, text: str) -> Any:
    if kind not in TORCH:
        raise ValueError(f"unknown kind of constant {kind[:40]!r}")
    torch = _torch(f"the {kind} {text[:40]}")
    if kind == "device":
        return torch.device(text)
    found = vars(torch).get(text.removeprefix("torch."))  # not getattr: it may import
    if not isinstance(found, getattr(torch, kind)):
        raise ValueError(f"unknown {kind} {text[:40]!r}")
    return found


def _size_class() -> type:
    """What a shape is: of numpy's arrays, where torch is not installed, it is a tuple."""
    try:
        return importlib.import_module("torch").Size  # type: ignore[no-any-return]
    except ImportError:
        return tuple


def _torch(what: str) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise BackendError(
            "the bundle needs torch, which is not installed",
            why=f"the model takes or returns {what}",
            fix="pip install torch-tsopt, or export a model that takes and returns tensors and plain values",
        ) from error


def _known_class(name: str) -> type | None:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # not getattr: a lazy module would import
    if isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields")):
        return found
    return None
