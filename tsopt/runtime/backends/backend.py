"""The backend interface, and compiling a program with one. Imports neither backends nor their libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from tsopt.compiler.precision_names import FP32
from tsopt.errors import BackendError, UsageError
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.backends.table import info_of
from tsopt.runtime.calling.executable import Executable, Runner
from tsopt.runtime.racing.environment import is_installed
from tsopt.runtime.thread_count import check_threads

if TYPE_CHECKING:
    from tsopt.compiler.calls.signature import Signature
    from tsopt.compiler.graph.program import Program
    from tsopt.runtime.profiling.kernels import Timed


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A value of the program that a backend does not support: its location, and the reason."""

    where: str
    why: str


class Backend(Protocol):
    """A frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str: ...

    def missing(self) -> str | None:
        """What to install; None if the backend is usable here."""

    def unsupported(self, program: Program) -> list[Unsupported]: ...

    def compile(self, program: Program) -> Executable:
        """Compiles a program. Raises BackendError when it cannot."""


@runtime_checkable
class Loads(Protocol):
    """A backend with its own file format; files of the others contain a Program, which is compiled again."""

    @staticmethod
    def load_runner(directory: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
        """The runner of the files that `save` has written.

        Raises:
            BundleError: they are not the files of this signature.
            BackendError: its library refuses them.
        """


@runtime_checkable
class Grows(Protocol):
    """A backend that accepts a program for the integers that occur at its sizes, because it computes in fewer bits."""

    def may_grow(self, program: Program, wider: Program) -> bool:
        """Whether what it was compiled to for one range of sizes is right for a wider one."""


@runtime_checkable
class Reopens(Protocol):
    """A backend that takes long to compile and can load what was compiled in another process."""

    def reopen(self, program: Program, directory: Path) -> Executable:
        """The executable of the files that `save` has written; those files may go."""


@runtime_checkable
class Profiles(Protocol):
    """A backend that can tell how long each of its kernels takes."""

    def profile(self, program: Program, inputs: Sequence[Any]) -> Timed:
        """Compiles a program with a profiler turned on, and calls it again and again.

        Args:
            inputs: flat, in the order of the signature, state included.
        """


def check_precision(backend: str, precision: str) -> None:
    """Raises UsageError for a precision that a backend does not have."""
    known = (FP32, *info_of(backend).precisions)
    if precision not in known:
        raise UsageError(f"{backend} does not support precision {precision!r}", fix=f"use one of: {', '.join(known)}")


def to_install(*packages: str) -> str | None:
    """The pip command for the packages that are missing; None if there are none."""
    wanted = [name for name in packages if not is_installed(name)]
    return f"pip install {' '.join(wanted)}" if wanted else None


def get_backend(backend: str | Candidate, **options: Any) -> Backend:
    """A backend with its options.

    Args:
        backend: a name in the table, or `package.module:Class` for a custom one. It may contain options, which
            override `options`: `onnxruntime?threads=1`.

    Raises:
        UsageError: no backend or no option of that name, or not a number of threads.
        BackendError: its library is missing.
    """
    candidate = Candidate.parse(backend) if isinstance(backend, str) else backend
    info, options = candidate.info, {**options, **dict(candidate.options)}
    known = info.options()
    for option in options:
        if option not in known:
            raise UsageError(
                f"unknown option {option!r} of the backend {info.name}",
                fix=f"use one of: {', '.join(known)}" if known else "pass no options",
            )
    check_threads(options.get("threads"))
    made = cast(Backend, info.load()(**options))
    hint = made.missing()
    if hint:
        raise BackendError(
            f"the backend {info.name} is not available",
            why=hint,
            fix="run `tsopt doctor` to see which backends are available",
        )
    return made


def race_options(backend: str | Candidate, threads: int | None, check_indices: bool = False) -> dict[str, Any]:
    """The options that a backend races with: the number of threads and the checks, if it has a say in that."""
    candidate = Candidate.parse(backend) if isinstance(backend, str) else backend
    known = candidate.info.options()
    checks = {"check_indices": True} if check_indices and "check_indices" in known else {}
    return ({"threads": threads} if "threads" in known else {}) | checks


def compile(
    program: Program, backend: str | Candidate | Backend, *, share_weights: bool = False, **options: Any
) -> Executable:
    """Compiles a program with one backend, in the precision that the program has.

    Args:
        share_weights: let the engine read the program's weights where they are.
        options: options of the backend, for example `threads=2`.

    Raises:
        BackendError: the backend does not support the program; the message names the op and its location.
        UsageError: the candidate is for another variant of the program.
    """
    from tsopt.compiler.graph.program import Numerics

    candidate = Candidate.parse(backend) if isinstance(backend, str) else backend
    if isinstance(candidate, Candidate) and candidate.variant != FP32 and program.numerics < Numerics.LOSSY:
        raise UsageError(
            f"the program has not been lowered to {candidate.variant}",
            fix="use tsopt.compile(program, ...), which lowers it",
        )
    made = get_backend(candidate, **options) if isinstance(candidate, Candidate) else candidate
    refused = made.unsupported(program)
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise BackendError(
            f"{made.name} does not support this model: {refused[0].why}{more}",
            where=refused[0].where or None,
            fix="use another backend, or let tsopt.optimize() choose one",
        )
    return _executable(program, made, candidate, made.compile, share_weights)


def reopen(
    program: Program, directory: Path, candidate: Candidate, *, share_weights: bool = False, **options: Any
) -> Executable:
    """`compile`, from the files that the same candidate has saved in another process; those files may go.

    Args:
        candidate: of a backend that `Reopens`.
    """
    made = get_backend(candidate, **options)
    assert isinstance(made, Reopens)
    return _executable(program, made, candidate, lambda mine: made.reopen(mine, directory), share_weights)


def _executable(
    program: Program,
    made: Backend,
    candidate: Candidate | Backend,
    how: Callable[[Program], Executable],
    share_weights: bool,
) -> Executable:
    """What a backend makes of a program, labeled with its name and precision."""
    from tsopt.compiler.calls.constant_results import with_lasting
    from tsopt.compiler.capture.thread_patches import apart
    from tsopt.compiler.graph.owned import owned
    from tsopt.compiler.protect import protected

    program = program if share_weights else owned(program)
    # Tracing a random model draws numbers, and backends have been seen to set default dtypes.
    with apart(), protected(None):
        found = how(with_lasting(program.copy()))
    found.model = program.name
    found.share(program.returned_weights)
    found.place = f"{type(made).__module__}:{type(made).__qualname__}"
    if isinstance(candidate, Candidate):
        found.precision = candidate.precision
    return found
