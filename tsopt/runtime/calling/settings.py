"""The process-wide settings that a hybrid was compiled under."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container

import torch

# Queries whose answer depends on how code is called, not on its arguments.
MODES = frozenset({"is_grad_enabled", "is_inference_mode_enabled", "is_inference", "inference_mode"})
PRECISIONS = (torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn)
# How to query settings of torch, by the name that shows that a model's code does so.
QUERIES: dict[str, Callable[[], object]] = {
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "is_deterministic_algorithms_warn_only_enabled": torch.is_deterministic_algorithms_warn_only_enabled,
    "get_deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "fill_uninitialized_memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "fp32_precision": lambda: [getattr(place, "fp32_precision", None) for place in PRECISIONS],
    "allow_tf32": lambda: (torch._C._get_cublas_allow_tf32(), torch._C._get_cudnn_allow_tf32()),
    "flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
    "cudnn_sdp_enabled": torch.backends.cuda.cudnn_sdp_enabled,
    "get_fastpath_enabled": torch.backends.mha.get_fastpath_enabled,
    "benchmark": torch._C._get_cudnn_benchmark,
    "deterministic": torch._C._get_cudnn_deterministic,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "is_anomaly_check_nan_enabled": torch.is_anomaly_check_nan_enabled,
    "is_warn_always_enabled": torch.is_warn_always_enabled,
    "initial_seed": torch.initial_seed,
}
# Called on every call: a global of this module is looked up faster than an attribute of torch.
_default_dtype, _number_of_threads = torch.get_default_dtype, torch.get_num_threads
_function_modes = torch._C._len_torch_function_stack


class Settings:
    """The process-wide settings that a model may query, as they are when it is compiled.

    Args:
        follows_threads: whether engines were compiled for torch's number of threads.
    """

    __slots__ = ("_answers", "_asked", "_device", "_dtype", "_inference", "_process", "_queries", "_thread", "_threads")

    def __init__(self, *, follows_threads: bool) -> None:
        self._dtype, self._inference = torch.get_default_dtype(), torch.is_inference_mode_enabled()
        self._device = _default_device()
        self._threads, self._thread = torch.get_num_threads() if follows_threads else None, threading.get_ident()
        self._process, self._asked = os.getpid(), False
        self._queries: list[Callable[[], object]] = []
        self._answers: list[object] = []

    def ask(self, names: Container[str]) -> None:
        """Takes the names that a model reads: most models query no modes and behave the same in each."""
        self._asked = any(name in names for name in MODES)
        self._queries = [query for name, query in QUERIES.items() if name in names]
        self._answers = [*map(_answer, self._queries)]

    def was_renumbered(self) -> bool:
        """Whether the thread that compiled it has changed torch's number of threads since; torch has one for each.

        No fork has: the workers of a DataLoader, with one thread each, live too short to compile it again.
        """
        here = threading.get_ident() == self._thread and os.getpid() == self._process
        return self._threads is not None and here and _number_of_threads() != self._threads

    def differs(self) -> str:
        """Why this call is served by eager, if a process-wide setting has changed."""
        if _default_dtype() is not self._dtype:
            return "the default dtype has changed since it was compiled"
        if self._threads is not None and _number_of_threads() != self._threads:
            return "torch's number of threads has changed since it was compiled"
        if (_function_modes() or self._device is not None) and _default_device() != self._device:
            return "the default device has changed since it was compiled"
        if self._asked and (torch.is_grad_enabled() or torch.is_inference_mode_enabled() is not self._inference):
            return "it queries the grad mode, which has changed since it was compiled"
        if self._queries and [*map(_answer, self._queries)] != self._answers:
            return "it queries a setting of torch, which has changed since it was compiled"
        return ""


def _answer(query: Callable[[], object]) -> object:
    """What it answers; of settings that exclude each other, torch answers one with an error."""
    try:
        return query()
    except RuntimeError as error:
        return str(error)


def _default_device() -> torch.device | None:
    """The device that torch makes tensors on; None if none was chosen."""
    return torch.get_default_device() if _function_modes() else None
