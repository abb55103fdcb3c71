"""Inductor: compiled once for all tests, for that takes a C++ compiler and half a minute."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.helpers import save
from tsopt.runtime.backends import inductor
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.backends.inductor import FILE, InductorBackend

pytestmark = pytest.mark.skipif(InductorBackend().missing() is not None, reason="no C++ compiler")
LOAD = """
import sys, torch, tsopt
found = tsopt.load(sys.argv[1], trust=True)
x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
print([value.flatten().tolist() for value in found(x)])
"""


class Net(nn.Module):
    """Two outputs and a state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return torch.relu(self.layer(x)) + self.count, x.transpose(1, 2) * 2


X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


@pytest.fixture(scope="module")
def net():
    return Net().eval()


@pytest.fixture(scope="module")
def compiled(net):
    return tsopt.compile(tsopt.capture(net, X), "inductor")


@pytest.mark.slow
def test_it_computes_the_same_and_writes_state(net, compiled):
    before = net.count.clone()
    found = compiled(X)
    assert torch.equal(net.count, before + 1)
    net.count.copy_(before)
    for mine, theirs in zip(found, net(X), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()


@pytest.mark.slow
def test_inputs_of_another_layout_are_right(net, compiled):
    x = X.transpose(0, 1).contiguous().transpose(0, 1)
    net.count.zero_()
    found = compiled(x)
    net.count.zero_()
    torch.testing.assert_close(found[0], net(x)[0])


@pytest.mark.slow
def test_a_bundle_loads_in_a_fresh_process_when_it_is_trusted(net, compiled, tmp_path):
    net.count.zero_()
    place = save(compiled, tmp_path / "net.tsopt", net, X)
    with pytest.raises(tsopt.BundleError, match=r"executes code \(machine code\)"):
        tsopt.load(place)
    net.count.zero_()
    done = subprocess.run([sys.executable, "-c", LOAD, str(place)], capture_output=True, text=True, check=True)
    for mine, theirs in zip(eval(done.stdout), net(X), strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs.detach().flatten())


@pytest.mark.slow
def test_what_another_process_has_compiled_is_taken_over_and_its_files_go(net, compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(inductor.tempfile, "tempdir", str(tmp_path))
    made = InductorBackend()
    compiled.save(tmp_path)
    again = made.reopen(tsopt.capture(net, X), tmp_path)
    assert not (tmp_path / FILE).exists()
    net.count.zero_()
    torch.testing.assert_close(again(X)[1], net(X)[1])
    again.save(tmp_path)
    assert (tmp_path / FILE).stat().st_size > 1000
    assert list(tmp_path.glob("tsopt-*")) == [], "whoever is killed now leaves it"


@pytest.mark.slow
def test_a_damaged_package_is_a_message(compiled, tmp_path):
    (tmp_path / FILE).write_bytes(b"no package")
    with pytest.raises(tsopt.BundleError, match="cannot be loaded"):
        inductor.load_runner(tmp_path, compiled.signature, {})


def test_without_a_compiler_it_is_missing(monkeypatch):
    monkeypatch.setattr(inductor.shutil, "which", lambda name: None)
    with pytest.raises(tsopt.BackendError, match="is not available") as caught:
        get_backend("inductor")
    assert "C++ compiler" in caught.value.why


def test_what_the_compiler_says_is_told_and_nothing_is_left(monkeypatch, tmp_path, mlp_program):
    def fail(*args, **kwargs):
        raise RuntimeError("\n  error: no such instruction  \nmore")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    monkeypatch.setattr(inductor.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(tsopt.BackendError, match="Inductor failed to compile") as caught:
        tsopt.compile(mlp_program, "inductor")
    assert caught.value.why == "RuntimeError: error: no such instruction"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_machine_code_serves_all_sizes():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    program = tsopt.capture(lambda x: model(x).softmax(1) / x.shape[1], [torch.randn(2, 3, 4), torch.randn(5, 6, 4)])
    run = tsopt.compile(tsopt.transform(program), "inductor")
    for sizes in ((1, 3), (7, 11)):
        x = torch.randn(*sizes, 4)
        torch.testing.assert_close(run(x), model(x).softmax(1) / sizes[1])
