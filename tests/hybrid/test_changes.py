"""`hybridize`: what may change between two calls, and how that is noticed."""

from __future__ import annotations

import copy
import types
import warnings

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, Net, X, close, eager
from tsopt import hybrid_state
from tsopt.hybrid import compiled_of


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.shift.add_(1),
        lambda net: net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()}),
        lambda net: setattr(net.shift, "data", net.shift + 1),
        lambda net: nn.init.zeros_(net.layers[0].weight),
        lambda net: net.double().float(),
    ],
    ids=["in place", "load_state_dict", "data", "init", "casts"],
)
def test_new_weights_are_used(net, change):
    with torch.no_grad():
        before = net(X)
        change(net)
        wanted = nn.Module.__call__(tsopt.hybridize(net, active=False), X)
        close(net(X), wanted)
        assert compiled_of(net).fast is not None
        assert before.shape == wanted.shape


@pytest.mark.filterwarnings("ignore:tsopt. Net runs in eager mode:UserWarning")
def test_a_training_loop_with_a_fused_optimizer(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with torch.no_grad():
            close(net(X), nn.Module.__call__(tsopt.hybridize(net, active=False), X))
        net.train()
        net(X).pow(2).mean().backward()
        optimizer.step()
        net.eval()


class OwnNorm(nn.Module):
    """A batch norm that counts nothing: torch writes its statistics without raising their versions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return nn.functional.batch_norm(self.layer(x), self.mean, self.var, training=self.training)


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_statistics_of_training_mode_are_used_after_it(calls, always_faster, inside, gradients):
    net = tsopt.hybridize(nn.Sequential(OwnNorm(), nn.ReLU()).eval(), **QUICK)
    with torch.no_grad():
        net(X)
        version = net[0].mean._version
        (net[0] if inside else net).train()
        with torch.set_grad_enabled(gradients):
            net(X * 3 + 5)
        net.eval()
        assert net[0].mean._version == version, "or this test tests nothing"
        close(net(X), eager(net))
        assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
def test_statistics_of_a_module_that_a_function_calls_are_used_after_training(always_faster):
    norm = OwnNorm().eval()

    def function(x):
        return norm(x).relu()

    fast = tsopt.hybridize(function, **QUICK)
    with torch.no_grad():
        fast(X)
    norm.train()
    fast(X * 3 + 5)
    norm.eval()
    with torch.no_grad():
        close(fast(X), function(X))


@pytest.mark.filterwarnings("ignore:tsopt. Net runs in eager mode:UserWarning")
def test_training_mode_that_has_written_nothing_is_no_change(net, calls):
    with torch.no_grad():
        for _ in range(3):
            net(X)
            net.train()(X)
            net.eval()
        net(X)
    assert len(calls) == 1


def test_weights_that_always_change_are_left_to_eager(net, calls):
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(10):
            net.shift.add_(1)
            close(net(X), nn.Module.__call__(tsopt.hybridize(net, active=False), X))
    assert len(calls) <= hybrid_state.CHANGES + 1
    assert [str(item.message) for item in said if "tsopt" in str(item.message)] == [
        "tsopt: Net runs in eager mode: its weights, hooks, attributes or globals change between calls"
    ]


def test_another_device_or_dtype_of_the_model(net):
    with torch.no_grad():
        net(X)
        net.double()
        assert net(X.double()).dtype == torch.float64


def test_a_counter_that_the_model_writes_is_no_change_of_weights(calls):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return x + self.count

    net = tsopt.hybridize(Counts().eval(), **QUICK)
    with torch.no_grad():
        answers = [float(net(torch.zeros(1))) for _ in range(3)]
    assert answers == [1, 2, 3]
    assert len(calls) == 1


def cut(net):
    for owner, name in ((net.layers[3], "weight"), (net.layers[3], "bias"), (net, "shift")):
        getattr(owner, name).data = getattr(owner, name).data[:2]


@pytest.mark.parametrize(
    "change",
    [
        cut,
        lambda net: setattr(net.layers[3], "_parameters", dict(nn.Linear(16, 3)._parameters)),
        lambda net: setattr(net.layers[1], "__class__", nn.Tanh),
        lambda net: setattr(net, "scale", 3.0),
        lambda net: net.layers[0].register_forward_hook(lambda module, args, output: output + 1),
        lambda net: net.layers.append(nn.Tanh()),
        lambda net: setattr(net.layers[1], "forward", torch.tanh),
        lambda net: setattr(net.layers[0].weight, "data", net.layers[0].weight.data.flip(0)),
    ],
    ids=["cut", "table", "class", "attribute", "hook", "module", "forward", "data"],
)
def test_what_is_seen_at_the_call_is_right_at_the_next_one(always_faster, change):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        net(X)
        assert compiled_of(net).fast.executable is not None
        change(net)
        close(net(X), eager(net))
        assert compiled_of(net).fast.executable is not None, "it is compiled again"


def test_a_module_in_training_mode_is_eagers_for_as_long_as_it_is(always_faster, calls):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        wanted = net(X)
        net.layers[2].train()
        with pytest.warns(UserWarning, match="a submodule is in training mode"):
            assert not torch.equal(net(X), net(X))
        net.layers[2].eval()
        close(net(X), wanted)
    assert len(calls) == 1


def test_a_module_that_was_in_training_mode_at_first_does_not_stand_for_good(always_faster, calls):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net.layers[2].train()
    with torch.no_grad():
        with pytest.warns(UserWarning, match="in training mode"):
            net(X)
        net(X)
        assert len(calls) == 1, "it is not tried at every call"
        net.eval()
        close(net(X), Net().eval()(X))
        assert compiled_of(net).fast.executable is not None


def test_what_nobody_sees_an_audit_finds_and_it_is_compiled_again(always_faster, calls):
    net = tsopt.hybridize(Net().eval(), share_weights=False, **QUICK)
    with torch.no_grad():
        before = net(X)
        net.layers[0].weight.detach().numpy()[:] *= -1
        wanted = eager(net)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = [net(X) for _ in range(100)]
        right = [torch.allclose(value, wanted, atol=1e-5) for value in found]
        assert not torch.allclose(before, wanted, atol=1e-3)
        assert right == sorted(right), "right from the audit on"
        assert right[-1]
    assert len(calls) == 2
    text = [str(item.message) for item in said if "tsopt" in str(item.message)]
    assert len(text) == 1
    assert text[0].startswith("tsopt: Net: an audit found a difference (output: ")
    assert "the model is optimized again" in text[0]


def test_without_audits_nobody_looks(always_faster):
    net = tsopt.hybridize(Net().eval(), audit=0, share_weights=False, **QUICK)
    with torch.no_grad():
        before = net(X)
        net.layers[0].weight.detach().numpy()[:] *= -1
        assert all(torch.equal(net(X), before) for _ in range(110))


@pytest.mark.parametrize(
    ("before", "after"), [(2, 2.0), (True, 1), (torch.tensor([2.0]), torch.tensor([2.0], dtype=torch.float64))]
)
def test_an_equal_value_of_another_type_is_another(always_faster, before, after):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = before

        def forward(self, x):
            return x * self.scale

    x = torch.arange(4) if not isinstance(before, torch.Tensor) else X
    net = tsopt.hybridize(Scaled().eval(), **QUICK)
    with torch.no_grad():
        net(x)
        net.scale = after
        assert net(x).dtype == (x * after).dtype


def test_a_counter_that_is_replaced_by_an_equal_one_is_the_one_that_counts(always_faster):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count += 1
            return x * self.count

    net, model = tsopt.hybridize(Counts().eval(), **QUICK), Counts().eval()
    with torch.no_grad():
        for called in (net, model):
            called(X)
            called.count = called.count.clone()
        close(torch.stack([net(X), net(X)]), torch.stack([model(X), model(X)]))


def test_an_attribute_that_is_read_by_name_is_watched(always_faster):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.config = 1.0, types.SimpleNamespace(use_shift=False)

        def forward(self, x):
            name = "shift"
            return x * getattr(self, "gain", 1.0) + float(getattr(self.config, f"use_{name}"))

    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        net(X)
        net.gain = 3.0
        close(net(X), X * 3)
        net.config.use_shift = True
        close(net(X), X * 3 + 1)


class Peak(nn.Module):
    """Scales by the largest value that it has seen."""

    def __init__(self):
        super().__init__()
        self.linear, self.peak = nn.Linear(8, 8), torch.zeros(())

    def forward(self, x):
        y = self.linear(x)
        self.peak = torch.maximum(self.peak, y.abs().max())
        return y / self.peak


class Remembers(nn.Module):
    """Uses its first input in all calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.memory = nn.Linear(8, 8), None

    def forward(self, x):
        if self.memory is None:
            self.memory = self.linear(x)
        return x + self.memory


@pytest.mark.parametrize("cls", [Peak, Remembers])
def test_what_only_another_input_shows_to_be_state_is_eagers(always_faster, cls):
    torch.manual_seed(0)
    model = cls().eval()
    net, wanted = tsopt.hybridize(copy.deepcopy(model), **QUICK | {"backends": ("torchscript",)}), model
    with torch.no_grad():
        for x in (10 * X, X, 2 * X):
            close(net(x), wanted(x))
