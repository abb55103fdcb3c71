"""What a backend is, what it makes, and the table of backends. Imports no backend and none of their libraries."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from tsopt.errors import BackendError, UsageError
from tsopt.runtime.environment import is_installed
from tsopt.runtime.executable import FULL, Executable

if TYPE_CHECKING:
    from tsopt.compiler.program import Program

# name -> where it lives. Literal, so that nothing registers itself and nothing is imported before it is used.
BACKENDS: dict[str, str] = {
    "eager": "tsopt.runtime.eager:EagerBackend",
    "torchscript": "tsopt.runtime.torchscript:TorchScriptBackend",
    "onednn": "tsopt.runtime.onednn:OneDnnBackend",
    "onnxruntime": "tsopt.runtime.ort:OnnxRuntimeBackend",
    "inductor": "tsopt.runtime.inductor:InductorBackend",
    "openvino": "tsopt.runtime.openvino:OpenVinoBackend",
    "cudagraph": "tsopt.runtime.cudagraph:CudaGraphBackend",
    "null": "tsopt.runtime.null:NullBackend",
}

# Backends whose files are code, and which kind: reading them asks for trust.
CODE = {"torchscript": "TorchScript", "inductor": "machine code"}

HALVES = ("bf16", "fp16")
PRECISIONS = (FULL, "tf32", *HALVES)  # what products of float32 matrices may be computed in


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A value of the program that a backend cannot take: where it comes from, and why."""

    where: str
    why: str


class Backend(Protocol):
    """A frozen dataclass of its own options."""

    @property
    def name(self) -> str: ...

    def missing(self) -> str | None:
        """None when usable here, or what to install."""

    def unsupported(self, program: Program) -> list[Unsupported]: ...

    def compile(self, program: Program) -> Executable:
        """Compiles a program. Raises BackendError when it cannot."""


@runtime_checkable
class Reopens(Protocol):
    """A backend that takes long to compile, and can be given what was compiled in another process."""

    def reopen(self, program: Program, directory: Path) -> Executable:
        """The executable of the files that `save` has written; those files may go."""


def check_precision(backend: str, precision: str, known: Sequence[str] = (FULL, *HALVES)) -> None:
    """Raises UsageError for a precision that a backend does not have."""
    if precision not in known:
        raise UsageError(f"{backend} has no precision {precision!r}", fix=f"one of: {', '.join(known)}")


def precision_of(spec: str) -> str:
    """What a backend with its options computes products in."""
    return str(split_spec(spec)[1].get("precision", FULL))


def to_install(*packages: str) -> str | None:
    """What to type for the packages that are not there; None when all are."""
    wanted = [name for name in packages if not is_installed(name)]
    return f"pip install {' '.join(wanted)}" if wanted else None


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of `onnxruntime?threads=1&opset=21`.

    Raises:
        UsageError: an option without a value.
    """
    name, _, rest = spec.partition("?")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise UsageError(f"{spec!r}: the option {key!r} has no value", fix=f"{name}?{key}=VALUE")
        known = {"true": True, "false": False, "none": None}
        options[key] = int(value) if value.lstrip("-").isdigit() else known.get(value.lower(), value)
    return name, options


def get_backend(name: str, **options: Any) -> Backend:
    """A backend by name, with its options.

    Args:
        name: one of BACKENDS, or `package.module:Class` for one of your own; options may be part of it:
            `onnxruntime?threads=1`. Those given beside it count less.

    Raises:
        UsageError: no backend or no option of that name.
        BackendError: its library is missing.
    """
    name, own = split_spec(name)
    options |= own
    cls = _class_of(name, _place_of(name))
    known = _options_of(cls)
    for option in options:
        if option not in known:
            raise UsageError(
                f"the backend {name} has no option {option!r}", fix=f"its options: {', '.join(known) or 'none'}"
            )
    backend = cast(Backend, cls(**options))
    hint = backend.missing()
    if hint:
        raise BackendError(f"the backend {name} cannot be used here", why=hint, fix="tsopt doctor shows what is usable")
    return backend


def _place_of(name: str) -> str:
    place = name if ":" in name else BACKENDS.get(name)
    if place is None:
        raise UsageError(
            f"no backend is called {name!r}", fix=f"one of: {', '.join(BACKENDS)}, or package.module:Class"
        )
    return place


def _class_of(name: str, place: str) -> Any:
    module, _, cls_name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), cls_name)
    except (ImportError, AttributeError) as error:
        raise BackendError(f"the backend {name} cannot be imported", why=str(error)) from error


def _options_of(cls: Any) -> list[str]:
    return [item.name for item in fields(cls) if item.init and item.name != "name"]


def can_compute_in(name: str, precision: str) -> bool:
    """Whether a backend, which need not be installed, has a precision. Raises UsageError for no backend's name."""
    cls = _class_of(name, _place_of(name))
    if "precision" not in _options_of(cls):
        return False
    try:
        return cls(precision=precision) is not None
    except UsageError:
        return False


def race_options(name: str, threads: int | None, check_indices: bool = False) -> dict[str, Any]:
    """The options that a backend races with: the number of threads and the checks, if it has a say in that."""
    known = _options_of(type(get_backend(name)))
    checks = {"check_indices": True} if check_indices and "check_indices" in known else {}
    return ({"threads": threads} if "threads" in known else {}) | checks


def compile(
    program: Program, backend: str | Backend = "onnxruntime", *, share_weights: bool = False, **options: Any
) -> Executable:
    """Compiles a program with one backend.

    Args:
        backend: a name (`eager`, `torchscript`, `onnxruntime?threads=1`, ...; see `get_backend`) or a Backend.
        share_weights: let the engine read the program's weights where they are, which saves a copy. What writes to
            them later, such as training the model that they belong to, then changes some of what it computes.
        options: the backend's own, such as `threads=2`.

    Raises:
        BackendError: the backend cannot take the program; the message names the op and its place.
    """
    from tsopt.compiler.apart import apart
    from tsopt.compiler.lasting import with_lasting
    from tsopt.compiler.owned import owned
    from tsopt.compiler.protect import protected

    made = get_backend(backend, **options) if isinstance(backend, str) else backend
    refused = made.unsupported(program)
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise BackendError(
            f"{made.name} cannot take this model: {refused[0].why}{more}",
            where=refused[0].where or None,
            fix="use another backend, or let optimize() choose",
        )
    # Tracing a random model draws numbers, and backends have been seen to set default dtypes.
    with apart(), protected(None):
        return made.compile(with_lasting(program.copy() if share_weights else owned(program.copy())))
