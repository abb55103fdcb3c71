"""Side effects of a call on its arguments other than tensor writes: a cache grows, a list is appended to.

Does not import torch: a bundle applies the same effects to the objects of its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tsopt.compiler.calls.snapshot import Snapshot, attributes_of, refill_items, same
from tsopt.compiler.calls.structure import (
    CHANGEABLE,
    Given,
    Path,
    Structure,
    at_path,
    flatten,
    parts_of,
    put,
    unflatten,
)
from tsopt.compiler.calls.structure_json import check_keys, from_json, key_from, path_from, to_json
from tsopt.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Effect:
    """What one object of a call holds behind the call: a list, a dict, or an object with attributes.

    Attributes:
        path: where in `(args, kwargs)` the object is.
        kind, keys: of the object then, as in its `Structure`.
        parts: a tuple of its parts; those of kind `given` are parts of the call as it was before.
    """

    path: Path
    kind: str
    keys: tuple[Any, ...]
    parts: Structure

    def labels(self) -> Iterator[tuple[int, str]]:
        """(index, readable path) of each tensor that it holds then."""
        for (_, key), child in zip(
            steps_of(self.kind, self.keys, len(self.parts.children)), self.parts.children, strict=True
        ):
            yield from child.paths(f"{self}.{key}")

    def __str__(self) -> str:
        return text_of(self.path)

    def to_json(self) -> dict[str, Any]:
        keys = [list(key) if isinstance(key, tuple) else key for key in self.keys]
        return {"path": list(map(list, self.path)), "kind": self.kind, "keys": keys, "parts": to_json(self.parts)}

    @classmethod
    def from_json(cls, data: Any, outer: Structure, made: list[int]) -> Effect:
        """Reads untrusted data: only objects of the call itself can be modified, and no dunder attributes.

        Args:
            outer: the structure of the call.
            made: how many objects there are before it, as `structure.from_json` counts them.
        """
        path, keys = path_from(data["path"]), tuple(map(key_from, data["keys"]))
        parts, kind = from_json(data["parts"], made), str(data["kind"])
        check_keys(kind, keys, len(parts.children), None)
        if len(path) < 2 or kind not in CHANGEABLE or _node_at(outer, path).kind != kind or parts.kind != "tuple":
            raise ValueError(f"not an object of the call: {str(path)[:80]}")
        check_given(parts, outer)
        return cls(path, kind, keys, parts)


class _Before:
    """The objects of a call `(args, kwargs)` before it is made, and what each of them holds.

    A context, in which the call is made: what cannot be copied from call to call is left as it was.
    """

    def __init__(self, call: tuple[Sequence[Any], Mapping[str, Any]], held: Container[int]) -> None:
        self._changeable: dict[int, tuple[Path, Any, str, tuple[Any, ...], list[Any]]] = {}
        self._constant: list[tuple[Path, Any, Snapshot]] = []
        self._outlive = held
        whole = (tuple(call[0]), dict(call[1]))
        todo: list[tuple[Path, Any, Structure]] = [((), whole, flatten(whole)[1])]
        while todo:
            path, item, node = todo.pop()
            if node.kind == "const":
                self._constant.append((path, item, Snapshot(item)))
            if node.kind in ("const", "leaf", "shared"):
                continue
            kind, keys, children = parts_of(item) or (node.kind, (), ())
            if kind in CHANGEABLE and len(path) > 1:
                self._changeable[id(item)] = path, item, kind, keys, list(children)
            paths = ((*path, step) for step in steps_of(kind, keys, len(children)))
            todo += list(zip(paths, children, node.children, strict=True))[::-1]

    def __enter__(self) -> _Before:
        return self

    def __exit__(self, *details: object) -> None:
        for _, _, kept in self._constant:
            kept.restore()

    def flatten(self, result: Any) -> tuple[list[Any], Structure, tuple[Effect, ...]]:
        """The tensors of what the call has returned, and of what it has put into its objects; the forms of both.

        Raises:
            CaptureError: it has changed an object that cannot be copied.
        """
        for path, item, kept_now in self._constant:
            if kept_now.changed():
                raise CaptureError(
                    f"the call modifies a {type(item).__name__} in its arguments",
                    where=f"input {text_of(path)}",
                    why="this object cannot be copied, so every comparison would modify it again",
                    fix="keep mutable state in tensors, lists, dicts, dataclasses or objects with plain attributes",
                )
        changed: list[tuple[Path, str, tuple[Any, ...]]] = []
        kept: list[tuple[Any, ...]] = []
        for path, item, kind, keys, children in self._changeable.values():
            _, now, parts = parts_of(item) or (kind, (), ())
            if now == keys and len(parts) == len(children) and all(map(same, parts, children)):
                continue
            before = dict(zip(steps_of(kind, keys, len(children)), children, strict=True))
            changed.append((path, kind, now))
            kept.append(
                tuple(
                    Given((*path, step)) if step in before and same(part, before[step]) else part
                    for step, part in zip(steps_of(kind, now, len(parts)), parts, strict=True)
                )
            )
        paths = {key: path for key, (path, *_) in self._changeable.items()}
        paths |= {id(item): path for path, item, kept_now in self._constant if kept_now}
        leaves, whole = flatten((result, *kept), share=True, given=paths, held=self._outlive)
        returned, *parts_then = whole.children
        effects = (Effect(*where, then) for where, then in zip(changed, parts_then, strict=True))
        return leaves, returned, tuple(effects)


def outcome_of(
    called: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], held: Container[int] = ()
) -> tuple[list[Any], Structure, tuple[Effect, ...]]:
    """Makes a call; the tensors and the forms of what it returns and of what it leaves in its objects.

    Args:
        held: ids of what the model holds.

    Raises:
        CaptureError: it changes an object that cannot be copied, which is put back.
        Exception: whatever the call raises.
    """
    with _Before((args, kwargs), held) as before:
        return before.flatten(called(*args, **kwargs))


def containers_of(call: tuple[Sequence[Any], Mapping[str, Any]]) -> list[Any]:
    """The lists, dicts and objects of a call that are copied from call to call."""
    return [item for _, item, *_ in _Before(call, ())._changeable.values()]


def finish(result: Structure, effects: Sequence[Effect], leaves: Sequence[Any], call: Any) -> Any:
    """What a call returns, around the tensors that a program has made for it; its objects are changed as they were."""
    whole = Structure("tuple", tuple, (), (result, *(effect.parts for effect in effects)))
    # All of it is put together before anything is changed: paths lead through the call as it was.
    returned, *parts = unflatten(whole, leaves, call)
    targets = [at_path(call, effect.path) for effect in effects]
    for effect, target, children in zip(effects, targets, parts, strict=True):
        _change(target, effect, children)
    return returned


def _change(target: Any, effect: Effect, children: Sequence[Any]) -> None:
    if effect.kind == "list":
        target[:] = children
        return
    if effect.kind == "dict":
        refill_items(target, dict(zip(effect.keys, children, strict=True)))
        return
    for name in attributes_of(target):
        if ("attr", name) not in effect.keys:
            object.__delattr__(target, name)
    put(target, effect.keys, children)


def steps_of(kind: str, keys: Sequence[Any], count: int) -> list[tuple[str, Any]]:
    """The last steps of the paths to the parts of a container."""
    if kind == "object":
        return list(keys)
    return [("item", key) for key in (keys if kind == "dict" else range(count))]


def text_of(path: Path) -> str:
    """A path in a call, as a user writes it."""
    return ".".join([*["args"] * (path[0][1] == 0), *(str(key) for _, key in path[1:])])


def _node_at(outer: Structure, path: Path) -> Structure:
    node = outer
    for step in path:
        node = node.children[steps_of(node.kind, node.keys, len(node.children)).index(step)]
    return node


def check_given(node: Structure, outer: Structure | None) -> None:
    """Raises ValueError where what is `given` is no part of the call; without a call, where anything is."""
    if node.kind == "given":
        if outer is None:
            raise ValueError("the structure of the call refers to the call itself")
        _node_at(outer, node.keys)
    for child in node.children:
        check_given(child, outer)
