"""Specializations: what was compiled for further signatures, and how calls find it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsopt.compiler.calls.memory import overlaps
from tsopt.compiler.calls.structure import Structure, flatten
from tsopt.compiler.calls.types import TensorType, unlike_a_tensor
from tsopt.compiler.sizes.dims import Place
from tsopt.runtime.calling.executable import Executable

MAX_SPECIALIZATIONS = 16  # kept at a time: those that were called last
MAX_FORMS = 64  # remembered at a time
RECENT = 4  # executables that are asked first whether they accept a call

CallKey = tuple[Structure, tuple[Any, ...]]  # equal for calls that one specialization can serve
Form = tuple[Structure, tuple[Any, ...]]  # the same without the sizes


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any], *, aliasing: bool = False) -> CallKey:
    """The structure and tensor types of a call: equal for calls that one specialization can serve.

    Args:
        aliasing: calls whose tensors share memory in different ways get different keys.
    """
    leaves, structure = flatten((args, kwargs))
    shared = overlaps(leaves) if aliasing and not any(map(unlike_a_tensor, leaves)) else ()
    return structure, (*map(_kind, leaves), *shared)


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or unlike_a_tensor(leaf) is not None:
        return type(leaf), str(getattr(leaf, "layout", ""))
    return TensorType.of(leaf)


def form_of(key: CallKey) -> Form:
    """What calls have in common that differ only in their sizes."""
    structure, kinds = key
    return structure, tuple(
        (kind.dtype, len(kind.shape), kind.device) if isinstance(kind, TensorType) else kind for kind in kinds
    )


def sizes_of(key: CallKey) -> dict[Place, int]:
    """The sizes of a call, by tensor and axis."""
    kinds = (kind for kind in key[1] if isinstance(kind, TensorType))
    return {(place, axis): size for place, kind in enumerate(kinds) for axis, size in enumerate(kind.shape)}


@dataclass(slots=True)
class Seen:
    """What is known of the calls of a form that nothing compiled has served.

    Attributes:
        key: of one of them, or of a call that was compiled.
        calls: how many there were.
        fixed: whether they cannot be captured for more than one size.
        several: compiled for many of their sizes.
    """

    key: CallKey
    calls: int = 0
    fixed: bool = False
    several: Executable | None = None


class Specializations:
    """LRU caches: of what was compiled, or eager, by the key of the calls that it serves; and of the forms of calls."""

    def __init__(self) -> None:
        self._kept: OrderedDict[CallKey, Callable[..., Any]] = OrderedDict()
        self._forms: OrderedDict[Form, Seen] = OrderedDict()
        self._recent: tuple[Executable, ...] = ()  # replaced as a whole: other threads read it

    def __len__(self) -> int:
        return len(self._kept)

    def accepting(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Executable, Sequence[Any]] | None:
        """One that was used lately and serves this call, and the call's tensors. Takes a few microseconds."""
        for executable in self._recent:
            leaves = executable.accepts(args, kwargs)
            if leaves is not None:
                return executable, leaves
        return None

    def used(self, executable: Executable) -> None:
        """It is asked first from now on."""
        self._recent = (executable, *(item for item in self._recent if item is not executable))[:RECENT]

    def seen(self, key: CallKey) -> Seen:
        """What is known of calls of the same form. Raises TypeError as `get` does."""
        form = form_of(key)
        found = self._forms.get(form)
        if found is None:
            if len(self._forms) >= MAX_FORMS:
                self._forms.popitem(last=False)
            found = self._forms[form] = Seen(key)
        else:
            with contextlib.suppress(KeyError):
                self._forms.move_to_end(form)
        return found

    def get(self, key: CallKey) -> Callable[..., Any] | None:
        """Raises TypeError for a call with a constant that cannot be hashed, which cannot be recognized again."""
        found = self._kept.get(key)
        if found is not None:
            with contextlib.suppress(KeyError):  # another thread may just have evicted it
                self._kept.move_to_end(key)
        return found

    def keep(self, key: CallKey, made: Callable[..., Any]) -> None:
        if len(self._kept) >= MAX_SPECIALIZATIONS:
            self._kept.popitem(last=False)
        self._kept[key] = made
