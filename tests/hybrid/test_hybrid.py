"""`hybridize`: the model's own interface, compiled calls where they are the same, eager where they are not."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, Net, Slotted, X, close, eager, relu
from tsopt import hybrid_state
from tsopt.hybrid import compiled_of
from tsopt.runtime.calling import eager_calls
from tsopt.runtime.calling.model_changes import Watch


def test_it_is_compiled_at_the_first_call_and_once(net, calls):
    assert calls == []
    with torch.no_grad():
        for _ in range(3):
            close(net(X), Net().eval()(X))
    assert len(calls) == 1
    assert compiled_of(net).fast.report.rows


def test_the_interface_is_that_of_the_model(net):
    plain = Net().eval()
    assert isinstance(net, Net)
    assert type(net).__name__ == "Net"
    assert (net.width, net.scale, net.names) == (16, 2.0, ["a", "b", "c"])
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]
    assert repr(net) == repr(plain)
    with torch.no_grad():
        assert net.classes(X) == plain.classes(X)


def test_it_shares_everything_with_the_model():
    model = Net().eval()
    net = tsopt.hybridize(model, **QUICK)
    net.extra = 1
    assert model.extra == 1
    assert net.train() is net
    assert model.training
    assert next(net.parameters()) is next(model.parameters())


def test_training_is_eager_and_says_so_once(net, calls):
    net.train()
    with pytest.warns(UserWarning, match="Net runs in eager mode: it is in training mode"):
        loss = net(X).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(X)
    loss.backward()
    assert net.layers[0].weight.grad is not None
    assert calls == []
    net.eval()
    with torch.no_grad():
        close(net(X), Net().eval()(X))
    assert len(calls) == 1


def test_where_gradients_are_wanted_it_is_eager(net):
    with torch.no_grad():
        net(X)
    with pytest.warns(UserWarning, match="gradients are required"):
        answer = net(X)
    assert answer.requires_grad
    frozen = tsopt.hybridize(Net().eval().requires_grad_(False), **QUICK)
    close(frozen(X), Net().eval()(X).detach())
    with pytest.warns(UserWarning, match="gradients are required"):
        assert frozen(X.clone().requires_grad_()).requires_grad


def test_another_form_of_call(net):
    with torch.no_grad():
        net(X)
        close(net(X[:2]), Net().eval()(X[:2]))


def test_active_false_gives_the_model_back(net):
    plain = tsopt.hybridize(net, active=False)
    assert type(plain) is Net
    assert tsopt.hybridize(plain, active=False) is plain
    assert compiled_of(tsopt.hybridize(net, **QUICK)).model is plain


def test_a_function(calls):
    @tsopt.hybridize(**QUICK)
    def twice(x, *, shift=0.0):
        """Doc."""
        return x * 2 + shift

    assert (twice.__name__, twice.__doc__) == ("twice", "Doc.")
    close(twice(X), X * 2)
    close(twice(X, shift=1.0), X * 2 + 1)
    assert len(calls) == 1
    assert tsopt.hybridize(twice, active=False)(X).shape == X.shape


def test_copies_and_pickles(net):
    with torch.no_grad():
        wanted = net(X)
        twin = copy.deepcopy(net)
        assert compiled_of(twin).fast is None
        close(twin(X), wanted)
        loaded = pickle.loads(pickle.dumps(net))
        assert type(loaded) is Net
        close(loaded(X), wanted)


def test_what_cannot_be_captured_runs_eager_and_says_why(monkeypatch):
    def refuses(*args, **kwargs):
        raise tsopt.CaptureError("no way", where="model.py:3")

    monkeypatch.setattr(hybrid_state, "optimize", refuses)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"Net runs in eager mode: no way; model.py:3"):
        close(net(X), Net().eval()(X))


@pytest.mark.filterwarnings("ignore:tsopt")
def test_hooks_still_run(net):
    seen = []
    net.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        net(X)
    assert seen


@pytest.mark.parametrize("bad", ["model.pt", 3, {"a": 1}])
def test_anything_else_is_refused(bad):
    with pytest.raises(tsopt.UsageError, match="cannot be hybridized"):
        tsopt.hybridize(bad)


def test_wrong_options_are_told_at_the_first_call():
    net = tsopt.hybridize(Net().eval(), frontend="magic")
    with torch.no_grad(), pytest.raises(tsopt.UsageError, match="unknown frontend 'magic'"):
        net(X)


def test_a_share_that_is_none_is_told_at_the_first_call():
    net = tsopt.hybridize(Net().eval(), audit=7, **QUICK)
    with torch.no_grad(), pytest.raises(tsopt.UsageError, match="audit must be"):
        net(X)


def test_forward_is_compiled_as_the_call_is(always_faster, calls):
    """Libraries call it past `__call__`."""
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        for _ in range(2):
            close(net.forward(X), eager(net))
    assert len(calls) == 1
    assert (tsopt.report(net).calls, tsopt.report(net).in_eager) == (2, {})
    assert inspect.signature(net.forward) == inspect.signature(Net().forward)


def test_forward_goes_past_hooks_as_that_of_the_model_does(always_faster):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    plain = eager(net)
    net.register_forward_hook(lambda module, args, output: output + 1)
    with torch.no_grad():
        close(net(X), plain + 1)
        close(net.forward(X), plain)
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
        try:
            close(net.forward(X), Net.forward(tsopt.hybridize(net, active=False), X))
        finally:
            handle.remove()


def test_where_the_call_is_more_than_forward_that_stays_as_it_is(always_faster):
    class More(Net):
        def __call__(self, x):
            return super().__call__(x) + 1

    net = tsopt.hybridize(More().eval(), **QUICK)
    with torch.no_grad():
        plain = net.forward(X)
        close(net(X), plain + 1)
        close(net.forward(X), plain)


def test_torchscript_is_refused_with_what_to_use():
    with pytest.raises(tsopt.UsageError, match=r"(?s)ScriptModule cannot be hybridized.*tsopt.optimize"):
        tsopt.hybridize(torch.jit.script(nn.Sequential(nn.ReLU())))
    with pytest.raises(tsopt.UsageError, match=r"(?s)ScriptFunction cannot be hybridized.*tsopt.optimize"):
        tsopt.hybridize(torch.jit.script(relu))


def test_what_slots_hold_is_shared_with_the_model(calls):
    model = Slotted().eval()
    net = tsopt.hybridize(model, **QUICK)
    assert net.factor == 3.0
    assert not hasattr(net, "unset")
    with torch.no_grad():
        close(net(X), eager(net, X))
        for owner, factor in ((net, 4.0), (model, 5.0)):
            owner.factor = factor
            assert (net.factor, model.factor) == (factor, factor)
            close(net(X), eager(net, X))
    del net.factor
    assert not hasattr(model, "factor")


def test_an_overridden_forward_reaches_the_one_it_extends(always_faster):
    class More(Net):
        def forward(self, x):
            return super().forward(x) + 1

    net = tsopt.hybridize(More().eval(), **QUICK)
    with torch.no_grad():
        close(net.forward(X), eager(net))


def test_a_function_whose_module_wants_gradients_is_eagers(always_faster):
    layer = nn.Linear(8, 3)
    net = tsopt.hybridize(lambda x: layer(x).relu(), **QUICK)
    with torch.no_grad():
        net(X)
    with pytest.warns(UserWarning, match="gradients are required"):
        net(X).sum().backward()
    assert layer.weight.grad is not None


def test_of_a_module_in_a_plain_list_gradients_are_wanted_too(always_faster):
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(8, 3)]

        def forward(self, x):
            return self.layers[0](x)

    model = Listed().eval()
    with pytest.warns(UserWarning, match="gradients are required"):
        tsopt.hybridize(model, **QUICK)(X).sum().backward()
    assert model.layers[0].weight.grad is not None


def test_a_function_of_torch_may_be_an_argument(always_faster):
    class Applies(nn.Module):
        def forward(self, x, activation):
            return activation(x)

    net = tsopt.hybridize(Applies().eval(), **QUICK)
    with torch.no_grad():
        close(net(X, torch.relu), X.relu())
        close(net(X, nn.functional.gelu), nn.functional.gelu(X))
    assert compiled_of(net).fast.executable is not None


def test_a_shallow_copy_is_another_module(net):
    twin = copy.copy(net)
    twin.scale = 5.0
    assert net.scale == 2.0
    with torch.no_grad():
        close(twin(X) - twin.shift, (net(X) - net.shift) * 2.5)


def test_the_class_of_a_hybrid_is_not_registered_as_one_of_the_users():
    registry = {}

    class Base(nn.Module):
        def __init_subclass__(cls, key, **options):
            super().__init_subclass__(**options)
            registry[key] = cls

    class Registered(Base, key="registered"):
        def forward(self, x):
            return x + 1

    net = tsopt.hybridize(Registered().eval(), **QUICK)
    assert registry == {"registered": Registered}
    assert isinstance(net, Registered)
    with torch.no_grad():
        close(net(X), X + 1)


def searched(monkeypatch):
    """The models that are looked through."""
    found = []
    monkeypatch.setattr(eager_calls, "Watch", lambda model, *args: found.append(model) or Watch(model, *args))
    return found


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
def test_a_model_whose_gradients_are_wanted_is_not_looked_through_at_each_call(monkeypatch):
    found, layer = searched(monkeypatch), nn.Linear(8, 3)
    for model, times in ((Net().eval(), 0), (lambda x: layer(x).relu(), 1)):
        found.clear()
        net = tsopt.hybridize(model, **QUICK)
        for _ in range(3):
            assert net(X).requires_grad
        assert len(found) == times


def head(net, layer):
    net.layers[3] = layer


def prompt(net, layer):
    net.layers[0].bias = nn.Parameter(torch.ones(16))


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
@pytest.mark.parametrize("change", [head, prompt])
def test_gradients_of_what_was_put_in_since_are_those_of_eager(always_faster, calls, change):
    net = tsopt.hybridize(Net().eval().requires_grad_(False), **QUICK)
    net(X)
    change(net, nn.Linear(16, 3))
    for _ in range(2):
        assert net(X).requires_grad
    with torch.no_grad():
        close(net(X), eager(net))
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
def test_gradients_of_a_functional_call_are_those_of_eager(always_faster, calls):
    net = tsopt.hybridize(Net().eval().requires_grad_(False), **QUICK)
    wanted = net(X)
    for _ in range(2 * hybrid_state.CHANGES):
        weight = torch.ones(3, 16, requires_grad=True)
        torch.func.functional_call(net, {"layers.3.weight": weight}, (X,)).sum().backward()
        assert weight.grad is not None
        close(net(X), wanted)
    assert len(calls) == 1, "a weight that is replaced for one call does not change the model"


class Potential(nn.Module):
    """Differentiates inside, if it is asked to, and as one graph if it is not asked to decide."""

    def __init__(self, decides):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.decides = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), decides

    def forward(self, x, forces=False):
        if not forces:
            y = self.layers(x)
            return y + 1 if self.decides and y.sum().item() > 1e9 else y
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.layers(x).sum(), x)
        return -gradient


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
@pytest.mark.parametrize("options", [{}, {"warmup": 0}, {"on_new_signature": "eager"}], ids=str)
@pytest.mark.parametrize("decides", [False, True], ids=["one graph", "parts"])
def test_a_model_may_differentiate_inside_in_calls_of_another_form(always_faster, decides, options):
    model = Potential(decides).eval().requires_grad_(False)
    net = tsopt.hybridize(model, **QUICK | options)
    close(net(X), model(X))
    assert compiled_of(net).fast is not None
    for x in (X, X, X[:2], X):
        close(net(x, forces=True), model(x, forces=True))
    close(net(X), model(X))


def test_the_report_says_which_argument_is_another_object_in_each_call(always_faster):
    class Tagged(Net):
        def forward(self, x, tag=None):
            return super().forward(x)

    net = tsopt.hybridize(Tagged().eval(), **QUICK)
    with torch.no_grad():
        for _ in range(12):
            net(X, tag=threading.Lock())
    told = str(tsopt.report(net))
    assert "11 calls in eager mode: the signature is not compiled" in told
    assert "run in eager mode until one has come 50 times; in each, 'tag' is another lock" in told
