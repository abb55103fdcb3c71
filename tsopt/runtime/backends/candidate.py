"""A candidate as a value: a variant of the program, a backend and its options; and the candidates of a race."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tsopt.compiler.precision_names import FP32, HALVES, INT8, INT8_STATIC, INT8_WEIGHTS, INTEGER_VARIANTS, PRECISIONS
from tsopt.errors import UsageError
from tsopt.runtime.backends.table import BACKENDS, BackendInfo, Options, info_of
from tsopt.runtime.racing.environment import computes_in_bfloat16

AUTO = "auto"  # every floating-point precision
ONE_THREAD: Options = (("threads", 1),)
BY_ENGINE = ("precision", "other_ops")  # options by which an engine lowers the precision of what it is given
CONSTANTS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entrant of a race.

    Attributes:
        backend: its name in the table, or `package.module:Class`.
        options: that it is given; the others are as the backend and the race have them.
        variant: of the program: `fp32`, or the precision that a pass has lowered it to.
    """

    backend: str
    options: Options = ()
    variant: str = FP32

    @classmethod
    def parse(cls, spec: str) -> Candidate:
        """The candidate that a text names: `onnxruntime?threads=1&opset=21`.

        `precision=bf16` is an option for a backend that computes so by itself, and otherwise the variant.

        Raises:
            UsageError: an option without a value, no backend of that name, or none in that precision.
        """
        name, _, rest = spec.partition("?")
        options: dict[str, Any] = {}
        for part in filter(None, rest.split("&")):
            key, equals, value = part.partition("=")
            if not equals or not value:
                raise UsageError(f"the option {key!r} in {spec!r} has no value", fix=f"write {name}?{key}=VALUE")
            options[key] = int(value) if value.lstrip("-").isdigit() else CONSTANTS.get(value.lower(), value)
        info, precision = info_of(name), options.get("precision", FP32)
        known = dict.fromkeys((FP32, *info.precisions, *info.lowered))
        if len(known) > 1 and precision not in known and not info.is_own:
            raise UsageError(f"{name} does not support precision {precision!r}", fix=f"use one of: {', '.join(known)}")
        if precision in info.lowered or (precision == FP32 and not info.precisions):
            options.pop("precision", None)
            return cls(name, tuple(options.items()), precision)
        return cls(name, tuple(options.items()))

    @property
    def info(self) -> BackendInfo:
        """What is known of its backend. Raises UsageError where there is none of that name."""
        return info_of(self.backend)

    @property
    def key(self) -> str:
        """The text that `parse` makes this candidate of; what rows, caches and other processes know it by."""
        options = "&".join(f"{name}={_text(value)}" for name, value in self._asked)
        return f"{self.backend}?{options}" if options else self.backend

    @property
    def title(self) -> str:
        """Its name in tables: `ONNX Runtime, 1 thread`."""
        return ", ".join([self.info.title, *(_said(name, value) for name, value in self._asked)])

    @property
    def _asked(self) -> Options:
        return self.options if self.variant == FP32 else (*self.options, ("precision", self.variant))

    @property
    def precision(self) -> str:
        """What it computes products of float32 matrices in."""
        return str(dict(self.options).get("precision", self.variant))

    @property
    def keeps_float32(self) -> bool:
        """Whether what its program has in float32 is computed so: an engine's own options apply to all layers."""
        options = dict(self.options)
        return all(options.get(name, FP32) == FP32 for name in BY_ENGINE)

    @property
    def is_on_one_thread(self) -> bool:
        """Whether one thread is all that is asked of it: such a one is not always tried."""
        return self == Candidate(self.backend, ONE_THREAD)

    def in_full_precision(self) -> Candidate:
        """The same for the program as it is."""
        options = tuple(option for option in self.options if option[0] not in BY_ENGINE)
        return replace(self, options=options, variant=FP32)

    def in_precision(self, precision: str) -> Candidate | None:
        """The same in another precision; None if the backend does not support it."""
        if precision in self.info.lowered:
            return replace(self, variant=precision)
        if precision in self.info.precisions:
            return replace(self, options=(*self.options, ("precision", precision)))
        return None


def _said(name: str, value: object) -> str:
    """An option as a table says it: `1 thread`, `precision bf16`."""
    if name == "other_ops":
        return f"other ops {value}"
    if name == "threads":
        return f"{_text(value)} {'thread' if value == 1 else 'threads'}"
    return f"{name} {_text(value)}"


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def candidates_for(
    wanted: Sequence[str] | Literal["all"] | None,
    precision: str = FP32,
    *,
    on_gpu: bool = False,
    calibrated: bool = False,
    keep_float: bool = False,
) -> tuple[Candidate, ...]:
    """The candidates of a race.

    Args:
        wanted: texts that `Candidate.parse` reads; `all` for every engine; None for what compiles in seconds and is
            installed.
        precision: one of PRECISIONS that those who have it race in as well; `auto` for all of them, but for int8 only
            with calibration data.
        on_gpu: whether the model is on a GPU.
        calibrated: whether there is calibration data.
        keep_float: whether some layers must stay in float32, which not every engine can do.

    Raises:
        UsageError: an unknown precision or backend, or a precision that no selected backend supports.
    """
    if wanted is None or wanted == "all":
        racing = tuple(_from_table(on_gpu, everybody=wanted == "all"))
    else:
        racing = tuple(map(Candidate.parse, wanted))
    unable = next((candidate for candidate in racing if keep_float and not candidate.keeps_float32), None)
    if unable is not None:
        raise UsageError(
            f"{unable.key} cannot keep layers in float32",
            why="the engine chooses the precision of all of them together",
            fix="leave out this candidate, or keep_float",
        )
    return tuple(dict.fromkeys((*racing, *_in_precision(racing, precision, calibrated, keep_float))))


def _from_table(on_gpu: bool, *, everybody: bool) -> Iterator[Candidate]:
    for info in BACKENDS.values():
        usual = {"always": True, "installed": info.is_installed, "gpu": on_gpu, "all": False, "never": False}
        if not (usual[info.races] or (everybody and info.races in ("installed", "all"))):
            continue
        yield Candidate(info.name)
        yield from (Candidate(info.name, options) for options in info.also)
        if everybody and on_gpu:
            yield from (Candidate(info.name, options) for options in info.also_on_gpu)


def _in_precision(
    racing: Sequence[Candidate], precision: str, calibrated: bool, keep_float: bool
) -> tuple[Candidate, ...]:
    """The backends that have lower precisions, once more in each that is asked for."""
    if precision not in (*PRECISIONS, AUTO):
        raise UsageError(f"unknown precision {precision!r}", fix=f"use one of: {', '.join((*PRECISIONS, AUTO))}")
    asked: tuple[str, ...] = ("tf32", *HALVES) if precision == AUTO else (precision,) if precision != FP32 else ()
    if precision == INT8 or (calibrated and precision == AUTO):
        asked = (*(item for item in asked if item != INT8), INT8, INT8_WEIGHTS, *([INT8_STATIC] if calibrated else []))
    plain = [candidate for candidate in racing if candidate == Candidate(candidate.backend)]
    found = [made for item in asked for candidate in plain if (made := candidate.in_precision(item)) is not None]
    if computes_in_bfloat16():
        low = [candidate for candidate in found if candidate.variant in INTEGER_VARIANTS]
        found += [replace(candidate, options=options) for candidate in low for options in candidate.info.also_in_int8]
    found = [candidate for candidate in found if candidate.keeps_float32 or not keep_float]
    if asked and not found and not any(candidate.precision in asked for candidate in racing):
        able = sorted(name for name in BACKENDS if any(_takes(name, item, keep_float) for item in asked))
        beside = " with some layers in float32" if keep_float else ""
        raise UsageError(
            f"no selected backend supports {'a lower precision' if precision == AUTO else precision}{beside}",
            fix=f"add one of: {', '.join(able)}" if able else "leave out keep_float",
        )
    return tuple(found)


def _takes(name: str, precision: str, keep_float: bool) -> bool:
    made = Candidate(name).in_precision(precision)
    return made is not None and (made.keeps_float32 or not keep_float)


def precision_in(key: str) -> str:
    """The precision that a key names, even if its backend is not installed; `fp32` if it names none."""
    options = dict(part.split("=", 1) for part in key.partition("?")[2].split("&") if "=" in part)
    return options.get("precision", FP32)
