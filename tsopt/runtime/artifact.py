"""The bundle `name.tsopt/`: written as a whole or not at all, read with every hash checked first.

No pickle. Files that are code (TorchScript) are read only with `trust=True`. Reading an ONNX bundle needs
neither torch nor onnx, only ONNX Runtime and numpy.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt._version import __version__
from tsopt.compiler.signature import Signature
from tsopt.errors import ArtifactError, BackendError, TsoptError
from tsopt.runtime.backend import CODE, FULL, Executable, compile, race_options
from tsopt.runtime.environment import is_installed

if TYPE_CHECKING:
    from tsopt.compiler.example import Example
    from tsopt.runtime.report import Report

log = logging.getLogger("tsopt")
FORMAT = 1
MANIFEST, CHECK, REPORT = "manifest.json", "check.safetensors", "report.json"
STATE = "state.safetensors"  # what the model writes in a call, as it was when the bundle was made
MAX_MANIFEST = 1 << 26
CHUNK = 1 << 20


def save(executable: Executable, path: str | Path, model: Callable[..., Any], example: Example, report: Report) -> Path:
    """Writes a bundle beside its place and moves it there.

    Raises:
        ArtifactError: the place cannot be written, or holds something that is no bundle.
    """
    target = Path(path)
    if executable.save is None:
        raise ArtifactError(f"what {executable.backend} made cannot be stored", fix="choose another backend")
    check_target(target)
    with staged(target) as staging:
        executable.save(staging)
        _write_state(staging / STATE, executable)
        _write_check(staging / CHECK, model, example, executable.state)
        (staging / REPORT).write_text(json.dumps(report.to_json()))
        _write_manifest(staging, executable, report)
    return target


class staged:
    """A temporary directory beside a target, moved into its place when the block ends well, removed otherwise.

    Args:
        unpack: move the files in it beside each other instead, the one called like the target last.
    """

    def __init__(self, target: Path, *, unpack: bool = False) -> None:
        self.target, self.unpack = target, unpack

    def __enter__(self) -> Path:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.staging = Path(tempfile.mkdtemp(prefix=f".{self.target.name}.", dir=self.target.parent))
        except OSError as error:
            raise self._unwritable(error) from error
        return self.staging

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        try:
            if error is None:
                self._move()
        except OSError as failed:
            raise self._unwritable(failed) from failed
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise self._unwritable(error) from error

    def _unwritable(self, error: BaseException | None) -> ArtifactError:
        return ArtifactError(
            "the output cannot be written",
            where=str(self.target),
            why=str(error),
            fix="choose a directory that you may write to and that has room (-o)",
        )

    def _move(self) -> None:
        mask = os.umask(0)
        os.umask(mask)
        for file in self.staging.iterdir():
            file.chmod(0o666 & ~mask)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        if self.unpack:
            for file in sorted(self.staging.iterdir(), key=lambda file: file.name == self.target.name):
                file.replace(self.target.parent / file.name)
            return
        self.staging.chmod(0o777 & ~mask)  # mkdtemp made it private, safetensors its files
        if not self.target.exists():
            self.staging.rename(self.target)
            return
        old = self.staging.with_name(self.staging.name + ".old")
        self.target.rename(old)
        try:
            self.staging.rename(self.target)
        except OSError:
            old.rename(self.target)  # the bundle that was there is better than none
            raise
        shutil.rmtree(old)


def check_target(target: Path) -> None:
    """Raises ArtifactError where a bundle would overwrite something that is none."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ArtifactError(
            "the output exists and is no bundle", where=str(target), fix="remove it or choose another name"
        )
    if target.is_dir() and any(target.iterdir()) and not _is_bundle(target):
        raise ArtifactError(
            "the output is a directory with other files", where=str(target), fix="remove it or choose another name"
        )


def _is_bundle(directory: Path) -> bool:
    """Whether a directory holds a manifest of ours and nothing that it does not name."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes()[:MAX_MANIFEST])
        names = {MANIFEST, *manifest["members"]}
        return {"format", "sha256"} <= set(manifest) and {file.name for file in directory.iterdir()} <= names
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _write_state(path: Path, executable: Executable) -> None:
    from safetensors.torch import save_file

    names = [item.name for item in executable.signature.state_inputs]
    if names:
        tensors = zip(names, executable.state, strict=True)
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}, path)


def _read_state(directory: Path, signature: Signature) -> list[Any]:
    """State in signature order: torch tensors, or numpy arrays where torch is not installed."""
    names = [item.name for item in signature.state_inputs]
    if not names:
        return []
    if not is_installed("torch"):
        from safetensors.numpy import load_file
    else:
        from safetensors.torch import load_file  # type: ignore[assignment]
    stored = load_file(directory / STATE)
    return [stored[name] for name in names]


def _write_check(path: Path, model: Callable[..., Any], example: Example, state: Sequence[Any]) -> None:
    """The example's inputs and eager's answers: what `tsopt verify` compares with."""
    import torch
    from safetensors.torch import save_file

    from tsopt.compiler.effects import outcome_of
    from tsopt.compiler.protect import protected
    from tsopt.compiler.structure import flatten, unflatten

    leaves, structure = flatten((example.args, example.kwargs))
    tensors = {f"input.{i}": leaf.detach().cpu().contiguous().clone() for i, leaf in enumerate(leaves)}
    args, kwargs = unflatten(structure, [leaf.detach().clone() for leaf in leaves])
    with protected(model, written=state):
        torch.manual_seed(0)
        outputs, *_ = outcome_of(model, args, kwargs)
    tensors |= {f"output.{i}": leaf.detach().cpu().contiguous().clone() for i, leaf in enumerate(outputs)}
    save_file(tensors, path)


def _write_manifest(staging: Path, executable: Executable, report: Report) -> None:
    members = {file.name: {"sha256": _sha256(file), "size": file.stat().st_size} for file in sorted(staging.iterdir())}
    winner = report.row(report.winner)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "tsopt": __version__,
        "model": report.model,
        "backend": executable.backend,
        "options": executable.options,
        "code": executable.code,
        "numerics": report.numerics,
        "precision": executable.precision,
        "environment": report.environment.to_json(),
        "signature": executable.signature.to_json(),
        "claims": {"winner": report.winner, "speedup": report.speedup, "verified": str(winner.accuracy or "")},
        "notes": list(executable.notes),
        "members": members,
    }
    manifest["sha256"] = _digest(manifest)
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def load(path: str | Path, *, trust: bool = False) -> Executable:
    """Reads a bundle; called as the model was.

    Args:
        trust: run code from the bundle, where it holds code (TorchScript).

    Raises:
        ArtifactError: missing, damaged, changed since it was written, from a newer version, or code without trust.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    try:
        signature = Signature.from_json(manifest["signature"])
        backend, options = str(manifest["backend"]), dict(manifest["options"])
        executable = _open(directory, backend, options, signature, trust)
        executable.precision = str(manifest.get("precision", FULL))
        return executable
    except TsoptError:
        raise
    except Exception as error:  # the files decide what goes wrong; all of it means the same
        raise _damaged(directory, f"{type(error).__name__}: {error}"[:300]) from error


def _open(directory: Path, backend: str, options: dict[str, Any], signature: Signature, trust: bool) -> Executable:
    threads = options.get("threads") if isinstance(options.get("threads"), int) else None
    if backend == "onnxruntime":
        return _open_onnx(directory, options, signature)
    if backend in ("eager", "onednn", "cudagraph"):
        return _open_program(directory, backend, threads, signature)
    if backend == "openvino":
        return _open_openvino(directory, options, signature)
    if backend in CODE:
        return _open_code(directory, backend, {**options, "threads": threads}, signature, trust)
    raise ArtifactError(
        f"the bundle needs the backend {backend[:40]!r}", where=str(directory), fix="load it with a version that has it"
    )


def _open_program(directory: Path, backend: str, threads: int | None, signature: Signature) -> Executable:
    from tsopt.compiler.serialize import read_program

    program = read_program(directory, _read_state(directory, signature))
    if backend != "eager":
        try:
            return compile(program, backend, **race_options(backend, threads))
        except BackendError as error:  # on this machine torch's own kernels may be the faster ones, or the only ones
            log.info("%s: %s", directory, error.what)
    return compile(program, "eager", threads=threads)


def _open_onnx(directory: Path, options: dict[str, Any], signature: Signature) -> Executable:
    try:
        from tsopt.runtime.ort import FILE, load_session
    except ImportError as error:
        raise BackendError("ONNX Runtime is not installed", why=str(error), fix="pip install onnxruntime") from error
    runner = load_session(directory / FILE, signature, options)
    state = _read_state(directory, signature)
    return Executable("onnxruntime", signature, runner, state=state, options=options)


def _open_openvino(directory: Path, options: dict[str, Any], signature: Signature) -> Executable:
    try:
        from tsopt.runtime.openvino import load_runner

        runner = load_runner(directory, signature, options)
    except ImportError as error:
        raise BackendError("OpenVINO is not installed", why=str(error), fix="pip install openvino") from error
    return Executable("openvino", signature, runner, state=_read_state(directory, signature), options=options)


def _open_code(directory: Path, backend: str, options: dict[str, Any], signature: Signature, trust: bool) -> Executable:
    if not trust:
        raise ArtifactError(
            f"the bundle holds {CODE[backend]}, which is code",
            where=str(directory),
            why="loading it runs what its author wrote",
            fix="if you know where it comes from: tsopt.load(path, trust=True)",
        )
    module = importlib.import_module(f"tsopt.runtime.{backend}")
    runner = module.load_runner(directory, signature, options)
    return Executable(backend, signature, runner, state=_read_state(directory, signature), code=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a bundle whose every file is what the manifest says. Raises ArtifactError."""
    place = directory / MANIFEST
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise ArtifactError(f"the bundle {what}", where=str(directory), fix="give the path of a .tsopt directory")
    if not place.is_file() or place.is_symlink():
        raise ArtifactError("the directory is no bundle", where=str(directory), why=f"it has no {MANIFEST}")
    if place.stat().st_size > MAX_MANIFEST:
        raise _damaged(directory, "the manifest is too large")
    try:
        manifest = json.loads(place.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(directory, f"the manifest is no JSON: {error}") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _damaged(directory, f"the format is {str(version)[:40]!r}")
    if version > FORMAT:
        raise ArtifactError(
            f"the bundle has format {version}, this tsopt reads up to {FORMAT}",
            where=str(directory),
            fix="pip install -U torch-tsopt",
        )
    if manifest.get("sha256") != _digest(manifest):
        raise _damaged(directory, "the manifest was changed after it was written")
    _check_members(directory, manifest.get("members"))
    return manifest


def _check_members(directory: Path, members: Any) -> None:
    if not isinstance(members, dict):
        raise _damaged(directory, "no list of members")
    extra = {file.name for file in directory.iterdir()} - set(members) - {MANIFEST}
    if extra:
        raise _damaged(directory, f"{sorted(extra)[0]!r} is not in the manifest")
    present = {file.name: file for file in directory.iterdir()}
    for name, fact in members.items():
        file = present.get(name)
        if file is None or file.is_symlink() or not file.is_file() or file.stat().st_nlink != 1:
            raise _damaged(directory, f"{name[:80]!r} is missing, a link, or outside")
        if not isinstance(fact, dict):
            raise _damaged(directory, f"nothing is said of {name!r}")
        if file.stat().st_size != fact.get("size"):
            raise _damaged(directory, f"{name!r} has {file.stat().st_size} bytes, the manifest says {fact.get('size')}")
        if _sha256(file) != fact.get("sha256"):
            raise _damaged(directory, f"{name!r} was changed after it was written")


def _damaged(directory: Path, why: str) -> ArtifactError:
    return ArtifactError("the bundle is damaged", where=str(directory), why=why, fix="export the model again")
