"""ONNX Runtime on a GPU, as far as a machine without one can tell: bindings work on any device, decisions need none."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import onnxruntime as ort
import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.onnx import ort_cuda
from tsopt.runtime.onnx.export import to_onnx
from tsopt.runtime.onnx.ort import ON_CPU, OnnxRuntimeBackend, open_session
from tsopt.runtime.onnx.ort_cuda import PROVIDER, bound_runner, providers_for, refusals_on_gpu, runner_on_gpu

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or PROVIDER not in ort.get_available_providers(), reason="no GPU"
)


def on(program, *devices):
    """The program with inputs and outputs as they would be on these devices, in turn."""
    signature = program.signature
    inputs = [
        replace(item, type=replace(item.type, device=devices[i % len(devices)]))
        for i, item in enumerate(signature.inputs)
    ]
    outputs = [replace(item, type=replace(item.type, device=devices[0])) for item in signature.outputs]
    return replace(program, signature=replace(signature, inputs=tuple(inputs), outputs=tuple(outputs)))


@pytest.fixture
def built_for_gpu(monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: [PROVIDER, "CPUExecutionProvider"])


@pytest.fixture
def built_for_cpu(monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])


class Several(nn.Module):
    """Inputs of several dtypes, one of them laid out otherwise; outputs of several dtypes and of no axes."""

    def forward(self, x, index, flag):
        return x.t() * 2, index + 1, x.sum(), flag.logical_not()


def session_of(program):
    proto, weights = to_onnx(program).detached()
    return open_session(proto, {"threads": 1}, weights)


def several():
    return torch.randn(3, 4).t(), torch.arange(5), torch.tensor([True, False])


def test_bound_tensors_are_read_and_written_where_they_are():
    program = tsopt.capture(Several(), several())
    run = bound_runner(session_of(program), program.signature)
    for _ in range(3):
        given = several()
        found = run(given)
        for mine, theirs in zip(found, Several()(*given), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_answers_of_earlier_calls_stay():
    program = tsopt.capture(nn.Linear(3, 2).eval(), torch.ones(1, 3))
    run = bound_runner(session_of(program), program.signature)
    (first,) = run([torch.zeros(1, 3)])
    kept = first.clone()
    run([torch.ones(1, 3)])
    assert torch.equal(first, kept)


@pytest.mark.usefixtures("built_for_cpu")
def test_a_runtime_for_the_cpu_says_what_to_install():
    program = on(tsopt.capture(nn.ReLU(), torch.ones(2)), "cuda:0")
    assert [item.why for item in OnnxRuntimeBackend().unsupported(program)] == [
        "the model is on cuda:0; this ONNX Runtime is a CPU build: "
        "pip uninstall onnxruntime, then pip install onnxruntime-gpu"
    ] * 2


@pytest.mark.usefixtures("built_for_gpu")
def test_a_runtime_for_the_gpu_takes_a_model_on_one():
    program = tsopt.capture(nn.ReLU(), torch.ones(2))
    assert OnnxRuntimeBackend().unsupported(on(program, "cuda:0")) == []
    assert OnnxRuntimeBackend().unsupported(program) == []


def test_what_it_cannot_run_on_a_gpu_is_refused():
    two = tsopt.capture(lambda a, b: a + b, (torch.ones(2), torch.ones(2)))
    (found,) = refusals_on_gpu(on(two, "cuda:0", "cuda:1"), [PROVIDER])
    assert found.why == "the model is on several devices: cuda:0 and cuda:1"
    sizes = tsopt.capture(nn.ReLU(), [torch.ones(2, 2), torch.ones(3, 2)])
    (found,) = refusals_on_gpu(on(sizes, "cuda:0"), [PROVIDER])
    assert found.why == "dynamic sizes are not supported, because outputs are allocated before the call"


def test_the_session_runs_on_the_gpu_of_the_model_in_full_precision():
    program = tsopt.capture(nn.ReLU(), torch.ones(2))
    for place, options in (("cuda:1", {"device_id": 1, "use_tf32": 0}), ("cuda:0", {"use_tf32": 0})):
        found = providers_for(on(program, place).signature)
        assert found == [(PROVIDER, options), "CPUExecutionProvider"]


@pytest.mark.usefixtures("built_for_cpu")
def test_a_runtime_that_goes_on_without_the_gpu_is_an_error(monkeypatch):
    opened = []

    def session(model, options, providers):
        opened.append(providers)
        return SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])

    with pytest.raises(tsopt.BackendError, match=f"has no {PROVIDER}") as caught:
        open_session(b"", {}, providers=[(PROVIDER, {"device_id": 0}), *ON_CPU])
    assert "onnxruntime-gpu" in caught.value.fix
    monkeypatch.setattr(ort, "get_available_providers", lambda: [PROVIDER, *ON_CPU])
    monkeypatch.setattr(ort, "InferenceSession", session)
    assert open_session(b"", {}).session is not None
    with pytest.raises(tsopt.BackendError, match=f"failed to start {PROVIDER}") as caught:
        open_session(b"", {}, providers=[(PROVIDER, {"device_id": 0}), *ON_CPU])
    assert "onnxruntime-gpu requires" in caught.value.fix
    assert opened[1][0] == (PROVIDER, {"device_id": 0})


def test_a_tensor_that_holds_nothing_is_refused():
    program = tsopt.capture(nn.ReLU(), torch.ones(0, 2))
    (found, *_) = refusals_on_gpu(on(program, "cuda:0"), [PROVIDER])
    assert found.why == "the tensor is empty and has no address"


def opened(monkeypatch, failure=None):
    """Sessions without a GPU, with which providers they were opened; recording one fails if it is told to."""
    asked = []
    program = tsopt.capture(nn.Linear(3, 2).eval(), torch.ones(1, 3))

    def open_it(providers, entries):
        asked.append((providers, dict(entries)))
        return session_of(program)

    def record(open_session, signature):
        if failure is not None:
            raise failure
        return "recorded"

    monkeypatch.setattr(ort_cuda, "_recorded", record)
    return open_it, on(program, "cuda:0").signature, asked


@pytest.mark.parametrize("asked", [None, True])
def test_a_session_is_recorded_where_that_is_possible(monkeypatch, asked):
    open_it, signature, _ = opened(monkeypatch)
    assert runner_on_gpu(open_it, signature, asked) == ("recorded", True)


def test_a_session_that_cannot_be_recorded_launches_its_kernels_one_by_one(monkeypatch):
    open_it, signature, asked = opened(monkeypatch, RuntimeError("an operator on the CPU"))
    run, recorded = runner_on_gpu(open_it, signature, None)
    assert (callable(run), recorded, asked) == (True, False, [(providers_for(signature), {})])
    with pytest.raises(tsopt.BackendError, match="cannot be captured as a CUDA graph") as caught:
        runner_on_gpu(open_it, signature, True)
    assert caught.value.why == "an operator on the CPU"


def test_a_session_with_kernels_that_use_memory_of_the_cpu_is_not_recorded(monkeypatch):
    open_it, signature, _ = opened(monkeypatch)
    assert runner_on_gpu(open_it, signature, None, {"MatMul": 2, "ScatterND": 3})[1] is False
    assert runner_on_gpu(open_it, signature, None, {"Concat": 33})[1] is False
    assert runner_on_gpu(open_it, signature, None, {"MatMul": 2, "Concat": 32}) == ("recorded", True)
    with pytest.raises(tsopt.BackendError, match="cannot be captured as a CUDA graph") as caught:
        runner_on_gpu(open_it, signature, True, {"MatMul": 2, "ScatterND": 3, "LSTM": 4})
    assert caught.value.why == "its kernels for LSTM, ScatterND use memory of the CPU in each call"


@pytest.mark.parametrize("is_capturing", [True, False])
def test_a_session_that_ran_in_a_recording_which_failed_is_never_closed(monkeypatch, caplog, is_capturing):
    program = tsopt.capture(nn.Linear(3, 2).eval(), torch.ones(1, 3))
    kept = []

    def open_it(providers, entries):
        session = session_of(program)
        kept.append(weakref.ref(session.session))
        return session

    def record(forward, inputs, stream, *, is_foreign):
        forward(torch.ones(1, 3))
        raise tsopt.BackendError("a function cannot be recorded as a CUDA graph")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=4711))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(ort_cuda, "Recorded", record)
    monkeypatch.setattr(ort_cuda, "blank", lambda signature: [])
    monkeypatch.setattr(ort_cuda, "_bound", lambda session, *_: (session.io_binding(), [], []))
    monkeypatch.setattr(ort.InferenceSession, "run_with_iobinding", lambda *_: None)
    assert runner_on_gpu(open_it, on(program, "cuda:0").signature, None)[1] is False
    gc.collect()
    assert (kept[0]() is not None) is is_capturing
    assert ("stays open" in caplog.text) is is_capturing


def test_the_operators_of_a_model_are_known():
    class Written(nn.Module):
        def forward(self, x, index):
            written = torch.zeros_like(x).index_put((index,), torch.relu(x[: index.shape[0]]))
            return torch.cat([x, x, torch.cat([x, written, x, x])])

    found = to_onnx(tsopt.capture(Written(), (torch.randn(4, 2), torch.tensor([0, 2])))).op_types
    assert {kind: found[kind] for kind in ("ScatterND", "Relu", "Concat")} == {"ScatterND": 3, "Relu": 1, "Concat": 4}


def test_without_a_graph_nothing_is_recorded(monkeypatch):
    open_it, signature, _ = opened(monkeypatch)
    assert runner_on_gpu(open_it, signature, False)[1] is False


def test_a_session_that_is_recorded_has_no_operator_on_the_cpu():
    signature = on(tsopt.capture(nn.ReLU(), torch.ones(2)), "cuda:0").signature
    assert providers_for(signature, 4711) == [(PROVIDER, {"use_tf32": 0, "user_compute_stream": "4711"})]


def test_a_model_on_the_cpu_is_not_recorded():
    program = tsopt.capture(nn.ReLU(), torch.ones(2))
    (found,) = OnnxRuntimeBackend(cuda_graph=True).unsupported(program)
    assert found.why == "the model is on the CPU; a CUDA graph needs it on a GPU"


@needs_gpu
@pytest.mark.parametrize("graph", [True, False])
def test_on_a_gpu_it_computes_what_the_model_computes(graph, tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval().cuda()
    x = torch.randn(8, 16, device="cuda")
    made = tsopt.compile(tsopt.capture(model, x), f"onnxruntime?cuda_graph={str(graph).lower()}")
    assert made.options["cuda_graph"] is graph
    assert ("recorded as a CUDA graph" in made.notes) is graph
    answers = [made(x * scale) for scale in range(5)]
    for scale, answer in enumerate(answers):
        torch.testing.assert_close(answer, model(x * scale).detach())


@needs_gpu
def test_on_a_gpu_it_is_recorded_again_from_its_bundle(always_faster, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 4)).eval().cuda()
    x = torch.randn(2, 3, 9, 9, device="cuda")
    fast = tsopt.optimize(model, x, backends=("onnxruntime",), seconds=0.5, cache=False)
    assert fast.report.row("ONNX Runtime").status == "ok"
    executable = fast.verified("onnxruntime")
    assert "recorded as a CUDA graph" in executable.notes
    torch.testing.assert_close(executable(x * 2), model(x * 2).detach(), rtol=1e-3, atol=1e-3)
    loaded = tsopt.load(fast.save(tmp_path / "m.tsopt"))
    torch.testing.assert_close(loaded(x), model(x).detach(), rtol=1e-3, atol=1e-3)


@needs_gpu
def test_on_a_gpu_calls_of_a_recorded_session_from_several_threads_are_right():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval().cuda()
    made = tsopt.compile(tsopt.capture(model, torch.randn(4, 64, device="cuda")), "onnxruntime?cuda_graph=true")

    def call(seed):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            inputs = [torch.randn(4, 64, device="cuda") * seed for _ in range(20)]
            answers = [(made(x), model(x)) for x in inputs]
            torch.cuda.current_stream().synchronize()
            return answers

    with ThreadPoolExecutor(4) as pool:
        for answers in pool.map(call, range(1, 5)):
            for mine, theirs in answers:
                torch.testing.assert_close(mine, theirs)
