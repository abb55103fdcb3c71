"""ONNX Runtime on a GPU: which builds support it, and calls whose tensors stay in GPU memory.

Its kernels are recorded as a CUDA graph where that is possible: one at a time, they take as long as the CPU needs to
launch them, which is most of a call at small batch sizes. ONNX Runtime can record graphs by itself, but while it does,
other threads of the process cannot allocate GPU memory, and later calls wait for the GPU.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.graph.program import Program
from tsopt.errors import BackendError, BundleError
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.backends.eager import torch_runner
from tsopt.runtime.backends.recorded import Recorded
from tsopt.runtime.calling.executable import Runner
from tsopt.runtime.checking.inputs import blank
from tsopt.runtime.telemetry import without_telemetry

log = logging.getLogger("tsopt")
PROVIDER = "CUDAExecutionProvider"
# Operators whose kernels copy from memory of the CPU in each call, which no graph can hold: see recorded_nodes.py. For
# Concat and Split: with more tensors than this, because their addresses do not fit into the arguments of a kernel.
STAGED = {"ScatterND": 0, "NonMaxSuppression": 0, "LSTM": 0, "GRU": 0, "RNN": 0, "Concat": 32, "Split": 32}
TO_INSTALL = "this ONNX Runtime is a CPU build: pip uninstall onnxruntime, then pip install onnxruntime-gpu"


def available_providers() -> Sequence[str]:
    """The execution providers of the build that is installed."""
    with without_telemetry():
        import onnxruntime as ort

    providers: Sequence[str] = ort.get_available_providers()
    return providers


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


def runner_on_gpu(
    open_session: Callable[[Sequence[Any], Mapping[str, str]], Any],
    signature: Signature,
    cuda_graph: bool | None,
    op_types: Mapping[str, int] | None = None,
) -> tuple[Runner, bool]:
    """Flat tensors in and out of a session on the GPU of a signature, and whether it is recorded as a CUDA graph.

    Args:
        open_session: opens it for execution providers, with these further entries in its configuration.
        cuda_graph: whether to record it; None: if that is possible.
        op_types: the kinds of operators of the model, each with the most tensors that one takes or returns.

    Raises:
        BackendError: the runtime rejects the model, or it cannot be recorded although it has to be.
    """
    staged = sorted(kind for kind, size in (op_types or {}).items() if size > STAGED.get(kind, size))
    if staged and cuda_graph:
        raise BackendError(
            "ONNX Runtime cannot be captured as a CUDA graph",
            why=f"its kernels for {', '.join(staged)} use memory of the CPU in each call",
        )
    if cuda_graph is not False and not staged:
        try:
            return _recorded(open_session, signature), True
        except BundleError:
            raise
        except Exception as error:  # onnxruntime raises a class for each status code, all of them its own
            if cuda_graph:
                why = (error.why or error.what) if isinstance(error, BackendError) else str(error)[:300]
                raise BackendError("ONNX Runtime cannot be captured as a CUDA graph", why=why) from error
            log.info("ONNX Runtime is not recorded as a CUDA graph: %s", error)
    return bound_runner(open_session(providers_for(signature), {}), signature), False


def _recorded(open_session: Callable[[Sequence[Any], Mapping[str, str]], Any], signature: Signature) -> Runner:
    """A session whose kernels are replayed. It never runs again: the graph works in memory that it would use."""
    with without_telemetry():
        import onnxruntime as ort

    stream: Any = torch.cuda.Stream(device_of(signature))
    held = open_session(providers_for(signature, stream.cuda_stream), {"session.disable_cpu_ep_fallback": "1"})
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")  # no graph can hold a wait

    was_captured = False

    def forward(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        nonlocal was_captured
        was_captured |= torch.cuda.is_current_stream_capturing()
        binding, found, given = _bound(held.session, signature, values)
        held.session.run_with_iobinding(binding, options)
        del given
        return found

    try:
        recorded = Recorded(forward, blank(signature), stream, is_foreign=True)
    except BaseException:
        if was_captured:
            # Version 1.31 aborts the process, or waits forever, when a session is closed that has copied from the CPU
            # while it was recorded.
            log.warning("ONNX Runtime was not recorded as a CUDA graph; its session, with its weights, stays open")
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        raise
    return torch_runner(recorded, signature, None)


def device_of(signature: Signature) -> torch.device:
    """The GPU of a signature."""
    return next(torch.device(device) for _, device in signature.devices if device.startswith("cuda"))


def providers_for(signature: Signature, stream: int | None = None) -> list[Any]:
    """The providers of a session for tensors on a GPU, in the order of who is asked first.

    TensorFloat-32, which the provider takes by itself, is off: PyTorch multiplies matrices in full unless told.

    Args:
        stream: the CUDA stream to run on, by its address; None: one of the session's own.
    """
    place = device_of(signature)
    options: dict[str, Any] = {"use_tf32": 0}
    if place.index:  # NOTE: where it is told that this is 0, version 1.31 logs a warning, whatever the session's level
        options["device_id"] = place.index
    if stream is not None:
        # A graph has no operators on the CPU: the session must not be opened with any.
        return [(PROVIDER, options | {"user_compute_stream": str(stream)})]
    return [(PROVIDER, options), "CPUExecutionProvider"]


def bound_runner(held: Any, signature: Signature) -> Runner:
    """Flat tensors in and out of a session by their addresses, on whatever device they are.

    Args:
        held: what keeps the session and its weights.
    """

    def run(values: Sequence[torch.Tensor], held: Any = held) -> Sequence[torch.Tensor]:
        binding, found, given = _bound(held.session, signature, values)
        for device in {value.device for value in (*given, *found) if value.is_cuda}:
            # The session has a stream of its own: what fills the inputs, or still reads this memory, must be done.
            torch.cuda.current_stream(device).synchronize()
        held.session.run_with_iobinding(binding)  # returns when the outputs are there
        return found

    return run


def _bound(
    session: Any, signature: Signature, values: Sequence[torch.Tensor]
) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """A binding of tensors to the inputs and outputs of a session; the outputs, and what it reads, which must last."""
    kinds = [item.type for item in signature.outputs]
    given = [value.detach().contiguous() for value in values]
    found = [torch.empty(k.shape, dtype=getattr(torch, k.dtype), device=k.device) for k in kinds]
    binding = session.io_binding()
    for item, value in zip(session.get_inputs(), given, strict=True):
        binding.bind_input(item.name, *_place_of(value))
    for item, value in zip(session.get_outputs(), found, strict=True):
        binding.bind_output(item.name, *_place_of(value))
    return binding, found, given


def _place_of(value: torch.Tensor) -> tuple[str, int, Any, list[int], int]:
    """Device, its number, dtype, shape and address, as a binding wants to know them."""
    dtype = torch.empty(0, dtype=value.dtype, device="cpu").numpy().dtype.type
    return value.device.type, value.device.index or 0, dtype, list(value.shape), value.data_ptr()
