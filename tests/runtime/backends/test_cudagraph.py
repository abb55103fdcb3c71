"""CUDA graphs: buffers that stay, callers in turn, state, refusals.

An imitation takes the place of the GPU; test_cudagraph_on_gpu.py needs a real one.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.backends.gpu_imitation import Stream, recorded
from tests.runtime.helpers import Counter
from tsopt.compiler.graph.program import Program
from tsopt.passes.lower_precision import in_precision
from tsopt.runtime.backends import cudagraph, inductor
from tsopt.runtime.backends import recorded as recorded_functions
from tsopt.runtime.backends.cudagraph import CudaGraphBackend
from tsopt.runtime.backends.inductor import InductorBackend
from tsopt.runtime.backends.recorded import Recorded


def on_gpu(program: Program, *on_cpu: str) -> Program:
    """The program with types as they would be on a GPU, but for calls of these ops."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not any(op in str(node.target) for op in on_cpu):
            with program.fake_mode:
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return program


@pytest.mark.usefixtures("imitation")
def test_each_call_computes_what_the_model_computes_and_keeps_earlier_answers():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    found = recorded(model, torch.randn(2, 3))
    inputs = [torch.randn(2, 3) for _ in range(4)]
    answers = [found(x) for x in inputs]
    for x, answer in zip(inputs, answers, strict=True):
        torch.testing.assert_close(answer, model(x).detach())


@pytest.mark.usefixtures("imitation")
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_tensor_float_is_on_while_it_records_and_only_then(monkeypatch, precision):
    seen = []
    real = cudagraph.Recorded

    def look(*args):
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return real(*args)

    monkeypatch.setattr(cudagraph, "Recorded", look)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    made = CudaGraphBackend(precision=precision).compile(tsopt.capture(nn.Linear(2, 2).eval(), torch.ones(1, 2)))
    assert set(seen) == {(True, True) if precision == "tf32" else before}
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
    assert made.precision == precision


@pytest.mark.usefixtures("imitation")
def test_half_precision_is_recorded():
    model = nn.Linear(3, 2).eval()
    x = torch.randn(2, 3)
    made = CudaGraphBackend().compile(in_precision(tsopt.capture(model, x), "bf16"))
    assert tsopt.verify(model, made, x, precision="bf16").test == "limit"


@pytest.mark.usefixtures("imitation")
def test_what_the_caller_does_with_its_tensors_is_no_matter():
    found = recorded(lambda x: (x * 2, x + 1), torch.ones(3))
    x = torch.ones(3)
    first, _ = found(x)
    first.zero_()
    x.fill_(5)
    assert found(torch.ones(3))[0].tolist() == [2, 2, 2]
    assert found(x)[1].tolist() == [6, 6, 6]
    assert x.tolist() == [5, 5, 5]


@pytest.mark.usefixtures("imitation")
def test_state_counts_on():
    model = Counter()
    found = recorded(model, torch.zeros(2))
    assert [found(torch.zeros(2)).tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.usefixtures("imitation")
def test_callers_take_turns():
    model = nn.Linear(8, 8).eval()
    found = recorded(model, torch.randn(4, 8))
    inputs = [torch.randn(4, 8) for _ in range(8)]
    barrier = threading.Barrier(8)

    def call(x):
        barrier.wait()
        return [found(x) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(call, inputs))
    for x, mine in zip(inputs, answers, strict=True):
        for answer in mine:
            torch.testing.assert_close(answer, model(x).detach())


def test_a_stream_waits_for_the_call_before_where_that_was_on_another(imitation):
    found = recorded(lambda x: x + 1, torch.ones(3))
    first, second = imitation.caller, Stream()
    first.waited.clear()
    found(torch.ones(3))
    (end,) = first.waited
    assert end.stream is first
    found(torch.ones(3))
    assert first.waited == [end], "calls on one stream follow each other by themselves"
    imitation.caller = second
    found(torch.ones(3))
    assert second.waited == [end]
    assert end.stream is second


def test_what_cannot_be_recorded_is_an_error_of_the_backend(imitation):
    @contextlib.contextmanager
    def refuse(graph, stream, capture_error_mode):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    imitation.graph = refuse
    with pytest.raises(tsopt.BackendError, match="cannot be captured as a CUDA graph") as caught:
        recorded(lambda x: x + 1, torch.ones(3))
    assert "not permitted" in caught.value.why


def test_a_model_on_the_cpu_is_refused():
    (first, *_) = CudaGraphBackend().unsupported(tsopt.capture(lambda x: x + 1, torch.ones(3)))
    assert first.why == "the model is on cpu; a CUDA graph needs it on a GPU"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (torch.rand_like, "rand_like would not draw the same random numbers as eager"),
        (lambda x: x + torch.ones(3), "ones runs on the CPU"),
    ],
    ids=["random", "on the CPU"],
)
def test_what_a_graph_would_change_is_refused(model, why):
    found = CudaGraphBackend().unsupported(on_gpu(tsopt.capture(model, torch.ones(3)), "aten.ones."))
    assert any(item.why.endswith(why) for item in found)


def test_without_a_gpu_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CudaGraphBackend().missing() == "needs a GPU and a torch build with CUDA"
    with pytest.raises(tsopt.BackendError, match="is not available"):
        tsopt.compile(tsopt.capture(lambda x: x + 1, torch.ones(3)), "cudagraph")


@pytest.mark.usefixtures("imitation")
def test_machine_code_is_recorded_too(monkeypatch, tmp_path):
    model = nn.Linear(3, 2).eval()
    program = tsopt.capture(model, torch.ones(4, 3))
    opened = []

    def package(path, run_single_threaded):
        opened.append(run_single_threaded)
        return program.module().forward

    monkeypatch.setattr(torch._inductor, "aoti_load_package", package)
    run = inductor.load_runner(tmp_path, program.signature, {"cuda_graph": True})
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    (answer,), (other,) = run([first]), run([second])
    torch.testing.assert_close(answer, model(first).detach())
    torch.testing.assert_close(other, model(second).detach())
    inductor.load_runner(tmp_path, program.signature, {})
    assert opened == [True, False]


def draws_and_adds(x):
    torch.rand(3).lt(0.5)
    return x + 1


def test_machine_code_is_recorded_where_there_is_a_gpu_and_nothing_that_no_graph_holds(monkeypatch):
    monkeypatch.setattr(inductor.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program = tsopt.capture(torch.rand_like, torch.ones(3))
    made = InductorBackend(cuda_graph=True)
    assert made.missing() == "needs a GPU and a torch build with CUDA"
    assert made.unsupported(program)[-1].why == "aten.rand_like would not draw the same random numbers as eager"
    assert not any("draw" in item.why for item in made.unsupported(tsopt.capture(draws_and_adds, torch.ones(3))))
    assert InductorBackend().missing() is None
    assert InductorBackend().unsupported(program) == []


# ---- memory --------------------------------------------------------------------------------------------------------


def test_a_graph_shares_no_workspace_with_other_calls(imitation, monkeypatch):
    """Neither with its own warm-up, nor with what is called on its stream later."""
    events = []
    monkeypatch.setattr(recorded_functions, "_clear_workspaces", lambda: events.append("clear"))

    @contextlib.contextmanager
    def graph(graph, stream, capture_error_mode):
        events.append("begin")
        with graph:
            yield
        events.append("end")

    imitation.graph = graph
    recorded(lambda x: x + 1, torch.ones(3))
    assert events == ["clear", "begin", "end", "clear"]


def test_what_fails_leaves_no_tensors_behind(imitation):
    """A recording that has run out of memory must not keep what it has."""
    kept = []

    @contextlib.contextmanager
    def refuse(graph, stream, capture_error_mode):
        held = torch.ones(3)
        kept.append(weakref.ref(held))
        raise RuntimeError("out of memory")
        yield

    imitation.graph = refuse
    gc.disable()
    try:
        with pytest.raises(tsopt.BackendError) as caught:
            recorded(lambda x: x + 1, torch.ones(3))
        assert caught.value.__cause__ is None
        assert [reference() for reference in kept] == [None]
    finally:
        gc.enable()


def test_a_call_that_fails_leaves_the_graph_for_the_next_one(imitation, monkeypatch):
    made = Recorded(lambda x: [x + 1], [torch.ones(3)])
    before, second = imitation.caller, Stream()
    made(torch.ones(3))
    imitation.caller = second
    with monkeypatch.context() as patch:
        patch.setattr(made.graph, "replay", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            made(torch.ones(3))
    assert made.end_of_last.stream is second, "what comes next has to wait for whatever was begun"
    imitation.caller = before
    assert made(torch.full((3,), 2.0))[0].tolist() == [3, 3, 3]
    assert before.waited[-1] is made.end_of_last


def fails():
    raise RuntimeError("no memory")


@pytest.mark.usefixtures("imitation")
def test_what_is_compiled_in_inference_mode_runs_outside_of_it():
    model = nn.Linear(3, 2).eval()
    with torch.inference_mode():
        found = recorded(model, torch.ones(1, 3))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(found(torch.ones(1, 3)), model(torch.ones(1, 3)).detach())


def test_a_program_on_two_gpus_is_refused():
    program = tsopt.capture(lambda a, b: (a + 1, b + 1), (torch.ones(2), torch.ones(2)))
    inputs = [
        replace(item, type=replace(item.type, device=f"cuda:{place}"))
        for place, item in enumerate(program.signature.inputs)
    ]
    outputs = [replace(item, type=replace(item.type, device="cuda:0")) for item in program.signature.outputs]
    signature = replace(program.signature, inputs=tuple(inputs), outputs=tuple(outputs))
    found = CudaGraphBackend().unsupported(on_gpu(replace(program, signature=signature)))
    assert "the model is on several devices: cuda:0 and cuda:1" in [item.why for item in found]


def test_what_a_graph_reads_lives_as_long_as_it(imitation):
    class Package:
        """As a compiled package, it owns its weights."""

        def __call__(self, x):
            return [x + 1]

    package = Package()
    alive = weakref.ref(package)
    made = Recorded(package, [torch.ones(3)])
    del package
    gc.collect()
    assert alive() is not None
    del made
    gc.collect()
    assert alive() is None
