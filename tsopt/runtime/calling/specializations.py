"""Specializations: what was compiled for further signatures, and how calls find it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tsopt.compiler.calls.counters import counted, without_integers
from tsopt.compiler.calls.memory import overlaps
from tsopt.compiler.calls.structure import Structure, flatten
from tsopt.compiler.calls.types import TensorType, unlike_a_tensor
from tsopt.compiler.sizes.dims import Place
from tsopt.errors import CaptureError, SignatureError
from tsopt.runtime.calling.executable import Executable

MAX_SPECIALIZATIONS = 16  # kept at a time: those that were called last
MAX_FORMS = 64  # remembered at a time
MAX_ALIKE = 16  # of one form, with integers that no size explains
MAX_REFUSED = 64  # remembered for each program
MAX_LAYOUTS = 2  # of calls of one size, for which nothing can be captured
RECENT = 4  # executables that are asked first whether they accept a call
MAX_MET = 8  # calls that others may be captured together with

# Of a call whose constants cannot be hashed, which contains itself, or goes down more levels than Python does.
UNTOLD = (TypeError, CaptureError, RecursionError)

CallKey = tuple[Structure, tuple[Any, ...]]  # equal for calls that one specialization can serve
Form = tuple[Structure, tuple[Any, ...]]  # the same without the sizes
Shapes = tuple[tuple[int, ...] | None, ...]  # of the arguments of a call that are tensors


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any], *, aliasing: bool | None = None) -> CallKey:
    """The structure and tensor types of a call: equal for calls that one specialization can serve.

    Args:
        aliasing: whether calls whose tensors share memory in different ways get different keys; None where that is not
            known: then only those do in which other tensors are one object.
    """
    leaves, structure = flatten((args, kwargs), share=aliasing is not False)
    shared = overlaps(leaves) if aliasing and not any(map(unlike_a_tensor, leaves)) else ()
    return structure, (*map(_kind, leaves), *shared)


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or unlike_a_tensor(leaf) is not None:
        return type(leaf), str(getattr(leaf, "layout", ""))
    found = TensorType.of(leaf)
    # What is computed does not depend on the stride of an axis of one element: that of the last of many tokens grows.
    return replace(
        found, stride=tuple(0 if size == 1 else step for size, step in zip(found.shape, found.stride, strict=True))
    )


def loose(key: CallKey) -> CallKey:
    """The key of calls whose tensors differ at most in how they lie in memory."""
    return key[0], tuple(replace(kind, stride=()) if isinstance(kind, TensorType) else kind for kind in key[1])


def _shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """What tells most calls apart, in a microsecond."""
    return tuple(
        [  # nested tensors have no shape, and raise an error when asked for it
            item.shape if type(item) is torch.Tensor and not item.is_nested else None
            for item in (*args, *kwargs.values())
        ]
    )


def plain(key: CallKey) -> bool:
    """Whether the tensors of a call are contiguous."""
    return all(kind.contiguous for kind in types_of(key))


def form_of(key: CallKey) -> Form:
    """What calls have in common that differ only in their sizes and integers."""
    structure, kinds = key
    return without_integers(structure), tuple(
        (kind.dtype, len(kind.shape), kind.device) if isinstance(kind, TensorType) else kind for kind in kinds
    )


def _differ_in_sizes(key: CallKey, other: CallKey) -> bool:
    """Whether two calls of one form differ only in their sizes, and in integers that go along with one."""
    if key[0] == other[0]:
        return True
    calls = [(types_of(mine), mine[0]) for mine in (key, other)]
    return all(len(types) > structure.highest() for types, structure in calls) and counted(calls) is not None


def types_of(key: CallKey) -> list[TensorType]:
    """The types of the tensors of a call."""
    return [kind for kind in key[1] if isinstance(kind, TensorType)]


def sizes_of(key: CallKey) -> dict[Place, int]:
    """The sizes of a call, by tensor and axis."""
    tensors = ((place, kind) for place, kind in enumerate(key[1]) if isinstance(kind, TensorType))
    return {(place, axis): size for place, kind in tensors for axis, size in enumerate(kind.shape)}


@dataclass(slots=True)
class ForSizes:
    """What was compiled for many sizes, and the calls that it was captured with."""

    executable: Executable
    keys: tuple[CallKey, ...]
    refused: dict[CallKey, None] = field(default_factory=dict)  # calls that its ranges cannot be extended to, in order

    @property
    def is_full(self) -> bool:
        """Whether as many calls are refused as are remembered."""
        return len(self.refused) >= MAX_REFUSED

    def refuse(self, key: CallKey) -> None:
        if self.is_full:
            del self.refused[next(iter(self.refused))]
        self.refused[self._told_by(key)] = None

    def refuses(self, key: CallKey) -> bool:
        return self._told_by(key) in self.refused

    def _told_by(self, key: CallKey) -> CallKey:
        return key if self.executable.signature.depends_on_layout else loose(key)

    def partner_for(self, key: CallKey) -> CallKey:
        """The call that has the most sizes that another one does not have."""
        sizes = sizes_of(key).items()
        return max(self.keys, key=lambda mine: len(sizes_of(mine).items() - sizes))

    def has_fixed(self, key: CallKey) -> bool:
        """Whether a call has another size than the only one that this has for an axis."""
        types = types_of(key)
        inputs = self.executable.signature.user_inputs
        if len(types) != len(inputs):  # one tensor in two places, which are inputs of their own
            return False
        return any(
            name is None and size != wanted
            for item, kind in zip(inputs, types, strict=True)
            for name, size, wanted in zip(
                item.axes or (None,) * len(kind.shape), kind.shape, item.type.shape, strict=True
            )
        )


@dataclass(slots=True)
class Seen:
    """What is known of calls that differ only in their sizes.

    Attributes:
        key: of the latest of them that nothing compiled for many sizes has served.
        partner: of a call that the next one may be captured together with, for many sizes.
        met: of such calls, the latest last.
        classes: whether calls of given sizes are like one that was traced, where two were not alike.
        calls: how many the model has served since something was compiled.
        failures: how often two of them could not be captured together, since some could.
        several: what was compiled for many of their sizes.
    """

    key: CallKey
    partner: CallKey | None = None
    met: list[CallKey] = field(default_factory=list)
    classes: list[Callable[[Mapping[Place, int]], bool]] = field(default_factory=list)
    calls: int = 0
    failures: int = 0
    several: list[ForSizes] = field(default_factory=list)

    def offer(self, key: CallKey) -> None:
        """The next calls may be captured together with this one."""
        self.partner = key
        self.met = [*(other for other in self.met if other != key), key][-MAX_MET:]

    def partner_for(self, key: CallKey) -> CallKey | None:
        """The latest call, or the latest one for which the model does the same as far as is known."""
        sizes = sizes_of(key)
        if self.partner is None or sizes_of(self.partner) == sizes:
            return None
        alike = (other for other in reversed(self.met) if self._are_alike(sizes_of(other), sizes))
        return next((other for other in alike if sizes_of(other) != sizes), None)

    def waits_for_another(self, key: CallKey) -> bool:
        """Whether none of the calls so far was like this one, which is new itself."""
        return bool(self.classes) and self.partner is not None and key not in self.met

    def _are_alike(self, sizes: Mapping[Place, int], others: Mapping[Place, int]) -> bool:
        return all(admits(sizes) == admits(others) for admits in self.classes)


class Specializations:
    """LRU caches: of what was compiled, or eager, by the key of the calls that it serves; and of the forms of calls."""

    def __init__(self) -> None:
        self._kept: OrderedDict[CallKey, Callable[..., Any]] = OrderedDict()
        self._forms: OrderedDict[Form, list[Seen]] = OrderedDict()
        self._recent: tuple[Executable, ...] = ()  # replaced as a whole: other threads read it
        self._by_shapes: dict[Shapes, Executable] = {}  # what has served a call; replaced likewise
        self._found: set[Executable] = set()  # by their shapes, since something was kept

    def __len__(self) -> int:
        return len(self._kept)

    def accepting(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Executable, Sequence[Any]] | None:
        """One that was used lately and serves this call, and the call's tensors. Takes a few microseconds."""
        for executable in self._recent:
            leaves = executable.accepts(args, kwargs)
            if leaves is not None:
                return executable, leaves
        known = self._by_shapes.get(_shapes_of(args, kwargs)) if self._recent else None  # they are forgotten together
        leaves = None if known is None else known.accepts(args, kwargs)
        if known is None or leaves is None:
            return None
        self._found.add(known)
        return known, leaves

    def used(self, executable: Executable, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """It is asked first from now on; and for calls of the same shapes as this one, after some others have been."""
        known = self._by_shapes if self._recent else {}
        shapes = _shapes_of(args, kwargs or {})
        others = [item for item in known.items() if item[0] != shapes][1 - MAX_SPECIALIZATIONS :]
        self._by_shapes = {**dict(others), **({shapes: executable} if any(shapes) else {})}
        self._recent = (executable, *(item for item in self._recent if item is not executable))[:RECENT]

    def seen(self, key: CallKey) -> Seen:
        """What is known of calls that differ from this one only in their sizes. Raises TypeError as `get` does."""
        form = form_of(key)
        group = self._forms.get(form)
        if group is None:
            if len(self._forms) >= MAX_FORMS:
                self._forms.popitem(last=False)
            group = self._forms[form] = []
        else:
            with contextlib.suppress(KeyError):
                self._forms.move_to_end(form)
        found = next((seen for seen in group if _differ_in_sizes(seen.key, key)), None)
        if found is None:
            found = Seen(key)
            self._forms[form] = [*group[-MAX_ALIKE + 1 :], found]
        return found

    def get(self, key: CallKey) -> Callable[..., Any] | None:
        """Raises TypeError for a call with a constant that cannot be hashed, which cannot be recognized again."""
        for kept in (loose(key), key):
            found = self._kept.get(kept)
            if found is not None:
                with contextlib.suppress(KeyError):  # another thread may just have evicted it
                    self._kept.move_to_end(kept)
                return found
        return None

    def serving(self, key: CallKey, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What was kept for a call, or compiled for many sizes, its own among them. Raises TypeError as `get` does."""
        found = self.get(key)
        for several in () if found is not None else self.seen(key).several:
            with contextlib.suppress(SignatureError):
                several.executable.bind(args, kwargs)
                return several.executable
        return found

    def leave(self, form: Form) -> None:
        """Forgets what was compiled for calls of other forms."""
        # Of copies: other threads change the order meanwhile.
        self._kept = OrderedDict((key, made) for key, made in tuple(self._kept.items()) if form_of(key) == form)
        forms = tuple(self._forms.items())
        self._forms, self._recent = OrderedDict((mine, seen) for mine, seen in forms if mine == form), ()

    def keep(self, key: CallKey, made: Callable[..., Any], *, by_layout: bool = False) -> None:
        """Keeps what serves a call, and those like it.

        Args:
            by_layout: it is not for calls whose tensors have other strides; unless it is the model, which serves them
                after MAX_LAYOUTS of these.
        """
        if isinstance(made, Executable):
            by_layout = by_layout or made.signature.depends_on_layout
        elif by_layout:
            # A copy: calls in other threads, and those in which a constant is compared, change the order meanwhile.
            by_layout = sum(loose(other) == loose(key) for other in tuple(self._kept)) < MAX_LAYOUTS
        key = key if by_layout else loose(key)
        found, self._found = self._found, set()
        for late in [late for late, item in tuple(self._kept.items()) if item in found]:
            with contextlib.suppress(KeyError):
                self._kept.move_to_end(late)
        if len(self._kept) >= MAX_SPECIALIZATIONS:
            self._kept.popitem(last=False)
        self._kept[key] = made
