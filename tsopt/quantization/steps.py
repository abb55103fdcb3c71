"""The steps of a quantization, kept between runs: what one has measured, the next does not measure again.

A step is stored under a digest of all that decides its result: the program with its weights, the calibration data, the
machine, and the versions and code. A second run of the same model reads what the first one found; a run that was
interrupted, or had too little time, is continued by the next one. Entries hold tensors and JSON, no code, and are not
trusted: the criterion judges every candidate again before it races.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from tsopt._version import __version__
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import HIGHEST, SMALLEST, QParams
from tsopt.passes.quantize.sensitivity import Loss
from tsopt.runtime.checking.criterion import Judgement
from tsopt.runtime.racing import cache_files
from tsopt.runtime.racing.environment import environment

log = logging.getLogger("tsopt")
T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
FORMAT = 1
VALUE = "json"  # the tensor of an entry that holds the bytes of its JSON
DAMAGED = (
    OSError,
    SafetensorError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """How the result of a kind of step is stored.

    Attributes:
        write: makes tensors, by name, and a JSON value of it.
        read: makes the result of these. Raises one of DAMAGED for what `write` could not have made.
    """

    kind: str
    write: Callable[[T], tuple[dict[str, torch.Tensor], Any]]
    read: Callable[[Tensors, Any], T]


@dataclass(frozen=True, slots=True)
class Ranges:
    """What calibration data says about values, by their names.

    Attributes:
        qparams: of the inputs of layers.
        scores: of queries and keys.
        unseen: why the range of a value is not known.
    """

    qparams: Mapping[str, QParams]
    scores: Mapping[str, QParams]
    unseen: Mapping[str, str]


class Steps:
    """The results of steps by what decides them.

    Args:
        base: computes a digest of what decides all of them, when there is a first step; None: nothing is stored.
    """

    def __init__(self, base: Callable[[], str] | None = None) -> None:
        self._base = base

    def take(
        self, form: Form[T], make: Callable[[], T], *what: object, is_sound: Callable[[T], bool] = lambda found: True
    ) -> T:
        """The result of a step: the stored one, or what `make` returns, which is stored.

        Args:
            what: what decides it beside the base, as values that JSON can hold.
            is_sound: whether a result fits the program. One that does not is neither taken nor stored.
        """
        key = self._key(form.kind, what)
        known = None if key is None else _read(form, key)
        if known is not None and is_sound(known):
            return known
        made = make()
        if key is not None and is_sound(made):
            _keep(form, key, made)
        return made

    def _key(self, kind: str, what: tuple[object, ...]) -> str | None:
        if self._base is None:
            return None
        digest, kept = self._base(), json.dumps([kind, what])
        self._base = lambda: digest
        return hashlib.sha256(f"{digest} {kept}".encode()).hexdigest()


def steps_of(program: Program, data: Callable[[], str], *more: object) -> Steps:
    """Those of the quantization of a program. The oldest of others are removed where there are many.

    Args:
        data: computes a digest of the calibration data.
        more: what else decides all of them.
    """
    try:
        cache_files.drop_oldest_steps()
    except OSError as error:
        log.info("cannot remove old steps of quantization: %s", error)

    def base() -> str:
        machine = [environment().to_json(), torch.get_num_threads(), torch.get_float32_matmul_precision()]
        what = [FORMAT, __version__, _code(), machine, program.fingerprint(contents=True), data(), *more]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    return Steps(base)


@functools.cache
def _code() -> str:
    """A digest of tsopt's own code: what it measures may differ from one commit to the next."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(form: Form[T], key: str) -> T | None:
    try:
        raw = cache_files.read(key, cache_files.STEP)
        if raw is None:
            return None
        tensors = load(raw)
        return form.read(tensors, json.loads(tensors.pop(VALUE).numpy().tobytes()))
    except DAMAGED as error:
        log.info("a stored step of quantization is damaged: %s (%s)", key, error)
        return None


def _keep(form: Form[T], key: str, result: T) -> None:
    """Stores a result. A cache that cannot be written to is not an error."""
    try:
        tensors, value = form.write(result)
        held = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        raw = save({**{name: tensor.contiguous() for name, tensor in tensors.items()}, VALUE: held})
        if len(raw) <= cache_files.LARGEST_STEP:
            cache_files.write(key, raw, cache_files.STEP)
    except DAMAGED as error:
        log.info("cannot store a step of quantization: %s", error)


def _write_factors(factors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any]:
    """Values that have the same factors share one tensor, and do so again when it is read."""
    places: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for held in factors.values():
        if id(held) not in places:
            places[id(held)] = str(len(places))
            tensors[places[id(held)]] = held
    return tensors, [[name, places[id(held)]] for name, held in factors.items()]


def _read_factors(tensors: Tensors, value: Any) -> dict[str, torch.Tensor]:
    for factors in tensors.values():
        if factors.dtype != torch.float32 or factors.dim() != 1 or not bool((factors.isfinite() & (factors > 0)).all()):
            raise ValueError("invalid factors")
    return {_text(name): tensors[_text(place)] for name, place in value}


def _write_losses(losses: Mapping[str, Loss]) -> tuple[dict[str, torch.Tensor], Any]:
    errors = {str(place): loss.errors for place, loss in enumerate(losses.values())}
    return errors, [[name, item.squares, item.size, item.count, item.effect] for name, item in losses.items()]


def _read_losses(tensors: Tensors, value: Any) -> dict[str, Loss]:
    found = {}
    for place, (name, squares, size, count, effect) in enumerate(value):
        errors = tensors[str(place)]
        if errors.dtype != torch.float64 or errors.dim() != 1 or type(count) is not int or count < 0:
            raise ValueError("invalid loss")
        known = None if effect is None else _amount(effect)
        found[_text(name)] = Loss(errors, _amount(squares), _amount(size), count, known)
    return found


def _write_ranges(ranges: Ranges) -> tuple[dict[str, torch.Tensor], Any]:
    return {}, [_plain(ranges.qparams), _plain(ranges.scores), dict(ranges.unseen)]


def _read_ranges(tensors: Tensors, value: Any) -> Ranges:
    qparams, scores, unseen = value
    texts = {_text(name): _text(why) for name, why in unseen.items()}
    return Ranges(_qparams(qparams), _qparams(scores), texts)


def _plain(qparams: Mapping[str, QParams]) -> dict[str, list[Any]]:
    return {name: [by.scale, by.zero, by.is_symmetric] for name, by in qparams.items()}


def _qparams(value: Any) -> dict[str, QParams]:
    found = {}
    for name, (scale, zero, is_symmetric) in value.items():
        if type(zero) is not int or type(is_symmetric) is not bool or not 0 <= zero <= HIGHEST * (not is_symmetric):
            raise ValueError("invalid zero point")
        if not SMALLEST <= _number(scale) < math.inf:
            raise ValueError("invalid scale")
        found[_text(name)] = QParams(scale, zero, is_symmetric)
    return found


def _write_judgement(item: Judgement) -> tuple[dict[str, torch.Tensor], Any]:
    error = None if item.error is None else float(item.error)
    return {}, [item.ok, float(item.loss), float(item.limit), item.text, error]


def _read_judgement(tensors: Tensors, value: Any) -> Judgement:
    ok, loss, limit, text, error = value
    if type(ok) is not bool:
        raise TypeError("not a judgement")
    return Judgement(ok, _number(loss), _number(limit), _text(text), None if error is None else _number(error))


def _amount(value: Any) -> float:
    """Of squares that were added up; NaN and infinities are possible."""
    if _number(value) < 0:
        raise ValueError("negative")
    return float(value)


def _number(value: Any) -> float:
    if type(value) is not float:
        raise TypeError("not a number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


FACTORS: Form[dict[str, torch.Tensor]] = Form("factors", _write_factors, _read_factors)
RANGES: Form[Ranges] = Form("ranges", _write_ranges, _read_ranges)
LOSSES: Form[dict[str, Loss]] = Form("losses", _write_losses, _read_losses)
JUDGEMENT: Form[Judgement] = Form("judgement", _write_judgement, _read_judgement)
