"""The table of backends: everything about them that is known without importing them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tsopt.compiler.precision_names import HALVES, INT4, INT8, INT8_STATIC, INT8_WEIGHTS
from tsopt.errors import BackendError, UsageError

Options = tuple[tuple[str, Any], ...]
TORCH = {"torch": "Tensor"}


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One backend.

    Attributes:
        name: in options and bundles; a backend of the user's own goes by its place.
        place: `package.module:Class`, imported when it is first used.
        title: its name in tables.
        races: without being asked for: `always`; where its library is `installed`; for models on a `gpu`. `all`: only
            with `backends="all"`; `never`: only by name.
        also: options with which it races a second time, wherever it races.
        also_on_gpu: the same for models on a GPU, with `backends="all"`.
        also_in_int8: options with which it races a second time in int8, on a CPU with instructions for bfloat16.
        same_kernels: it runs the kernels that eager runs, so that what exact passes leave has the same bits.
        lowered: the variants of a program that it runs beside that in `fp32`, made by a pass.
        int8_scores: it computes attention on integers where queries and keys are; others read them unrounded.
        precisions: that it computes in by itself, as its option `precision`.
        through_onnx: it takes the exported ONNX model; its files are one, and are read without torch. The export keeps
            one core busy for seconds, so two of them compile side by side.
        exports: the format of `tsopt export` that its file is.
        code: what its files hold, where reading them executes it; empty where they are data.
        needs: libraries that reading its files takes, each with a name that it has where it is whole; none where
            nothing of it is stored.
    """

    name: str
    place: str
    title: str
    races: Literal["always", "installed", "gpu", "all", "never"] = "never"
    also: tuple[Options, ...] = ()
    also_on_gpu: tuple[Options, ...] = ()
    also_in_int8: tuple[Options, ...] = ()
    same_kernels: bool = False
    lowered: tuple[str, ...] = ()
    int8_scores: bool = False
    precisions: tuple[str, ...] = ()
    through_onnx: bool = False
    exports: str = ""
    code: str = ""
    needs: Mapping[str, str] = field(default_factory=lambda: TORCH)

    @property
    def is_own(self) -> bool:
        """Whether it is one of the user's."""
        return self.name not in BACKENDS

    @property
    def is_installed(self) -> bool:
        return all(importlib.util.find_spec(library) is not None for library in self.needs)

    def load(self) -> Any:
        """Its class. Raises BackendError where that cannot be imported."""
        module, _, name = self.place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise BackendError(f"cannot import the backend {self.name}", why=str(error)) from error

    def options(self) -> list[str]:
        """The names of its options. Imports its file."""
        return [item.name for item in fields(self.load()) if item.init and item.name != "name"]


PLAIN = BackendInfo(
    "eager", "tsopt.runtime.backends.eager:EagerBackend", "eager + passes", "always", same_kernels=True, lowered=HALVES
)

# Literal, so that nothing registers itself and nothing is imported before it is used. They race in this order.
BACKENDS: dict[str, BackendInfo] = {
    info.name: info
    for info in (
        PLAIN,
        BackendInfo(
            "onednn",
            "tsopt.runtime.backends.onednn:OneDnnBackend",
            "torch + oneDNN",
            "always",
            lowered=(*HALVES, INT8),
        ),
        BackendInfo(
            "torchscript",
            "tsopt.runtime.backends.torchscript:TorchScriptBackend",
            "TorchScript",
            "always",
            exports="torchscript",
            code="TorchScript",
        ),
        BackendInfo(
            "onnxruntime",
            "tsopt.runtime.onnx.ort:OnnxRuntimeBackend",
            "ONNX Runtime",
            "always",
            also=((("threads", 1),),),
            lowered=(INT8_WEIGHTS, INT8_STATIC, INT4),
            through_onnx=True,
            exports="onnx",
            needs={"numpy": "ndarray", "onnxruntime": "InferenceSession"},
        ),
        BackendInfo(
            "openvino",
            "tsopt.runtime.onnx.openvino:OpenVinoBackend",
            "OpenVINO",
            "installed",
            also_in_int8=((("other_ops", "bf16"),),),
            lowered=(INT8_WEIGHTS, INT8_STATIC, INT4),
            int8_scores=True,
            precisions=HALVES,
            through_onnx=True,
            needs={"numpy": "ndarray", "openvino": "Core"},
        ),
        BackendInfo(
            "inductor",
            "tsopt.runtime.backends.inductor:InductorBackend",
            "Inductor",
            "all",
            also_on_gpu=((("cuda_graph", True),),),
            lowered=HALVES,
            code="machine code",
        ),
        BackendInfo(
            "cudagraph",
            "tsopt.runtime.backends.cudagraph:CudaGraphBackend",
            "CUDA graph",
            "gpu",
            lowered=HALVES,
            precisions=("tf32",),
        ),
        BackendInfo("null", "tsopt.runtime.backends.null:NullBackend", "null", needs={}),
    )
}


def info_of(name: str) -> BackendInfo:
    """The entry of a backend in the table, or of a custom backend `package.module:Class`.

    Raises:
        UsageError: no backend of that name.
    """
    if ":" in name:
        return BackendInfo(name, name, name, lowered=HALVES, code=f"the custom backend {name}")
    info = BACKENDS.get(name)
    if info is None:
        raise UsageError(f"unknown backend {name!r}", fix=f"use one of: {', '.join(BACKENDS)}, or package.module:Class")
    return info
