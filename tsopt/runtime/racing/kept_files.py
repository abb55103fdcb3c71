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
from tsopt.runtime.backends.onednn import MEASURED
from tsopt.runtime.bundles.onnx_file import DATA, check_onnx
from tsopt.runtime.onnx.onnx_model import FILE, LINK

log = logging.getLogger("tsopt")
LARGEST = 1 << 20  # bytes: with a larger one, an engine has copied weights
DIGEST = "weights.sha256"
# Data, not code: the model for ONNX Runtime or OpenVINO, constants beside it, and which kernels of oneDNN are faster.
NAMES = (FILE, DATA, MEASURED)


def packed(place: Path) -> bytes | None:
    """What a candidate has saved in a directory, as one file; None if it is not to be kept."""
    files = [path for path in place.iterdir() if path.name != LINK]
    if any(path.name not in NAMES for path in files) or sum(path.stat().st_size for path in files) > LARGEST:
        return None
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        if (place / LINK).exists():
            archive.writestr(DIGEST, _digest(place / LINK))
        for path in sorted(files):
            archive.write(path, path.name)
    return made.getvalue()


def unpack(raw: bytes, program: Program, place: Path) -> bool:
    """Puts the files into an empty directory, with the weights of the program if they refer to these.

    Returns:
        Whether they are files of this program: False if its weights are others, or if the files are damaged.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            known = {item.filename: item.file_size for item in archive.infolist()}
            if len(known) != len(archive.infolist()) or not set(known) <= {DIGEST, *NAMES}:
                raise BundleError("unknown files")
            if sum(known.values()) > len(raw):  # nothing is compressed
                raise BundleError("wrong sizes")
            if DIGEST in known:
                write_weights({name: program.weights[name] for name in program.used_weights()}, place / LINK)
                if _digest(place / LINK).encode() != archive.read(DIGEST):
                    return False
            for name in set(known) - {DIGEST}:
                (place / name).write_bytes(archive.read(name))
        if FILE in known:
            check_onnx(place, {path.name: path.stat().st_size for path in place.iterdir()}, (DATA, LINK))
    except (BundleError, zipfile.BadZipFile, OSError, RuntimeError, ValueError, NotImplementedError) as error:
        log.info("the files of a winner are not used: %s", " ".join(str(error).split()))
        return False
    return True


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
