"""The machine and the package versions of a measurement. Imports torch only if it is installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "asimddp", "sve")
IN_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # the last is ARM's
# What is imported, and the distributions that it may come from.
PACKAGES = {
    **{name: (name,) for name in ("torch", "numpy", "onnx", "onnxscript")},
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    **{name: (name,) for name in ("openvino", "safetensors")},
}


@dataclass(frozen=True, slots=True)
class Environment:
    """The hardware and the versions that determine speed."""

    cpu: str
    flags: tuple[str, ...]
    cores: int
    threads: int
    platform: str
    python: str
    versions: dict[str, str]
    gpu: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self._said(f"{self.threads} {'thread' if self.threads == 1 else 'threads'}")

    @property
    def machine(self) -> str:
        """The same without the number of threads, for what was measured with several numbers."""
        return self._said("")

    def _said(self, threads: str) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        gpu = f"{self.gpu}; " if self.gpu else ""
        cores = f"{self.cores} {'core' if self.cores == 1 else 'cores'}"
        return f"{gpu}{', '.join(filter(None, (self.cpu, cores, threads, ' '.join(self.flags))))}; {versions}"


def environment() -> Environment:
    """Reads the machine. Without torch, `threads` are the cores and there is no GPU."""
    cpu, flags = _cpu()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, gpu = _of_torch() if is_installed("torch") else (cores, "")
    return Environment(
        cpu,
        tuple(flag for flag in FLAGS if flag in flags),
        cores,
        threads,
        platform.platform(terse=True),
        platform.python_version(),
        versions(),
        gpu,
    )


def computes_in_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16 values."""
    return not _cpu()[1].isdisjoint(IN_BFLOAT16)


def _of_torch() -> tuple[int, str]:
    import torch

    from tsopt.runtime import tensor_float

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if gpu and torch.version.cuda:
        gpu += f", CUDA {torch.version.cuda}"
    if gpu and tensor_float.is_on():
        gpu += " (TF32 on)"  # eager itself rounds the factors of products then
    return torch.get_num_threads(), gpu


def is_installed(name: str) -> bool:
    """Whether a package can be found. One whose import is blocked, by a finder or in `sys.modules`, cannot."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def versions() -> dict[str, str]:
    """Versions of the packages that are installed."""
    found: dict[str, str] = {}
    for name, distributions in PACKAGES.items():
        if is_installed(name):
            known: dict[str, str] = {}
            for distribution in distributions:
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    known[distribution] = importlib.metadata.version(distribution)
            found |= known or {name: "installed"}  # from a build of the user's own
    return found


def _cpu() -> tuple[str, set[str]]:
    info = Path("/proc/cpuinfo")
    name, flags = platform.processor() or platform.machine(), set[str]()
    if not info.exists():
        return name, flags
    for line in info.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() in ("flags", "Features"):
            return name, set(value.split())
    return name, flags
