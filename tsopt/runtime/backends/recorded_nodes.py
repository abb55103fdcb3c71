"""Whether a recorded CUDA graph uses memory or functions of the CPU, which may be gone when it is replayed."""

from __future__ import annotations

from typing import Any

from tsopt.errors import BackendError


def use_of_cpu(graph: Any) -> str:
    """How a graph uses the memory of the CPU, in words; empty if it does not.

    A library that copies from the CPU while it is recorded has the address recorded, not the values. It gives that
    memory back when the call has ended, and each replay reads what is there by then. ONNX Runtime does so for Concat,
    Split, ScatterND, batched products and recurrent layers (github.com/microsoft/onnxruntime/pull/32121).

    Args:
        graph: a `torch.cuda.CUDAGraph` that was recorded with `keep_graph=True`.

    Raises:
        BackendError: the package cuda-bindings is missing, or CUDA does not answer.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise BackendError(
            "a recorded CUDA graph cannot be examined", why=str(error), fix="pip install cuda-bindings"
        ) from error

    def ask(answer: tuple[Any, ...]) -> Any:
        status, *found = answer
        if status != runtime.cudaError_t.cudaSuccess:
            raise BackendError("a recorded CUDA graph cannot be examined", why=status.name)
        return found[0] if len(found) == 1 else found

    on_cpu = (runtime.cudaMemoryType.cudaMemoryTypeHost, runtime.cudaMemoryType.cudaMemoryTypeUnregistered)
    handle = runtime.cudaGraph_t(graph.raw_cuda_graph())
    _, count = ask(runtime.cudaGraphGetNodes(handle))
    nodes, _ = ask(runtime.cudaGraphGetNodes(handle, count))
    for node in nodes:
        kind = ask(runtime.cudaGraphNodeGetType(node))
        if kind == runtime.cudaGraphNodeType.cudaGraphNodeTypeHost:
            return "it calls a function on the CPU in each replay"
        if kind == runtime.cudaGraphNodeType.cudaGraphNodeTypeMemcpy:
            copied = ask(runtime.cudaGraphMemcpyNodeGetParams(node))
            for place in filter(None, (int(copied.srcPtr.ptr), int(copied.dstPtr.ptr))):
                if ask(runtime.cudaPointerGetAttributes(place)).type in on_cpu:
                    return "it copies from or to memory of the CPU in each replay"
    return ""
