"""CUDA graphs on a real GPU."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.backends.gpu_imitation import IMAGE, Block, Convolutions, needs_gpu
from tsopt.runtime.backends.cudagraph import CudaGraphBackend
from tsopt.runtime.backends.recorded import Recorded

pytestmark = needs_gpu


def test_on_a_gpu_a_graph_outlives_what_others_clear():
    """torch.compile clears the workspaces of cuBLAS, and gives memory back, whenever it records a graph."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).eval().cuda()
    x = torch.randn(64, 512, device="cuda")
    made = tsopt.compile(tsopt.capture(model, x), "cudagraph")
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    for scale in (1, 2):
        torch.testing.assert_close(made(x * scale), model(x * scale).detach())
    assert all(bool(item.isnan().all()) for item in others)


def test_on_a_gpu_it_computes_what_the_model_computes(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval().cuda()
    x = torch.randn(8, 16, device="cuda")
    fast = tsopt.optimize(model, x, backends=("eager", "cudagraph"), seconds=1.0)
    assert fast.report.row("CUDA graph").status == "ok"
    torch.testing.assert_close(fast(x * 2), model(x * 2).detach())
    executable = fast.verified("cudagraph")
    torch.testing.assert_close(executable(x), model(x).detach())


def test_on_a_gpu_a_bundle_is_recorded_again(tmp_path):
    model = nn.Linear(16, 4).eval().cuda()
    x = torch.randn(8, 16, device="cuda")
    fast = tsopt.optimize(model, x, backends=("cudagraph",), seconds=1.0)
    loaded = tsopt.load(fast.save(tmp_path / "m.tsopt"))
    torch.testing.assert_close(loaded(x), model(x).detach())


def test_on_a_gpu_machine_code_is_recorded():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval().cuda()
    x = torch.randn(8, 16, device="cuda")
    made = tsopt.compile(tsopt.capture(model, x), "inductor?cuda_graph=true")
    for scale in (1, 2):
        torch.testing.assert_close(made(x * scale), model(x * scale).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_on_a_gpu_convolutions_apply_what_follows_them(monkeypatch, dtype, channels_last):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # two kernels may round to it differently
    torch.manual_seed(0)
    model, x = Block().cuda().to(dtype), IMAGE.cuda().to(dtype)
    program = tsopt.transform(tsopt.capture(model, x))
    made = CudaGraphBackend(channels_last=channels_last, fused=True).compile(program)
    assert made.options["fused"]
    for scale in (1, math.nan, math.inf, 2):  # what a call leaves in memory, the next one must not read
        if not math.isfinite(scale):
            made(x * scale)
            continue
        torch.testing.assert_close(made(x * scale), model(x * scale).detach())


def test_on_a_gpu_a_recording_that_fails_changes_nothing():
    program = tsopt.capture(lambda x: x.sum(), torch.ones(3, device="cuda"))
    before = torch.cuda.current_stream()

    def waits(x):
        return [x + float(x.sum())]  # no graph can hold that the CPU waits

    with pytest.raises(RuntimeError):
        Recorded(waits, [torch.ones(3, device="cuda")])
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.randn(3, device="cuda").isfinite().all()
    assert tsopt.compile(program, "cudagraph")(torch.ones(3, device="cuda")) == 3


def test_on_a_gpu_calls_on_several_streams_at_once_are_right():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).eval().cuda()
    made = tsopt.compile(tsopt.capture(model, torch.randn(32, 256, device="cuda")), "cudagraph")

    def call(seed):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            inputs = [torch.randn(32, 256, device="cuda") * seed for _ in range(20)]
            answers = [(made(x), model(x)) for x in inputs]
        stream.synchronize()
        return answers

    with ThreadPoolExecutor(4) as pool:
        for answers in pool.map(call, range(1, 5)):
            for mine, theirs in answers:
                torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("backend", ["cudagraph", "torchscript", "eager"])
def test_on_a_gpu_the_model_itself_is_recorded_by_a_graph_of_the_users_own(backend):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval().cuda()
    x = torch.randn(8, 16, device="cuda")
    fast = tsopt.optimize(model, x, backends=(backend,), seconds=0.2)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            model(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="a CUDA graph is recording the call"), torch.cuda.graph(graph):
        found = fast(x)
    x.copy_(torch.randn(8, 16, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, model(x))


@pytest.mark.parametrize("last", [True, False])
def test_on_a_gpu_both_layouts_of_convolutions_are_right(last):
    model, x = Convolutions().cuda(), IMAGE.cuda()
    made = CudaGraphBackend(channels_last=last).compile(tsopt.capture(model, x))
    for scale in (1, 2):
        found = made(x * scale)
        torch.testing.assert_close(found, model(x * scale).detach(), rtol=1e-2, atol=1e-2)  # TensorFloat-32, by default
        assert found.is_contiguous()
    assert isinstance(CudaGraphBackend().compile(tsopt.capture(model, x)).options["channels_last"], bool)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_on_a_gpu_all_variants_of_linear_layers_are_right(transposed, separate):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).eval().cuda()
    x = torch.randn(2, 8, 64, device="cuda")
    backend = CudaGraphBackend(transposed=transposed, separate_bias=separate)
    made = backend.compile(tsopt.capture(model, x))
    for scale in (1, 2):
        torch.testing.assert_close(made(x * scale), model(x * scale).detach())
