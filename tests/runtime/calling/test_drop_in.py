"""What `optimize` returns, where a module is expected."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.calling.drop_in import DropIn

X = torch.randn(2, 4)
QUICK = {"backends": ("eager",), "seconds": 0.01, "isolate": False, "cache": False}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.config = {"width": 4}

    def forward(self, x):
        return self.fc(x)


class Breaks(Net):
    def forward(self, x):
        y = self.fc(x)
        return y if float(y.sum()) > 0 else -y


class Refuses(Net):
    def forward(self, x):
        return self.fc(x).shape[0]


@pytest.fixture(scope="module", params=[Net, Breaks, Refuses], ids=["optimized", "in parts", "in eager"])
def fast(request):
    made = tsopt.optimize(request.param().eval(), X, **QUICK)
    kinds = {Net: tsopt.Optimized, Breaks: tsopt.Partitioned, Refuses: tsopt.InEager}
    assert type(made) is kinds[request.param]
    return made


def test_eval_and_to_the_same_place_return_itself(fast):
    assert fast.eval() is fast
    assert fast.to("cpu") is fast
    assert fast.to(torch.float32) is fast
    assert fast.to(X) is fast


@pytest.mark.parametrize("place", ["meta", torch.float64])
def test_it_cannot_be_moved(fast, place):
    with pytest.raises(tsopt.UsageError, match=r"cannot be moved(?s:.*)fix: move the model, and optimize it there"):
        fast.to(place)


@pytest.mark.parametrize("name", ["parameters", "state_dict", "train", "generate", "training", "fc", "config"])
def test_what_belongs_to_modules_or_to_the_model_is_named(fast, name):
    type(fast.model).generate = lambda self: None
    assert not hasattr(fast, name)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'(?s:.*)model\.{name}; or tsopt\.hybridize"):
        getattr(fast, name)


def test_what_nobody_has_is_an_attribute_error_as_usual(fast):
    with pytest.raises(AttributeError, match="object has no attribute 'reprot'") as caught:
        _ = fast.reprot
    assert not isinstance(caught.value, tsopt.UsageError)


def test_an_optimized_function_cannot_be_moved():
    made = tsopt.optimize(lambda x: x * 2, X, **QUICK)
    assert made.to("cpu", torch.float32) is made
    with pytest.raises(tsopt.UsageError, match="cannot be moved"):
        made.to("meta")


def test_inputs_do_not_say_where_a_model_is():
    model = nn.Linear(4, 4).double().eval()
    made = tsopt.optimize(lambda x: model(x.double()), X, **QUICK)
    assert made.to(torch.float64) is made


def test_a_hybrid_is_of_a_model_not_of_what_was_made_of_it(fast):
    with pytest.raises(tsopt.UsageError, match=r"cannot be hybridized(?s:.*)fix: pass the original model"):
        tsopt.hybridize(fast)


def test_a_function_has_nothing_else():
    made = tsopt.optimize(lambda x: x * 2, X, **QUICK)
    assert made.eval() is made
    with pytest.raises(AttributeError, match="'Optimized' object has no attribute 'parameters'"):
        _ = made.parameters


def test_copies(fast):
    assert torch.equal(torch.as_tensor(copy.copy(fast)(X)), torch.as_tensor(fast(X)))
    with pytest.raises(tsopt.UsageError, match="cannot be deep-copied"):
        copy.deepcopy({"model": fast})
    instead = "save a bundle" if isinstance(fast, tsopt.Optimized) else "pickle the model itself"
    with pytest.raises(tsopt.UsageError, match=rf"cannot be pickled(?s:.*)fix: {instead}"):
        pickle.dumps(fast)


def test_while_it_is_made_it_has_no_model():
    with pytest.raises(AttributeError, match="'DropIn' object has no attribute 'model'"):
        _ = DropIn().model


def test_what_is_optimized_already_is_returned_as_it_is(fast, recwarn):
    assert tsopt.optimize(fast, X, **{**QUICK, "backends": None}) is fast
    assert not recwarn
    with pytest.warns(UserWarning, match="already optimized and is returned unchanged; ignored: level, precision"):
        assert tsopt.optimize(fast, X, level=1, precision="bf16", seconds=0.1) is fast


def test_of_a_hybrid_the_model_behind_it_is_optimized(always_faster):
    model = Net().eval()
    for hybrid in (tsopt.hybridize(model), tsopt.hybridize(model.forward)):
        made = tsopt.optimize(hybrid, X, **QUICK)
        assert made.model in (model, model.forward)
        assert torch.equal(made(X), model(X))
        assert tsopt.report(hybrid).calls == 0
