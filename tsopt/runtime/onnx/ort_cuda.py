"""ONNX Runtime on a GPU: which builds support it, and calls whose tensors stay in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.calling.executable import Runner

PROVIDER = "CUDAExecutionProvider"
TO_INSTALL = "this ONNX Runtime is a CPU build: pip uninstall onnxruntime, then pip install onnxruntime-gpu"


def refusals_on_gpu(program: Program, available: Sequence[str]) -> list[Unsupported]:
    """Why a program whose tensors are on a GPU cannot be run there, by a runtime that is built with these providers."""
    on_gpu = [(name, device) for name, device in program.signature.devices if device.startswith("cuda")]
    if PROVIDER not in available:
        return [Unsupported(name, f"the model is on {device}; {TO_INSTALL}") for name, device in on_gpu]
    places = sorted({device for _, device in on_gpu})
    if len(places) > 1:
        return [Unsupported("", f"the model is on several devices: {' and '.join(places)}")]
    signature = program.signature
    empty = [item.name for item in signature.inputs if not item.type.numel]
    empty += [item.name for item in signature.outputs if not item.type.numel]
    if empty:
        return [Unsupported(empty[0], "the tensor is empty and has no address")]
    if program.signature.dims:
        return [Unsupported("", "dynamic sizes are not supported, because outputs are allocated before the call")]
    return []


def providers_for(signature: Signature) -> list[Any]:
    """The providers of a session for tensors on a GPU, in the order of who is asked first.

    TensorFloat-32, which the provider takes by itself, is off: PyTorch multiplies matrices in full unless told.
    """
    place = next(torch.device(device) for _, device in signature.devices if device.startswith("cuda"))
    options = {"use_tf32": 0}
    if place.index:  # NOTE: where it is told that this is 0, version 1.31 logs a warning, whatever the session's level
        options["device_id"] = place.index
    return [(PROVIDER, options), "CPUExecutionProvider"]


def bound_runner(held: Any, signature: Signature) -> Runner:
    """Flat tensors in and out of a session by their addresses, on whatever device they are.

    Args:
        held: what keeps the session and its weights.
    """
    session = held.session
    inputs = [item.name for item in session.get_inputs()]
    outputs = [item.name for item in session.get_outputs()]
    kinds = [item.type for item in signature.outputs]

    def run(values: Sequence[torch.Tensor], held: Any = held) -> Sequence[torch.Tensor]:
        given = [value.detach().contiguous() for value in values]
        found = [torch.empty(k.shape, dtype=getattr(torch, k.dtype), device=k.device) for k in kinds]
        binding = session.io_binding()
        for name, value in zip(inputs, given, strict=True):
            binding.bind_input(name, *_place_of(value))
        for name, value in zip(outputs, found, strict=True):
            binding.bind_output(name, *_place_of(value))
        for device in {value.device for value in (*given, *found) if value.is_cuda}:
            # The session has a stream of its own: what fills the inputs, or still reads this memory, must be done.
            torch.cuda.current_stream(device).synchronize()
        session.run_with_iobinding(binding)  # returns when the outputs are there
        return found

    return run


def _place_of(value: torch.Tensor) -> tuple[str, int, Any, list[int], int]:
    """Device, its number, dtype, shape and address, as a binding wants to know them."""
    dtype = torch.empty(0, dtype=value.dtype, device="cpu").numpy().dtype.type
    return value.device.type, value.device.index or 0, dtype, list(value.shape), value.data_ptr()
