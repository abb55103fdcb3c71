"""OpenVINO: the same numbers, in float32, from several threads; what it cannot take is refused by name."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.runtime.helpers import save
from tsopt.passes.lower_precision import in_precision
from tsopt.runtime.backends.backend import compile as compile_by
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.onnx import openvino

installed = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="not installed")
LOAD = """
import sys, torch, tsopt
found = tsopt.load(sys.argv[1])
print(found(torch.linspace(-1, 1, 128).reshape(2, 64)).flatten().tolist())
"""


def compiled(model, *args, **options):
    return tsopt.compile(tsopt.capture(model, args), "openvino", **options)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()


@installed
@pytest.mark.parametrize("hint", ["latency", "throughput"])
def test_it_computes_in_float32(hint):
    """Where the processor has bfloat16, OpenVINO takes it unless it is told not to: errors of 1e-2."""
    model, x = layers(), torch.linspace(-1, 1, 128).reshape(2, 64)
    torch.testing.assert_close(compiled(model, x, hint=hint, threads=1)(x), model(x).detach(), rtol=1e-5, atol=1e-6)


@installed
def test_several_inputs_and_outputs_of_several_types():
    def model(x, i, flag):
        return x[i] * 2, i + 1, x.sum(), torch.logical_not(flag), x.new_zeros(0, 3)

    args = (torch.randn(4, 3), torch.tensor([2, 0]), torch.tensor([True, False]))
    found = compiled(model, *args)(*args)
    for mine, theirs in zip(found, model(*args), strict=True):
        torch.testing.assert_close(mine, theirs)


@installed
def test_inputs_that_are_not_dense_and_single_numbers_are_right():
    def model(x, scale):
        return x * scale

    fast = compiled(model, torch.randn(3, 4), torch.tensor(2.0))
    x = torch.randn(8, 6).t()[::2, ::2]
    for value in (x, torch.randn(4, 3).t(), torch.zeros(1, 4).expand(3, 4)):
        torch.testing.assert_close(fast(value, torch.tensor(3.0)), value * 3)


@installed
def test_answers_are_not_overwritten_by_later_calls():
    model, x = layers(), torch.randn(2, 64)
    fast = compiled(model, x)
    first = fast(x)
    kept = first.clone()
    fast(x * 3)
    assert torch.equal(first, kept)


@installed
def test_threads_may_call_at_once():
    model, inputs = layers(), [torch.randn(2, 64) for _ in range(16)]
    fast = compiled(model, inputs[0])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fast, inputs))
    for mine, x in zip(found, inputs, strict=True):
        torch.testing.assert_close(mine, model(x).detach(), rtol=1e-5, atol=1e-6)


@installed
def test_a_bundle_loads_in_a_fresh_process(tmp_path):
    model, x = layers(), torch.linspace(-1, 1, 128).reshape(2, 64)
    place = save(compiled(model, x), tmp_path / "net.tsopt", model, x)
    done = subprocess.run([sys.executable, "-c", LOAD, str(place)], capture_output=True, text=True, check=True)
    torch.testing.assert_close(torch.tensor(eval(done.stdout)), model(x).detach().flatten(), rtol=1e-5, atol=1e-6)


@installed
def test_random_calls_are_refused_by_name():
    program = tsopt.capture(lambda x: x + torch.rand_like(x), torch.ones(3))
    with pytest.raises(tsopt.BackendError, match="different random number generator"):
        tsopt.compile(program, "openvino")


@installed
def test_what_it_refuses_is_a_message(monkeypatch):
    import openvino as package

    def compile_model(*args):
        raise RuntimeError("Exception from core\n\nno such op\n")

    monkeypatch.setattr(package.Core, "compile_model", compile_model)
    with pytest.raises(tsopt.BackendError, match="OpenVINO rejects") as caught:
        compiled(layers(), torch.ones(2, 64))
    assert caught.value.why == "no such op"


@installed
def test_a_call_that_fails_in_the_engine_is_told_in_our_words(monkeypatch):
    import openvino as package

    def infer(*args, **kwargs):
        raise RuntimeError("Exception from core\n\nno memory for it\n")

    made = compiled(layers(), torch.ones(2, 64))
    monkeypatch.setattr(package.InferRequest, "infer", infer)
    with pytest.raises(tsopt.BackendError, match="OpenVINO failed to run this call") as caught:
        made(torch.ones(2, 64))
    assert caught.value.why == "no memory for it"


SIGNAL = """
import gc, signal, torch, tsopt
program = tsopt.capture(torch.nn.Linear(4, 4).eval(), torch.ones(1, 4))
first, second = (tsopt.compile(program, "openvino") for _ in range(2))
del first
gc.collect()
del second
gc.collect()
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.slow
@installed
def test_a_signal_is_handled_after_executables_are_gone():
    """A Core that is destroyed leaves the process with a stack for signal handlers that is gone."""
    done = subprocess.run([sys.executable, "-c", SIGNAL], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "handled"), done.stderr


PLACES = """
import os, sys, torch, tsopt
from pathlib import Path
torch.set_num_threads(2)
layer = torch.nn.Linear(256, 256).eval()
run = tsopt.compile(tsopt.capture(layer, torch.ones(64, 256)), "openvino", threads=2, pinning=sys.argv[1] == "True")
run(torch.ones(64, 256))
lines = [line for path in Path("/proc/self/task").glob("*/status") for line in path.read_text().splitlines()]
print(len({line for line in lines if line.startswith("Cpus_allowed_list")}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="one core")
@pytest.mark.parametrize("pinning", [False, True])
@installed
def test_threads_are_bound_to_cores_only_if_asked_to(pinning):
    """By default, OpenVINO binds those of each process to the same cores."""
    done = subprocess.run([sys.executable, "-c", PLACES, str(pinning)], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 1) == pinning


@installed
def test_pinning_reaches_the_engine_and_the_one_that_is_loaded(monkeypatch, tmp_path):
    made, real = [], openvino.compiled_model
    monkeypatch.setattr(openvino, "compiled_model", lambda *given: made.append(real(*given)) or made[-1])
    model, x = layers(), torch.ones(2, 64)
    assert "pinning" not in compiled(model, x).options
    chosen = compiled(model, x, pinning=True)
    tsopt.load(save(chosen, tmp_path / "net.tsopt", model, x))
    assert [engine.get_property("ENABLE_CPU_PINNING") for engine in made] == [False, True, True]


@installed
def test_an_unknown_hint_is_refused():
    with pytest.raises(tsopt.UsageError, match="unknown hint 'speed'"):
        get_backend("openvino", hint="speed")


def test_where_it_is_not_installed_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install openvino" in openvino.OpenVinoBackend().missing()


@installed
def test_the_other_ops_of_an_int8_program_in_bfloat16(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).eval()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    made = in_precision(tsopt.transform(tsopt.capture(model, x)), "int8-weights")
    mixed = compile_by(made, "openvino", other_ops="bf16")
    assert mixed.options["other_ops"] == "bf16"
    with torch.no_grad():
        found, wanted = mixed(x), model(x)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.03
    mixed.save(tmp_path)
    backend = tsopt.runtime.backends.table.info_of("openvino").load()
    assert torch.equal(backend.load_runner(tmp_path, mixed.signature, mixed.options)([x])[0], found)


@installed
def test_other_ops_need_a_program_in_int8():
    program = tsopt.capture(nn.Linear(4, 4).eval(), torch.ones(1, 4))
    with pytest.raises(tsopt.UsageError, match="other_ops=bf16 needs a program in int8"):
        compile_by(program, "openvino", other_ops="bf16")
    with pytest.raises(tsopt.UsageError, match="openvino does not support other_ops 'fp16'"):
        compile_by(program, "openvino", other_ops="fp16")


@installed
def test_a_weight_that_lies_transposed_is_multiplied_in_int8_as_well(monkeypatch):
    """As in GPT-2. OpenVINO's kernels for 8-bit integers take constants, not what a Transpose makes of one."""
    made, real = [], openvino.compiled_model
    monkeypatch.setattr(openvino, "compiled_model", lambda *given: made.append(real(*given)) or made[-1])
    torch.manual_seed(0)
    model, x = Net(lambda self, x: F.linear(x, self.w.t()), w=torch.randn(64, 256)).eval(), torch.randn(2, 4, 64)
    compile_by(in_precision(tsopt.transform(tsopt.capture(model, x)), "int8-weights"), "openvino")
    kernels = [kernel.get_rt_info() for kernel in made[0].get_runtime_model().get_ordered_ops()]
    found = {info["layerType"].astype(str): info["runtimePrecision"].astype(str) for info in kernels}
    assert found["FullyConnected"] == "i8"
