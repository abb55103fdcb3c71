"""Weights that change after `optimize`: calls keep using the old ones, or say that they cannot."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.backends import onednn
from tsopt.runtime.calling.audit import Audits
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.calling.weights import Weights

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))
Y = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))


class Net(nn.Module):
    """A weight that passes fold, one that they share, and a constant."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.shift = torch.randn(3)

    def forward(self, x):
        return self.layers(x) + self.shift


@pytest.fixture
def net():
    return Net().eval().requires_grad_(False)


def change(net):
    for tensor in (*net.parameters(), net.shift):
        tensor.mul_(1.5)


def unseen(net):
    for tensor in (*net.parameters(), net.shift):
        tensor.detach().numpy()[...] *= 1.5


@pytest.fixture
def made(net, optimized_by):
    """What `optimize` makes of it by a backend, or with the model itself as the winner."""

    def make(backend="eager", *, share=False, policy="capture", audits=None):
        program = tsopt.capture(net, X)
        weights = Weights(net, program.weights.values(), exact=not share and backend != "model")
        better = tsopt.transform(program)
        executable = None if backend == "model" else tsopt.compile(better, backend, share_weights=share)

        def another(example, *others):
            if others:
                raise tsopt.CaptureError("specialized on its sizes")
            return tsopt.compile(tsopt.capture(net, example), "eager", share_weights=share)

        report = optimized_by("model" if backend == "model" else "eager").report
        return Optimized(
            *(net, better, executable, report, Example((X,)), another, policy),
            audits=audits,
            weights=weights,
            share_weights=share,
        )

    return make


@pytest.mark.parametrize("backend", ["eager", "onednn", "torchscript", "onnxruntime"])
@pytest.mark.parametrize("how", [change, unseen])
def test_what_a_backend_has_made_keeps_the_weights_of_then(net, backend, how, monkeypatch):
    monkeypatch.setattr(onednn, "_is_faster", lambda *_: True)
    executable = tsopt.compile(tsopt.transform(tsopt.capture(net, X)), backend)
    wanted = executable(X).clone()
    how(net)
    assert not torch.allclose(net(X), wanted, atol=1e-3)
    assert torch.equal(executable(X), wanted)


def test_weights_are_shared_where_that_is_asked_for(net):
    program = tsopt.capture(net, X)
    executable = tsopt.compile(program, "eager", share_weights=True)
    change(net)
    torch.testing.assert_close(executable(X), net(X))


def test_the_race_copies_weights_once_and_only_where_they_are_not_shared(net, monkeypatch):
    from tsopt.runtime.racing import contenders

    copied = []
    real = contenders.owned
    monkeypatch.setattr(contenders, "owned", lambda program: copied.append(1) or real(program))
    options = {"seconds": 0.02, "isolate": False, "cache": False, "backends": ("eager", "torchscript")}
    tsopt.optimize(net, X, **options)
    assert len(copied) == 1
    tsopt.optimize(net, X, share_weights=True, **options)
    assert len(copied) == 1


def test_shared_weights_that_change_are_refused(net, made):
    fast = made(share=True)
    torch.testing.assert_close(fast(X), net(X))
    torch.testing.assert_close(fast(Y), net(Y))
    change(net)
    for x in (X, Y):
        with pytest.raises(tsopt.WeightsChangedError, match="share_weights=True"):
            fast(x)
    with pytest.raises(tsopt.WeightsChangedError):
        fast(Y[:1])


def test_another_form_is_refused_once_the_weights_have_changed(net, made):
    fast = made()
    wanted = fast(X)
    also = fast(Y).clone()
    unseen(net)
    assert torch.equal(fast(X), wanted)
    assert torch.equal(fast(Y), also), "a form that was made before"
    with pytest.raises(tsopt.WeightsChangedError, match="compiled signatures keep the old weights"):
        fast(Y[:3])


def test_a_form_that_eager_serves_is_refused_as_well(net, made):
    fast = made(policy="eager")
    torch.testing.assert_close(fast(Y), net(Y))
    change(net)
    with pytest.raises(tsopt.WeightsChangedError):
        fast(Y)


def test_weights_written_with_what_they_held_are_not_refused(net, made):
    fast = made(policy="eager")
    net.load_state_dict(net.state_dict())
    torch.testing.assert_close(fast(Y), net(Y))


def test_where_eager_won_the_model_runs_with_its_weights_and_says_so(net, made):
    fast = made("model")
    assert "calls run the model itself, with the weights it has at the time of the call" in fast.report.text
    change(net)
    with pytest.warns(UserWarning, match="have changed since `optimize`: eager calls use the new ones"):
        found = [fast(X) for _ in range(20)]
    torch.testing.assert_close(found[-1], net(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            fast(X)


@pytest.mark.parametrize("how", [change, unseen])
def test_an_audit_takes_changed_weights_for_no_fault_of_the_engine(net, made, how):
    audits = Audits(1.0, choose=lambda below: 0)
    audits.left = 2
    fast = made(audits=audits)
    wanted = fast(X).clone()
    how(net)
    with pytest.warns(UserWarning, match="calls keep using the old ones"):
        found = [fast(X) for _ in range(5)]
    assert all(torch.equal(value, wanted) for value in found)
    assert fast.executable is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            fast(X)


def test_a_bundle_holds_the_weights_of_then(net, made, tmp_path):
    fast = made()
    wanted = fast(X).clone()
    unseen(net)
    path = fast.save(tmp_path / "m.tsopt")
    torch.testing.assert_close(tsopt.load(path)(X), wanted)
    from safetensors.torch import load_file

    torch.testing.assert_close(load_file(path / "check.safetensors")["output.0"], wanted)


def test_what_is_made_later_of_changed_weights_is_refused(net, made, tmp_path):
    fast = made()
    change(net)
    with pytest.raises(tsopt.WeightsChangedError):
        fast.verified("torchscript")
    fast = made("model")
    change(net)
    with pytest.raises(tsopt.WeightsChangedError):
        fast.save(tmp_path / "m.tsopt")


def test_whoever_looks_after_the_weights_is_not_disturbed(net, made):
    fast = made(share=True)
    fast.unwatched()
    change(net)
    fast(X)
    fast(Y)


def test_layers_of_other_weights_are_not_timed(net, made):
    fast = made()
    assert fast.profile().layers
    change(net)
    with pytest.raises(tsopt.WeightsChangedError):
        fast.profile()


class Positions(nn.Module):
    """Keeps what it adds by position for later calls, as position encodings do, and makes more for longer ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("added", None, persistent=False)

    def forward(self, x):
        if self.added is None or len(self.added) < len(x):
            self.added = torch.arange(len(x)).sqrt()
        return self.layer(x) + self.added[: len(x), None]


@pytest.fixture
def positions():
    model = Positions().eval().requires_grad_(False)
    options = {"seconds": 0.02, "isolate": False, "cache": False, "backends": ("torchscript",), "audit": 0}
    return model, tsopt.optimize(model, X, **options)


@pytest.mark.usefixtures("always_faster")
def test_what_a_model_keeps_for_later_calls_is_no_new_weight(positions):
    model, fast = positions
    assert fast.backend == "torchscript"
    assert model.added is None
    for rows in (2, 5, 3, 9):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), model(x), msg=f"{rows} rows, after the model itself has seen as many")


@pytest.mark.usefixtures("always_faster")
def test_what_is_put_there_instead_is(positions):
    model, fast = positions
    wanted = model(X)
    model.added = torch.full((7,), 3.0)
    torch.testing.assert_close(fast(X), wanted)
    with pytest.raises(tsopt.WeightsChangedError, match=r"where: added\n"):
        fast(Y)
    model.added = None
    fast(Y)
    model.layer.weight.mul_(2)
    model.layer.bias.mul_(2)
    with pytest.raises(tsopt.WeightsChangedError, match=r"where: layer.weight, layer.bias\n"):
        fast(torch.randn(8, 6))


@pytest.mark.usefixtures("always_faster")
def test_a_difference_that_such_values_do_not_explain_is_one(positions):
    model, fast = positions
    fast._audits = Audits(1.0, choose=lambda below: 0)
    fast._audits.left = fast._audits.count = 0
    model.added = torch.full((7,), 3.0)
    with pytest.warns(UserWarning, match="an audit found a difference") as warned:
        found = fast(X)
    assert warned[0].filename == __file__
    torch.testing.assert_close(found, model(X))


def test_of_many_weights_that_have_changed_some_are_named(net, made):
    fast = made()
    change(net)
    with pytest.raises(
        tsopt.WeightsChangedError, match=r"where: layers.0.weight, layers.0.bias, layers.1.weight and 5 more\n"
    ):
        fast(Y)
