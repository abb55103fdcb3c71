"""CUDA graphs: buffers that stay, callers in turn, state, refusals.

On a machine without a GPU an imitation records the calls of ops and makes them again in the same memory, which is what
a graph does; the last tests need a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tsopt
from tests.runtime.helpers import Counter
from tsopt.compiler.graph.program import Program
from tsopt.passes.lower_precision import in_precision
from tsopt.runtime.backends import cudagraph, inductor
from tsopt.runtime.backends.cudagraph import CudaGraphBackend
from tsopt.runtime.backends.inductor import InductorBackend
from tsopt.runtime.bundles.opening import open_bundle

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Stream:
    """Keeps what it waits for."""

    def __init__(self, *_) -> None:
        self.waited = []

    def wait_stream(self, other) -> None:
        self.waited.append(other)

    wait_event = wait_stream


class Event:
    """Keeps where it was recorded last."""

    def record(self, stream) -> None:
        self.stream = stream


class Graph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        self.calls.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        for func, args, kwargs, found in self.calls:
            for mine, value in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                if mine.data_ptr() != value.data_ptr():
                    mine.copy_(value)


@pytest.fixture
def imitation(monkeypatch):
    made = SimpleNamespace(
        Stream=Stream,
        Event=Event,
        CUDAGraph=Graph,
        caller=Stream(),
        current_stream=lambda device=None: made.caller,
        device=lambda device: contextlib.nullcontext(),
        stream=lambda stream: contextlib.nullcontext(),
        graph=lambda graph, stream, capture_error_mode: graph,
        is_available=lambda: True,
    )
    monkeypatch.setattr(cudagraph, "cuda", made)
    monkeypatch.setattr(cudagraph, "_clear_workspaces", lambda: None)
    return made


def recorded(model, *args):
    return CudaGraphBackend().compile(tsopt.capture(model, args))


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
    assert seen == [(True, True) if precision == "tf32" else before]
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


def test_machine_code_is_recorded_where_there_is_a_gpu_and_nothing_that_no_graph_holds(monkeypatch):
    monkeypatch.setattr(inductor.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program = tsopt.capture(torch.rand_like, torch.ones(3))
    made = InductorBackend(cuda_graph=True)
    assert made.missing() == "needs a GPU and a torch build with CUDA"
    assert made.unsupported(program)[-1].why == "aten.rand_like would not draw the same random numbers as eager"
    assert InductorBackend().missing() is None
    assert InductorBackend().unsupported(program) == []


# ---- layouts -------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Ends in an image, which the caller sees."""

    def __init__(self, end=lambda y: y) -> None:
        super().__init__()
        self.first, self.second, self.end = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), end
        self.eval()

    def forward(self, x):
        return self.end(self.second(self.first(x).relu()))


IMAGE = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def faster(imitation, monkeypatch):
    """Sets the seconds that the two memory formats take. Counts what is recorded."""
    layouts = []
    real = cudagraph.Recorded

    def record(forward, inputs):
        layouts.append(len(layouts))
        return real(forward, inputs)

    monkeypatch.setattr(cudagraph, "Recorded", record)
    times = iter([1.0, 1.0])

    def said(*seconds):
        nonlocal times
        times = iter(seconds)

    monkeypatch.setattr(cudagraph, "_seconds", lambda recorded: next(times))
    said.recorded = layouts
    return said


@pytest.mark.parametrize(("seconds", "last"), [((1.0, 0.9), True), ((1.0, 0.99), False), ((1.0, 1.1), False)])
def test_the_faster_layout_is_taken_and_stored(faster, seconds, last):
    faster(*seconds)
    model = Convolutions()
    made = recorded(model, IMAGE)
    assert made.options == {"precision": "fp32", "channels_last": last}
    assert ("convolutions in channels_last" in made.notes) is last
    found = made(IMAGE)
    torch.testing.assert_close(found, model(IMAGE).detach())
    assert found.is_contiguous(), "as the caller is used to"


@pytest.mark.parametrize("last", [True, False])
def test_a_layout_that_is_asked_for_is_the_only_one(faster, last):
    made = CudaGraphBackend(channels_last=last).compile(tsopt.capture(Convolutions(), (IMAGE,)))
    assert (len(faster.recorded), made.options["channels_last"]) == (1, last)


@pytest.mark.parametrize("end", [lambda y: y.view(2, -1), lambda y: torch.as_strided(y, (2, 2), (1, 1))])
def test_where_views_need_the_layout_it_stays(faster, end):
    faster(1.0, 0.1)
    model = Convolutions(end)
    made = recorded(model, IMAGE)
    assert made.options["channels_last"] is False
    torch.testing.assert_close(made(IMAGE), model(IMAGE).detach())


def test_without_convolutions_there_is_one_layout(faster):
    recorded(nn.Linear(3, 2).eval(), torch.ones(1, 3))
    assert len(faster.recorded) == 1


def test_a_bundle_is_recorded_again_in_its_layout_and_precision(faster, monkeypatch, tmp_path):
    faster(1.0, 0.5)
    made = CudaGraphBackend(precision="tf32").compile(tsopt.capture(Convolutions(), (IMAGE,)))
    made.save(tmp_path)
    opened = []
    monkeypatch.setattr(CudaGraphBackend, "unsupported", lambda self, program: [])  # on the CPU
    monkeypatch.setattr(CudaGraphBackend, "compile", lambda self, program: opened.append(self) or made)
    open_bundle(tmp_path, "cudagraph", made.options, made.signature, trust=False)
    assert opened == [CudaGraphBackend(precision="tf32", channels_last=True)]


# ---- memory --------------------------------------------------------------------------------------------------------


def test_a_graph_shares_no_workspace_with_other_calls(imitation, monkeypatch):
    """Neither with its own warm-up, nor with what is called on its stream later."""
    events = []
    monkeypatch.setattr(cudagraph, "_clear_workspaces", lambda: events.append("clear"))

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
    made = cudagraph.Recorded(lambda x: [x + 1], [torch.ones(3)])
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
    made = cudagraph.Recorded(package, [torch.ones(3)])
    del package
    gc.collect()
    assert alive() is not None
    del made
    gc.collect()
    assert alive() is None


@needs_gpu
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


@needs_gpu
def test_on_a_gpu_it_computes_what_the_model_computes(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval().cuda()
    x = torch.randn(8, 16, device="cuda")
    fast = tsopt.optimize(model, x, backends=("eager", "cudagraph"), seconds=1.0)
    assert fast.report.row("CUDA graph").status == "ok"
    torch.testing.assert_close(fast(x * 2), model(x * 2).detach())
    executable = fast.verified("cudagraph")
    torch.testing.assert_close(executable(x), model(x).detach())


@needs_gpu
def test_on_a_gpu_a_bundle_is_recorded_again(tmp_path):
    model = nn.Linear(16, 4).eval().cuda()
    x = torch.randn(8, 16, device="cuda")
    fast = tsopt.optimize(model, x, backends=("cudagraph",), seconds=1.0)
    loaded = tsopt.load(fast.save(tmp_path / "m.tsopt"))
    torch.testing.assert_close(loaded(x), model(x).detach())


@needs_gpu
def test_on_a_gpu_machine_code_is_recorded():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval().cuda()
    x = torch.randn(8, 16, device="cuda")
    made = tsopt.compile(tsopt.capture(model, x), "inductor?cuda_graph=true")
    for scale in (1, 2):
        torch.testing.assert_close(made(x * scale), model(x * scale).detach())


@needs_gpu
def test_on_a_gpu_a_recording_that_fails_changes_nothing():
    program = tsopt.capture(lambda x: x.sum(), torch.ones(3, device="cuda"))
    before = torch.cuda.current_stream()

    def waits(x):
        return [x + float(x.sum())]  # no graph can hold that the CPU waits

    with pytest.raises(RuntimeError):
        cudagraph.Recorded(waits, [torch.ones(3, device="cuda")])
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.randn(3, device="cuda").isfinite().all()
    assert tsopt.compile(program, "cudagraph")(torch.ones(3, device="cuda")) == 3


@needs_gpu
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


@needs_gpu
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


@needs_gpu
@pytest.mark.parametrize("last", [True, False])
def test_on_a_gpu_both_layouts_of_convolutions_are_right(last):
    model, x = Convolutions().cuda(), IMAGE.cuda()
    made = CudaGraphBackend(channels_last=last).compile(tsopt.capture(model, x))
    for scale in (1, 2):
        found = made(x * scale)
        torch.testing.assert_close(found, model(x * scale).detach(), rtol=1e-2, atol=1e-2)  # TensorFloat-32, by default
        assert found.is_contiguous()
    assert isinstance(CudaGraphBackend().compile(tsopt.capture(model, x)).options["channels_last"], bool)
