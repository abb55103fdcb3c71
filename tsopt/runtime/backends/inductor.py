"""Program -> machine code, compiled ahead of time by AOTInductor. Needs a C++ compiler."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tsopt.compiler.graph.edit import without_idle_draws
from tsopt.compiler.quiet import quiet
from tsopt.errors import BackendError, BundleError
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.backends.cudagraph import missing_gpu, unrecordable
from tsopt.runtime.backends.eager import torch_runner
from tsopt.runtime.backends.recorded import Recorded
from tsopt.runtime.calling.executable import Executable, Runner
from tsopt.runtime.checking.inputs import blank, exported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tsopt.compiler.calls.signature import Signature
    from tsopt.compiler.graph.program import Program

FILE = "model.pt2"


@dataclass(frozen=True, slots=True)
class InductorBackend:
    """torch.export -> AOTInductor, weights as constants.

    threads: intra-op threads, which are compiled in; None takes torch's number at compile time.
    max_autotune: let the compiler time several kernels for each product; takes minutes.
    cuda_graph: on a GPU, record the kernels as one CUDA graph, as torch.compile does under `reduce-overhead`.
    """

    threads: int | None = None
    max_autotune: bool = False
    cuda_graph: bool = False
    name: str = "inductor"

    def missing(self) -> str | None:
        compiler = os.environ.get("CXX") or "g++"
        if shutil.which(compiler) is None and shutil.which("clang++") is None:
            return f"install a C++ compiler ({compiler} was not found), or set CXX"
        return missing_gpu() if self.cuda_graph else None

    def unsupported(self, program: Program) -> list[Unsupported]:
        return unrecordable(program) if self.cuda_graph else []

    def compile(self, program: Program) -> Executable:
        options = {"freezing": True, "fallback_random": True, "max_autotune": self.max_autotune}
        program = without_idle_draws(program) if self.cuda_graph else program
        try:
            with _directory() as place, quiet(stdout=True), torch.no_grad(), _one_process():
                torch.set_num_threads(self.threads or torch.get_num_threads())  # protected() puts it back
                package = torch._inductor.aoti_compile_and_package(
                    exported(program), package_path=str(place / FILE), inductor_configs=options
                )
                return _executable(Path(package), program, self._kept)
        except Exception as error:  # whatever the compiler, or the C++ compiler under it, says
            raise BackendError(
                "Inductor failed to compile this model", why=f"{type(error).__name__}: {_said(error)}"
            ) from error

    @property
    def _kept(self) -> dict[str, Any]:
        """The options that a package is run with."""
        return {"threads": self.threads} | ({"cuda_graph": True} if self.cuda_graph else {})

    def reopen(self, program: Program, directory: Path) -> Executable:
        with _directory() as place:  # another one: the given one may be in memory
            shutil.move(directory / FILE, place)
            return _executable(place / FILE, program, self._kept)

    @staticmethod
    def load_runner(directory: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
        return load_runner(directory, signature, options)


def _executable(package: Path, program: Program, options: Mapping[str, Any]) -> Executable:
    """The compiled package. Its file may go: it stays open, so that nothing is left however the process ends."""
    kept = package.open("rb")

    def save(place: Path) -> None:
        kept.seek(0)
        with (place / FILE if place.is_dir() else place).open("wb") as out:
            shutil.copyfileobj(kept, out)

    return Executable(
        "inductor",
        program.signature,
        _runner(package, program.signature, options),
        state=[program.state[item.name] for item in program.signature.state_inputs],
        save=save,
        options=options,
        code=True,
    )


def _runner(package: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
    recorded = bool(options.get("cuda_graph"))
    # NOTE: one caller at a time is what a graph is for; the package's own bookkeeping for several asks the GPU
    # whether earlier calls have come to an end, which no recording may do.
    compiled = torch._inductor.aoti_load_package(str(package), run_single_threaded=recorded)

    def forward(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        found = compiled(*values)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    return torch_runner(Recorded(forward, blank(signature)) if recorded else forward, signature, options.get("threads"))


def load_runner(directory: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
    """Loads a saved package. Runs machine code from the file: the caller asked for trust."""
    try:
        return _runner(directory / FILE, signature, options)
    except Exception as error:  # the package decides what goes wrong
        raise BundleError("the compiled package cannot be loaded", why=_said(error)) from error


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tsopt-", ignore_cleanup_errors=True) as place:
        yield Path(place)


@contextmanager
def _one_process() -> Iterator[None]:
    """Compiles in this process: Inductor's pool of workers would outlive a candidate that is killed."""
    from torch._inductor import config

    with config.patch(compile_threads=1, worker_start_method="fork"):
        yield


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "")[:300]
