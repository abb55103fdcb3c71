"""Layers by oneDNN: the same numbers, fewer calls, and torch's own kernels where those are faster or the only ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tsopt.runtime.backends import onednn
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.backends.layer_sites import ACTIVATIONS as FUSED
from tsopt.runtime.backends.layer_sites import LOSES_NAN
from tsopt.runtime.backends.onednn import OneDnnBackend, lower


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch):
    """What is chosen must not depend on how busy this machine is; whether a kernel is right is still looked at."""
    clock = iter(range(10**9))
    monkeypatch.setattr(onednn.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(onednn, "ROUNDS", 1)
    real = onednn._is_faster

    def is_faster(*args):
        real(*args)
        return True

    monkeypatch.setattr(onednn, "_is_faster", is_faster)


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).eval()


def kernels(model, example):
    """The oneDNN calls of the lowered program, in order, and whether it computes what the model computes."""
    program = tsopt.transform(tsopt.capture(model, example))
    tsopt.verify(model, tsopt.compile(program, "onednn"), example)
    calls = lower(program).program.calls()
    return [str(node.target).removeprefix("mkldnn.") for node in calls if str(node.target).startswith("mkldnn")]


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.25), nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.Hardswish(), nn.GELU(),
    nn.GELU("tanh"), nn.LeakyReLU(0.3),
]  # fmt: skip
IMAGES = torch.randn(2, 3, 6, 7, generator=torch.Generator().manual_seed(0))
CONVOLUTIONS = [
    (nn.Conv2d(3, 4, 3), (2, 3, 7, 7)),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False), (1, 4, 7, 8)),
    (nn.Conv2d(4, 4, 3, dilation=2, padding=(1, 2), groups=4), (2, 4, 9, 7)),
    (nn.Conv3d(2, 3, 3, padding=1), (1, 2, 5, 6, 4)),
    (nn.Conv2d(1, 1, 1), (1, 1, 1, 1)),
]
LINEARS = [
    (nn.Linear(5, 7), (3, 5)),
    (nn.Linear(5, 7, bias=False), (2, 3, 5)),
    (nn.Linear(1, 1), (1, 1)),
    (nn.Linear(8, 4), (2, 3, 2, 8)),
]


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS + LINEARS)
def test_a_layer_gives_what_eager_gives(layer, shape):
    kind = "_linear" if isinstance(layer, nn.Linear) else "_convolution"
    assert kernels(net(layer), torch.randn(shape)) == [f"{kind}_pointwise.default"]


@pytest.mark.sliced(8)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("layer", "shape"), [CONVOLUTIONS[0], LINEARS[0]], ids=["conv", "linear"])
def test_an_activation_is_part_of_the_layer(layer, shape, activation):
    model, x = net(layer, activation), torch.randn(shape)
    assert len(kernels(model, x)) == 1
    lowered = lower(tsopt.capture(model, x)).program
    assert not any(node.target in FUSED for node in lowered.calls())


class Residual(nn.Module):
    def __init__(self, layer, act, *, swapped=False) -> None:
        super().__init__()
        self.layer, self.act, self.swapped = layer, act, swapped
        self.eval()

    def forward(self, x):
        y = self.layer(x)
        return self.act(x + y if self.swapped else y + x)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("act", [nn.Identity(), nn.ReLU()], ids=["sum", "relu"])
def test_a_residual_sum_is_part_of_the_layer(act, swapped):
    model, x = Residual(nn.Conv2d(3, 3, 3, padding=1), act, swapped=swapped), torch.randn(1, 3, 6, 6)
    assert kernels(model, x) == ["_convolution_pointwise.binary"]
    assert [str(node.target) for node in lower(tsopt.capture(model, x)).program.calls()][1:] == [
        "aten.contiguous.default"
    ]


def test_a_residual_sum_after_a_linear_layer_leaves_the_activation_to_torch():
    model, x = Residual(nn.Linear(6, 6), nn.ReLU()), torch.randn(2, 6)
    assert kernels(model, x) == ["_linear_pointwise.binary"]
    assert "aten.relu.default" in [str(node.target) for node in lower(tsopt.capture(model, x)).program.calls()]


def test_both_operands_of_a_sum_may_be_layers():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            return F.relu(self.a(x) + self.b(x))

    assert sorted(kernels(Net().eval(), torch.randn(1, 3, 5, 5))) == [
        "_convolution_pointwise.binary",
        "_convolution_pointwise.default",
    ]


class Shared(nn.Module):
    """The layer's own value is wanted as well; or the sum is with a scalar, broadcast, scaled, or with itself."""

    FORMS = {
        "used": lambda y, x: (F.relu(y), y),
        "scalar": lambda y, x: y + 1.0,
        "broadcast": lambda y, x: y + x[:1],
        "alpha": lambda y, x: torch.add(y, x, alpha=2),
        "itself": lambda y, x: y + y,
        "double": lambda y, x: y.double() + x,
    }

    def __init__(self, form) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(6, 6), self.FORMS[form]

    def forward(self, x):
        return self.form(self.layer(x), x)


@pytest.mark.parametrize("form", Shared.FORMS)
def test_what_the_layer_cannot_do_stays_with_torch(form):
    assert kernels(Shared(form).eval(), torch.randn(2, 6)) == ["_linear_pointwise.default"]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_nan_goes_through_an_activation_or_a_note_says_that_it_does_not(activation):
    model, x = net(nn.Conv2d(3, 2, 3), activation), torch.randn(1, 3, 4, 4)
    executable = tsopt.compile(tsopt.capture(model, x), "onednn")
    lost = not executable(x * float("nan")).isnan().all()
    assert lost == (LOSES_NAN in executable.notes)


def test_outputs_leave_in_the_layout_of_eager():
    model = net(nn.Conv2d(3, 4, 3), nn.ReLU())
    found = tsopt.compile(tsopt.capture(model, torch.randn(1, 3, 6, 6)), "onednn")(torch.randn(1, 3, 6, 6))
    assert found.is_contiguous()


VIEWED = {
    "flattened": lambda y: y.flatten(2),
    "of one image": lambda y: y[0],
    "transposed": lambda y: y.transpose(1, 3),
    "sliced": lambda y: y[:, :3],
    "tokens": lambda y: y.flatten(2).transpose(1, 2),
    "expanded": lambda y: y[:, :, :1].expand(-1, -1, 4, -1),
}


@pytest.mark.parametrize("view", VIEWED.values(), ids=VIEWED)
@pytest.mark.parametrize("x", [IMAGES, IMAGES.contiguous(memory_format=torch.channels_last)], ids=["NCHW", "NHWC"])
def test_an_output_has_its_axes_in_memory_in_the_order_of_eager(view, x):
    """So that a view that a caller takes of it is the one that eager allows."""
    model = Net(lambda self, x: view(self.layer(x)), layer=nn.Conv2d(3, 4, 3))
    found, wanted = tsopt.compile(tsopt.capture(model, x), "onednn")(x), model(x)
    torch.testing.assert_close(found, wanted)
    if 0 not in wanted.stride():
        assert order_of(found) == order_of(wanted)
        assert found.is_contiguous() or not wanted.is_contiguous()


def order_of(value):
    return sorted(range(value.dim()), key=lambda axis: -value.stride()[axis])


def test_views_of_a_channels_last_value_are_taken():
    model = net(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    assert len(kernels(model, torch.randn(1, 3, 6, 6))) == 2


def test_a_weight_used_twice_is_packed_once_for_each_geometry():
    layer = nn.Linear(4, 4)
    model = net(layer, nn.ReLU(), layer)
    lowered = lower(tsopt.capture(model, torch.randn(2, 4)))
    assert lowered.packed == 2
    assert len([name for name in lowered.program.used_weights() if ".packed" in name]) == 1


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch):
    monkeypatch.undo()
    real = onednn._kernel

    def broken(site, call, x, other, weight, bias):
        target, args = real(site, call, x, other, weight, bias)
        return (lambda *a: target(*a) + 1), args

    monkeypatch.setattr(onednn, "_kernel", broken)
    program = tsopt.capture(net(nn.Linear(4, 4)), torch.randn(2, 4))
    assert lower(program).packed == 0


def test_torch_keeps_the_layers_that_it_runs_faster(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(onednn, "_is_faster", lambda *args: False)
    program = tsopt.capture(net(nn.Linear(4, 4)), torch.randn(2, 4))
    with pytest.raises(tsopt.NoGain, match="torch's own kernels are at least as fast for every layer") as caught:
        tsopt.compile(program, "onednn")
    assert caught.value.fix


def test_layers_are_measured_with_the_threads_that_were_asked_for(monkeypatch, torch_threads):
    torch_threads(2)
    seen, real = set(), onednn.sample

    def sample(*args):
        seen.add(torch.get_num_threads())
        return real(*args)

    monkeypatch.setattr(onednn, "sample", sample)
    tsopt.compile(tsopt.capture(net(nn.Linear(5, 7), nn.ReLU()), torch.ones(3, 5)), "onednn", threads=1)
    assert seen == {1}
    assert torch.get_num_threads() == 2


def test_what_was_measured_in_one_process_is_what_runs_in_another(tmp_path, monkeypatch):
    monkeypatch.undo()
    asked = []

    def measured(site, *_):
        asked.append(site)
        return site.layer.meta["val"].shape[-1] == 8

    monkeypatch.setattr(onednn, "_is_faster", measured)
    program = tsopt.capture(net(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 8)), torch.randn(2, 4))
    made = tsopt.compile(program, "onednn")
    made.hand_over(tmp_path)
    assert len(asked) == 3
    again = OneDnnBackend().reopen(program, tmp_path)
    assert len(asked) == 3  # not measured again
    assert again.notes[0] == made.notes[0] == "2 of 3 layers run with oneDNN, the others with torch"
    x = torch.randn(2, 4)
    assert torch.equal(again(x), made(x))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda x: x * 2, torch.randn(2)),
        (net(nn.Linear(4, 4)).double(), torch.randn(2, 4, dtype=torch.float64)),
        (lambda x, w: F.linear(x, w), (torch.randn(2, 4), torch.randn(3, 4))),
        (net(nn.Conv1d(3, 4, 3)), torch.randn(1, 3, 8)),
        (net(nn.Conv2d(3, 4, 3)), torch.randn(3, 8, 8)),
        (net(nn.Linear(4, 4)), torch.randn(4)),
        (net(nn.Linear(4, 4)), torch.randn(0, 4)),
    ],
    ids=["no layer", "f64", "computed weight", "conv1d", "no batch", "vector", "empty"],
)
def test_a_program_without_such_layers_is_refused(model, x):
    refused = OneDnnBackend().unsupported(tsopt.capture(model, x))
    (reason,) = [item.why for item in refused]
    assert reason == "no convolution or linear layer with constant floating-point weights on the CPU"


def test_what_reads_memory_by_strides_is_refused_by_name():
    model = net(nn.Conv2d(3, 4, 3))
    program = tsopt.capture(lambda x: model(x).as_strided((2, 2), (2, 1)), torch.randn(1, 3, 6, 6))
    assert "as_strided depends on the strides of its input" in OneDnnBackend().unsupported(program)[0].why


def test_a_torch_without_onednn_is_told(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(tsopt.BackendError, match="a torch build with oneDNN"):
        get_backend("onednn")


def test_a_bundle_packs_again_on_load(tmp_path, monkeypatch):
    model, x = net(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 6, 6)
    fast = tsopt.optimize(model, x, backends=("onednn",), seconds=0.1)
    executable = tsopt.compile(fast.program, "onednn")
    fast.executable = executable  # whoever won on this machine
    path = fast.save(tmp_path / "m.tsopt")
    loaded = tsopt.load(path)
    torch.testing.assert_close(loaded(x), model(x).detach())
    assert loaded.backend == "onednn"
    monkeypatch.setattr(onednn, "_is_faster", lambda *args: False)
    loaded = tsopt.load(path)  # on a machine where torch is as fast
    assert loaded.backend == "eager"
    torch.testing.assert_close(loaded(x), model(x).detach())


def test_opened_again_it_measures_with_the_threads_of_the_race(monkeypatch, tmp_path, torch_threads):
    torch_threads(1)
    found = []
    monkeypatch.setattr(onednn, "_is_faster", lambda *_: found.append(torch.get_num_threads()) or True)
    program = tsopt.capture(net(nn.Linear(5, 7)), torch.randn(3, 5))
    (tmp_path / onednn.MEASURED).write_text("{}")
    OneDnnBackend(threads=2).reopen(program, tmp_path)
    assert found == [2]
    assert torch.get_num_threads() == 1
