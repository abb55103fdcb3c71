"""What a recorded CUDA graph does on the CPU: CUDA is played here, as far as it is asked."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.backends.gpu_imitation import imitate, needs_gpu
from tsopt.errors import BackendError
from tsopt.runtime.backends import recorded
from tsopt.runtime.backends.recorded import Recorded
from tsopt.runtime.backends.recorded_nodes import use_of_cpu

IN_CPU, IN_GPU, PAGEABLE = 1, 2, 0  # addresses, named by the memory that they are in
Status = IntEnum("Status", {"cudaSuccess": 0, "cudaErrorInvalidValue": 1})
Kind = IntEnum("Kind", {"Kernel": 0, "cudaGraphNodeTypeMemcpy": 1, "cudaGraphNodeTypeHost": 3})
Memory = IntEnum("Memory", {"cudaMemoryTypeUnregistered": 0, "cudaMemoryTypeHost": 1, "cudaMemoryTypeDevice": 2})
KERNEL, HOST = SimpleNamespace(kind=Kind.Kernel), SimpleNamespace(kind=Kind.cudaGraphNodeTypeHost)


def copy(source, target):
    return SimpleNamespace(kind=Kind.cudaGraphNodeTypeMemcpy, places=(source, target))


def cuda_of(*nodes, status=Status.cudaSuccess):
    """`cuda.bindings.runtime`, with a graph of these nodes. An address is 100 times its kind of memory, plus 1."""
    return SimpleNamespace(
        cudaError_t=Status,
        cudaMemoryType=Memory,
        cudaGraphNodeType=Kind,
        cudaGraph_t=lambda address: address,
        cudaGraphGetNodes=lambda graph, count=0: (status, list(nodes)[:count], len(nodes)),
        cudaGraphNodeGetType=lambda node: (status, node.kind),
        cudaGraphMemcpyNodeGetParams=lambda node: (
            status,
            SimpleNamespace(srcPtr=SimpleNamespace(ptr=node.places[0]), dstPtr=SimpleNamespace(ptr=node.places[1])),
        ),
        cudaPointerGetAttributes=lambda place: (status, SimpleNamespace(type=Memory(place // 100))),
    )


def at(memory):
    return 100 * memory + 1


@pytest.fixture
def played(monkeypatch):
    def play(*nodes, **options):
        bindings = ModuleType("cuda.bindings")
        bindings.runtime = cuda_of(*nodes, **options)
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        return SimpleNamespace(raw_cuda_graph=lambda: 4711)

    return play


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([], ""),
        ([KERNEL, copy(at(IN_GPU), at(IN_GPU)), copy(0, at(IN_GPU))], ""),
        ([KERNEL, HOST], "it calls a function on the CPU in each replay"),
        ([copy(at(IN_CPU), at(IN_GPU)), KERNEL], "it copies from or to memory of the CPU in each replay"),
        ([copy(at(PAGEABLE), at(IN_GPU))], "it copies from or to memory of the CPU in each replay"),
        ([copy(at(IN_GPU), at(IN_CPU))], "it copies from or to memory of the CPU in each replay"),
    ],
    ids=["empty", "on the GPU", "function", "pinned", "pageable", "back"],
)
def test_what_a_graph_needs_of_the_cpu_is_found(played, nodes, said):
    assert use_of_cpu(played(*nodes)) == said


def test_without_the_package_or_an_answer_nothing_is_recorded(played, monkeypatch):
    with pytest.raises(BackendError, match="cannot be examined") as caught:
        use_of_cpu(played(KERNEL, status=Status.cudaErrorInvalidValue))
    assert "cudaErrorInvalidValue" in caught.value.why
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendError, match="cannot be examined") as caught:
        use_of_cpu(SimpleNamespace(raw_cuda_graph=lambda: 4711))
    assert caught.value.fix == "pip install cuda-bindings"


def test_only_a_graph_of_a_library_is_examined(monkeypatch):
    imitate(monkeypatch)
    monkeypatch.setattr(recorded, "use_of_cpu", lambda graph: "it calls a function on the CPU in each replay")
    Recorded(lambda x: [x * 2], [torch.ones(2)])
    with pytest.raises(BackendError, match="cannot be recorded") as caught:
        Recorded(lambda x: [x * 2], [torch.ones(2)], is_foreign=True)
    assert caught.value.why == "it calls a function on the CPU in each replay"
    monkeypatch.setattr(recorded, "use_of_cpu", lambda graph: "")
    assert Recorded(lambda x: [x * 2], [torch.ones(2)], is_foreign=True)(torch.ones(2))[0].tolist() == [2, 2]


class Scattered(nn.Module):
    def forward(self, x, index):
        return torch.zeros_like(x).index_put((index,), x[: index.shape[0]])


class Joined(nn.Module):
    """So many tensors that their addresses do not fit into the arguments of a kernel."""

    def forward(self, x):
        return torch.cat([x[:, i : i + 1 + i % 3] * i for i in range(40)], dim=1)


@needs_gpu
@pytest.mark.parametrize(
    ("model", "call"),
    [(Scattered(), (torch.randn(9, 4), torch.tensor([3, 1, 7]))), (Joined(), (torch.randn(4, 64),))],
    ids=["ScatterND", "Concat"],
)
def test_on_a_gpu_replays_do_not_depend_on_what_other_sessions_do(model, call):
    call = tuple(value.cuda() for value in call)
    made = tsopt.compile(tsopt.capture(model, call), "onnxruntime")
    others = [tsopt.compile(tsopt.capture(Joined(), torch.randn(3, 64, device="cuda")), "onnxruntime")]
    for scale in range(1, 20):
        others[0](torch.randn(3, 64, device="cuda"))
        again = (call[0] * scale, *call[1:])
        torch.testing.assert_close(made(*again), model(*again))
