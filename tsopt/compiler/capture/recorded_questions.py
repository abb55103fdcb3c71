"""What a model's Python code reads of its inputs beyond values, dtypes and shapes: strides, `requires_grad`, identity.

A tracer reads these once, for the example. They are recorded in one call of the model and become part of the signature:
a call for which they differ does not match it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tsopt.compiler.calls.effects import outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.result_views import View
from tsopt.compiler.calls.snapshot import elements_of
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.capture.export_errors import unflatten_clones
from tsopt.compiler.capture.memos import forget
from tsopt.compiler.capture.question import ATTRIBUTES, METHODS, PRESENT, Question
from tsopt.compiler.capture.recorded_views import views_among
from tsopt.compiler.graph.ops import is_of_default_dtype, tensors_of
from tsopt.compiler.outside import Outside
from tsopt.compiler.protect import modules_of, protected

# What else reveals how a tensor lies in memory. Where one of these is asked, the strides count.
LAYOUT = frozenset({"data_ptr", "untyped_storage", "storage", "_typed_storage", "is_set_to", "dim_order", "__dlpack__"})
LAYOUT |= {"as_strided", "as_strided_copy", "as_strided_scatter", "is_contiguous", "stride", "storage_offset"}
# Ops whose result is the memory of their argument or a copy, as its strides decide: what is written to it matters.
VIEW_OR_COPY = frozenset({"contiguous", "reshape", "reshape_as", "flatten", "ravel"})
GRADIENTS = frozenset({"grad", "grad_fn", "retains_grad", "output_nr"})  # known where `requires_grad` is
QUESTIONS = LAYOUT | METHODS | ATTRIBUTES | GRADIENTS
# Functions that answer for the thread, not for a tensor.
MODES: dict[Any, str] = {torch.is_inference_mode_enabled: "inference mode", torch.is_grad_enabled: "grad mode"}
_OWN = tuple(str(Path(file).parent) for file in (torch.__file__, Path(__file__).parents[1]))
_BELOW_TORCH = frozenset({"sympy", "mpmath", "networkx", "numpy", "optree"})  # what torch itself runs while it traces
_STANDARD = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call of a model has asked.

    Attributes:
        questions: for each tensor of the call, in order.
        aliasing: whether it counts which inputs are one object, or share memory: it has written one, or may have asked.
        written: positions of the tensors that it has written.
        modes: the modes of the thread that it has asked for, names of MODES, and whether they were on.
        views: for each result, where in memory it is; tensors of the model are counted behind the inputs. Empty where
            the record has ended before.
        held: those tensors of the model.
        default_dtype: whether it has asked for torch's default dtype, or has made tensors in it out of none.
    """

    questions: tuple[tuple[Question, ...], ...]
    aliasing: bool
    written: frozenset[int]
    modes: tuple[tuple[str, bool], ...]
    views: tuple[View | None, ...] = ()
    held: tuple[torch.Tensor, ...] = ()
    default_dtype: bool = False


def asked_by(model: Callable[..., Any], example: Example) -> Asked:
    """Makes a call of the model on tensors without values, and records what it asks.

    Without values, because a call may take long, write weights, or end the process (INT_MIN // -1). Where values decide
    how it goes on, the record ends. A model that memoizes tensors is called with values as well, so that what it holds
    is real when it is traced.
    """
    asked, is_changed = _asked_and_forgotten(model, example)
    if is_changed:
        args, kwargs = unflatten_clones(example)
        with protected(model), contextlib.suppress(Exception):  # one that fails here is explained when it is captured
            outcome_of(model, args, kwargs)
        asked, _ = _asked_and_forgotten(model, example)
    return asked


def _asked_and_forgotten(model: Callable[..., Any], example: Example) -> tuple[Asked, bool]:
    """What it asks, and whether it has kept anything outside of itself, which is gone again."""
    outside = Outside(model)
    asked, mode = _asked_by(model, example)
    is_changed = outside.put_back()
    return asked, forget(mode) or is_changed


def _asked_by(model: Callable[..., Any], example: Example) -> tuple[Asked, weakref.ref[FakeTensorMode]]:
    """What it asks, and the mode of the tensors that it was given."""
    leaves, structure = flatten((example.args, example.kwargs))
    places = len(list(structure.paths()))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copies = [mode.from_tensor(leaf.detach().clone(), static_shapes=True) for leaf in leaves]
    for copy in copies:
        copy.__class__ = _Asked
    held = _held_by(model)
    recorder = _Recorder(mode, copies, {_memory(tensor) for tensor in held if tensor.device.type != "meta"})
    args, kwargs = unflatten(structure, copies)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with mode, recorder:
            return model(*args, **kwargs)

    versions = [_version(copy) for copy in copies]
    # A model that fails here fails again when it is captured, and is explained there.
    results: list[torch.Tensor] = []
    with protected(model), _profiled() as calls, contextlib.suppress(Exception):
        results, *_ = outcome_of(recorded, args, kwargs)  # puts back what it changes in objects that cannot be copied
    could_be_one = len({(copy.dtype, copy.dim(), copy.device) for copy in copies}) < places
    changed = {i for i, (copy, version) in enumerate(zip(copies, versions, strict=True)) if _version(copy) != version}
    written = frozenset(changed | recorder.written)
    asked = Asked(
        tuple(recorder.questions(position) for position in range(len(copies))),
        (places > 1 and bool(written)) or (could_be_one and calls.asks_identity),
        written,
        tuple(calls.modes.items()),
        *recorder.views(results, held),
        default_dtype=calls.asks_default_dtype or recorder.has_default_dtype,
    )
    return asked, weakref.ref(mode)


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written; not tracked in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided and not tensor.is_nested else 0


def _held_by(model: Any) -> list[torch.Tensor]:
    """The tensors of a model, each once; those in lists and dicts among its attributes as well."""
    tables = (table for m in modules_of(model) for table in (m._parameters, m._buffers, m.__dict__))
    values: list[Any] = [value for table in tables for value in table.values()]
    values += [inner for value in values if issubclass(type(value), dict) for inner in dict.values(value)]
    values += [inner for value in values if issubclass(type(value), (list, tuple)) for inner in elements_of(value)]
    return list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())


class _Recorder(TorchFunctionMode):
    """Sees every function of torch that the model's Python code calls, and what it is given."""

    def __init__(self, mode: FakeTensorMode, inputs: Sequence[torch.Tensor], weights: set[int]) -> None:
        super().__init__()
        self._mode, self._inputs, self._weights = mode, inputs, weights
        self._positions = {id(tensor): position for position, tensor in enumerate(inputs)}
        self._asked: dict[int, dict[Question, None]] = {}
        self._all_strides = False
        # Whose memory it is, or could have been with other strides; held on to, so that none is used again.
        self._origin = {_memory(tensor): {position} for position, tensor in enumerate(inputs)}
        self._held: list[Any] = [tensor.untyped_storage() for tensor in inputs]
        self._decided: set[int] = set()
        self._as_is = set(range(len(inputs)))  # those that no function has returned for want of anything to do
        self._without: dict[int, torch.Tensor] = {}  # weights as tensors without values
        self.written: set[int] = set()
        self.has_default_dtype = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides`."""
        kwargs = kwargs or {}
        name = _name_of(func)
        if name not in QUESTIONS:
            args, kwargs = tree_map_only(torch.Tensor, self._without_values, (args, kwargs))
        given = list(_tensors_in((*args, *kwargs.values())))
        writes = _is_written(name, kwargs)
        versions = [_version(tensor) for tensor in given]
        result = func(*args, **kwargs)
        self._question(name, args, kwargs, result)
        if not given and is_of_default_dtype((args, kwargs), result):  # a tracer may record no more than the tensor
            self.has_default_dtype = True
        if name in VIEW_OR_COPY and given:
            self._follow(given[0], result)
        if given and result is given[0] and not writes:
            self._as_is.discard(self._positions.get(id(result), -1))
        for tensor, version in zip(given, versions, strict=True):
            if _version(tensor) != version or (writes and tensor.is_inference() and tensor is given[0]):
                self._wrote(tensor)
        return result

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A weight, or a value computed only from weights, as a fake tensor."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._without:
            self._without[id(tensor)] = self._mode.from_tensor(tensor, static_shapes=True)
            self._held.append(tensor)
        return self._without[id(tensor)]

    def _question(self, name: str, args: Any, kwargs: Any, answer: Any) -> None:
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or name not in QUESTIONS:
            return
        position = self._positions.get(id(tensor))
        if position is None:
            if name in LAYOUT and _memory(tensor) not in self._weights:
                self._all_strides = True
            return
        if name in GRADIENTS:
            name, args, kwargs, answer = "requires_grad", args[:1], {}, False
        rest = (*args[1:], *kwargs.values())
        question = Question.of(name, rest, answer)
        if question is None:
            question = Question("stride", (), tuple(tensor.stride()))
        self._asked.setdefault(position, {})[question] = None

    def _follow(self, source: torch.Tensor, result: Any) -> None:
        origin = self._origin.get(_memory(source))
        if origin is None or not isinstance(result, torch.Tensor):
            return
        self._decided |= origin
        memory = _memory(result)
        if memory not in self._origin:
            self._origin[memory] = set(origin)
            self._held.append(result.untyped_storage())

    def _wrote(self, tensor: torch.Tensor) -> None:
        self.written |= self._origin.get(_memory(tensor), set())

    def views(
        self, results: Sequence[torch.Tensor], held: Sequence[torch.Tensor]
    ) -> tuple[tuple[View | None, ...], tuple[torch.Tensor, ...]]:
        """Where in memory each result is, the model's tensors counted behind the inputs; and those tensors."""
        without = [self._without.get(id(tensor), tensor) for tensor in held]
        whole = {id(tensor): other for tensor, other in zip(held, without, strict=True)}
        as_is = [position in self._as_is for position in range(len(self._inputs))] + [True] * len(held)
        results = [whole.get(id(result), result) for result in results]
        return views_among(results, [*self._inputs, *without], as_is), tuple(held)

    def questions(self, position: int) -> tuple[Question, ...]:
        """What was asked of one of the inputs."""
        found = dict(self._asked.get(position, {}))
        found |= dict.fromkeys(Question(PRESENT, (name,), False) for name in _missing(self._inputs[position]))
        if self._all_strides or (position in self._decided and position in self.written):
            found[Question("stride", (), tuple(self._inputs[position].stride()))] = None
        return tuple(found)


class _Asked(FakeTensor):
    """An input that notes which attributes the user's code looks for in vain: the tensor of a call may have them."""

    def __getattr__(self, name: str) -> Any:
        if _is_of_the_user(sys._getframe(1).f_code):
            self.__dict__.setdefault("_tsopt_missing", {})[name] = None
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")


def _missing(tensor: torch.Tensor) -> list[str]:
    return list(tensor.__dict__.get("_tsopt_missing", ()))


@functools.lru_cache(maxsize=4096)
def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return str(func.__self__.__name__ if name == "__get__" else name)


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        yield from tensors_of(value)


def _is_written(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes its first argument, or says so by an option."""
    in_place = name.endswith("_") and not name.endswith("__")
    operator_in_place = name.startswith("__i") and name not in ("__invert__", "__int__", "__index__", "__init__")
    by_option = kwargs.get("inplace") or kwargs.get("out") is not None
    return in_place or operator_in_place or name in ("__setitem__", "__set__") or bool(by_option)


class _profiled:
    """The functions of Python that run in a block. Where the thread is profiled already, nothing is known of them."""

    def __init__(self) -> None:
        self.modes: dict[str, bool] = {}
        self.asks_default_dtype = False
        self._codes: set[CodeType] = set()
        self._by_call = False
        self._blind = False

    def __enter__(self) -> _profiled:
        self._blind = sys.getprofile() is not None
        if not self._blind:
            sys.setprofile(self._saw)
        return self

    def __exit__(self, *details: object) -> None:
        if not self._blind:
            sys.setprofile(None)

    def _saw(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            self._codes.add(frame.f_code)
        elif event == "c_call":
            if function in (id, operator.is_, operator.is_not) and _is_of_the_user(frame.f_code):
                self._by_call = True
            elif function in MODES and _is_of_the_user(frame.f_code):
                self.modes[MODES[function]] = function()
            elif function == torch.get_default_dtype and _is_of_the_user(frame.f_code):
                self.asks_default_dtype = True

    @property
    def asks_identity(self) -> bool:
        """Whether code of the user's, or of a library that is not torch, may have compared inputs by identity."""
        return self._blind or self._by_call or any(map(_compares_identity, filter(_is_of_the_user, self._codes)))


@functools.lru_cache(maxsize=4096)
def _is_of_the_user(code: CodeType) -> bool:
    """Whether code is neither PyTorch's, whose values do not depend on identity, nor of the standard library."""
    file = code.co_filename
    if file.startswith((*_OWN, "<frozen", "<string>")):  # the latter is what dataclasses generate
        return False
    of_package = file.rpartition("site-packages")[2].lstrip("/\\").split("/")[0]
    return not file.startswith(_STANDARD) or ("site-packages" in file and of_package not in _BELOW_TORCH)


@functools.lru_cache(maxsize=4096)
def _compares_identity(code: CodeType) -> bool:
    """Whether there is an `a is b` of two values; one with a constant or a global asks for something else."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG", "NOP")]
    for position, step in enumerate(steps):
        if step.opname != "IS_OP" or steps[position - 1].argval == "__class__":
            continue
        before = position - 1
        while before > 0 and steps[before].opname == "LOAD_ATTR":
            before -= 1
        if before >= 0 and steps[before].opname not in ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME"):
            return True
    return False
