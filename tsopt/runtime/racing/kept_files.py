"""The files of a winner in one piece, for the cache: the next race of the program opens them, and compiles nothing.

The weights of the program are not among them, but their digest is: an engine may have put others, made from these, into
a file of its own.
"""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from pathlib import Path

from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.weights_file import write_weights
from tsopt.errors import BundleError
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.backends.onednn import MEASURED
from tsopt.runtime.bundles.onnx_file import check_onnx
from tsopt.runtime.onnx.onnx_model import DATA, FILE, LINK

log = logging.getLogger("tsopt")
LARGEST = 1 << 20  # bytes: with a larger one, an engine has copied weights
OWNER, DIGEST = "candidate", "weights.sha256"
# Data, not code: the model for ONNX Runtime or OpenVINO, constants beside it, and which kernels of oneDNN are faster.
NAMES = (FILE, DATA, MEASURED)


def packed(place: Path, candidate: Candidate, program: Program) -> bytes | None:
    """What a candidate has saved in a directory, as one file; None if it is not to be kept."""
    try:
        files = {path.name: path for path in place.iterdir() if path.name != LINK}
        if not set(files) <= set(NAMES) or sum(path.stat().st_size for path in files.values()) > LARGEST:
            return None
        contents = {OWNER: candidate.key.encode(), **{name: path.read_bytes() for name, path in files.items()}}
        if (place / LINK).exists():
            contents[DIGEST] = _digest(place / LINK)
        elif FILE in files and program.used_weights():  # the model contains its weights, and nothing records which
            return None
    except OSError as error:
        log.info("the files of %s are not kept: %s", candidate.title, error)
        return None
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(name), content)
    return made.getvalue()


def unpack(raw: bytes, candidate: Candidate, program: Program, place: Path) -> None:
    """Puts the files into an empty directory, with the weights of the program if they refer to these.

    Raises:
        BundleError: they are those of another candidate or of other weights, or are not what `packed` makes.
        Exception: the files are damaged, or the disk is full.
    """
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = archive.infolist()
        names = {item.filename for item in members}
        if len(names) != len(members) or not names <= {OWNER, DIGEST, *NAMES}:
            raise BundleError("unknown files")
        if any(item.compress_type != zipfile.ZIP_STORED for item in members):
            raise BundleError("compressed files")
        contents = {name: archive.read(name) for name in names}
    if contents.pop(OWNER, b"") != candidate.key.encode():
        raise BundleError("files of another candidate")
    digest, used = contents.pop(DIGEST, None), program.used_weights()
    if digest is not None:
        write_weights({name: program.weights[name] for name in used}, place / LINK)
        if _digest(place / LINK) != digest:
            raise BundleError("other weights")
    elif FILE in contents and used:
        raise BundleError("no digest of the weights")
    for name, content in contents.items():
        (place / name).write_bytes(content)
    if FILE in contents:
        check_onnx(place, {path.name: path.stat().st_size for path in place.iterdir()}, (DATA, LINK))


def _digest(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest().encode()
