"""A shadow has modules, containers and objects of its own, the same parameters, and does what the model does."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.snapshot import held_by
from tsopt.compiler.capture.capture import capture, capture_apart
from tsopt.compiler.capture.shadow import Shadow, shadow_of

X = torch.randn(2, 4)


class Stats:
    def __init__(self):
        self.calls, self.seen = 0, []


class Net(nn.Module):
    """Everything that a model may hold, and counts in all of it."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.again = self.layer
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.view_of_count = self.count.view(1)
        self.__dict__["parent_of"] = {"self": self}
        self.steps = [self.layer, (nn.Tanh(), {"deep": self.norm})]
        self.bound, self.part = self.layer.forward, functools.partial(self.norm, input=None)
        self.reference, self.lock = weakref.ref(self.layer), threading.Lock()
        self.stats, self.calls, self.known = Stats(), 0, {0: "a"}
        self.closed = lambda x: self.layer(x)
        self.generator = (i for i in range(3))

    def forward(self, x):
        self.count.add_(1)
        self.calls += 1
        self.stats.calls += 1
        self.stats.seen.append(len(x))
        self.known[len(self.known)] = self.layer
        with self.lock:
            x = self.closed(x) + self.bound(x) + self.reference()(x)
        return self.parent_of["self"].norm(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def test_it_answers_as_the_model_does_and_leaves_no_trace_on_it(net):
    shadow = Shadow(net)
    assert torch.equal(shadow.called(X), net(X))
    shadow.called(X), shadow.called(X)
    assert (int(net.count), net.calls, net.stats.calls, net.stats.seen, len(net.known)) == (1, 1, 1, [2], 2)
    assert (int(shadow.called.count), shadow.called.calls, shadow.called.stats.calls) == (3, 3, 3)


def test_every_module_is_copied_once_and_what_leads_to_it_leads_to_the_copy(net):
    copy = Shadow(net).called
    assert not set(map(id, copy.modules())) & set(map(id, net.modules()))
    assert copy.again is copy.layer
    assert copy.parent_of["self"] is copy
    assert copy.steps[0] is copy.layer
    assert copy.steps[1][1]["deep"] is copy.norm
    assert copy.bound.__self__ is copy.layer
    assert copy.part.func is copy.norm
    assert copy.reference() is copy.layer
    assert copy.closed.__closure__[0].cell_contents is copy
    assert [type(module) for module in copy.modules()] == [type(module) for module in net.modules()]
    assert list(copy.state_dict()) == list(net.state_dict())


def test_parameters_are_the_models_and_buffers_are_copies_that_views_of_them_lie_in(net):
    copy = Shadow(net).called
    assert all(a is b for a, b in zip(copy.parameters(), net.parameters(), strict=True))
    assert copy.count is not net.count
    copy.count.add_(5)
    assert (int(copy.view_of_count), int(net.view_of_count)) == (5, 0)


def test_what_only_its_class_could_copy_is_shared(net):
    copy = Shadow(net).called
    assert copy.lock is net.lock
    assert copy.generator is net.generator
    assert copy.steps[1][0] is not net.steps[1][0]


def test_a_parameter_that_is_written_has_memory_of_its_own():
    table = nn.Embedding(3, 4, max_norm=0.5).eval()
    copy = Shadow(table, written=[table.weight])
    before = table.weight.detach().clone()
    copy.called(torch.tensor([0, 1, 2]))
    assert torch.equal(table.weight, before)
    assert isinstance(copy.called.weight, nn.Parameter)
    assert copy.called.weight.requires_grad
    assert copy.twin(copy.called.weight) is table.weight
    assert copy.twin(table.weight) is copy.called.weight


class Calling(nn.Module):
    """Calls a hybrid of a function that counts in it, and a function around that hybrid."""

    def __init__(self, said):
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

        def layered(x):
            self.calls += 1
            return self.layer(x)

        self.hybrid = tsopt.hybridize(layered, backends=("eager",), isolate=False, cache=False, progress=said.append)
        self.around = functools.wraps(self.hybrid)(lambda x: self.hybrid(x) + 1)

    def forward(self, x):
        return self.hybrid(x) + self.around(x)


def test_what_is_behind_a_hybrid_is_no_part_of_the_model_that_calls_it():
    said = [[], {}]
    net = Calling(said).eval()
    assert not {id(said), *map(id, said)} & held_by(net.hybrid)
    shadow = Shadow(net)
    assert not any(map(shadow.holds, (said, *said, net.hybrid._tsopt_compiled)))
    once = net.layer(X)
    assert torch.equal(shadow.called(X), once + (once + 1))
    assert (net.calls, shadow.called.calls, tsopt.report(net.hybrid).calls) == (0, 2, 0)
    assert not hasattr(shadow.called.hybrid, "_tsopt_compiled")
    assert shadow.called.around is not net.around


class Slotted(nn.Module):
    __slots__ = ("hidden",)

    def __init__(self):
        super().__init__()
        self.hidden = [1]

    def __getattr__(self, name):
        return super().__getattr__(name) if name != "made" else self.hidden

    @property
    def first(self):
        return self.hidden[0]

    def forward(self, x):
        return x * self.first + len(self.made)


def test_slots_properties_and_attributes_that_are_made_up_are_those_of_the_copy():
    model = Slotted()
    copy = Shadow(model).called
    assert torch.equal(copy(X), model(X))
    copy.hidden.append(2)
    assert model.hidden == [1]


@pytest.mark.parametrize(
    "held",
    [
        deque([1, 2], maxlen=2),
        defaultdict(list, {1: [2]}),
        OrderedDict(a=1),
        {1, 2},
        bytearray(b"ab"),
        SimpleNamespace(a=[1]),
        (1, [2]),
        logging.getLogger("tsopt"),
    ],
    ids=lambda held: type(held).__name__,
)
def test_containers_keep_their_class_and_contents(held):
    model = nn.Linear(2, 2)
    model.held = held
    copy = Shadow(model).called
    assert type(copy.held) is type(held)
    assert copy.held == held
    assert getattr(copy.held, "maxlen", None) == getattr(held, "maxlen", None)


@pytest.mark.parametrize("how", ["function", "method", "partial", "object"])
def test_a_callable_around_modules_is_copied_with_them(how):
    layer = nn.BatchNorm1d(4).eval()

    class Engine:
        def __init__(self):
            self.layer = layer

        def run(self, x):
            return self.layer(x)

        __call__ = run

    def forward(x):
        return layer(x)

    model = {
        "function": forward,
        "method": Engine().run,
        "partial": functools.partial(lambda net, x: net(x), layer),
        "object": Engine(),
    }[how]
    shadow = Shadow(model)
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(shadow.called(X), nn.BatchNorm1d(4).eval()(X))
    assert not seen


def test_a_recursive_function_around_a_module_calls_its_copy():
    layer = nn.Linear(4, 4)

    def again(x, times=2):
        return again(layer(x), times - 1) if times else x

    shadow = Shadow(again)
    assert torch.equal(shadow.called(X), again(X))
    assert {cell.cell_contents for cell in shadow.called.__closure__ if callable(cell.cell_contents)} >= {shadow.called}


def test_functions_that_lead_to_no_module_and_classes_are_shared():
    model = nn.Linear(4, 4)
    model.act, model.kind, model.calls = torch.nn.functional.relu, Net, []
    model.log = lambda text: model.calls.append(text)  # leads to the model itself
    copy = Shadow(model).called
    assert (copy.act, copy.kind) == (model.act, model.kind)
    copy.log("a")
    assert (copy.calls, model.calls) == (["a"], [])


def test_there_is_none_of_a_function_without_modules_and_of_torchscript():
    assert shadow_of(lambda x: x) is None
    assert shadow_of(torch.jit.script(nn.Linear(4, 4))) is None


class Locked(nn.Module):
    def __new__(cls, *args):
        return super().__new__(cls)

    def __setattr__(self, name, value):
        if getattr(self, "done", False):
            raise RuntimeError("frozen")
        super().__setattr__(name, value)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.done = True

    def forward(self, x):
        return self.layer(x)


def test_classes_that_refuse_to_be_made_or_written_are_passed_by():
    model = Locked()
    assert torch.equal(Shadow(model).called(X), model(X))


class Handle:
    closed = []

    def __init__(self):
        self.name = "file"

    def __del__(self):
        Handle.closed.append(self.name)


def test_what_does_something_when_it_is_deleted_is_not_copied():
    model = nn.Linear(4, 4)
    model.handle = Handle()
    shadow = Shadow(model)
    assert shadow.called.handle is model.handle
    del shadow
    assert Handle.closed == []
    assert shadow_of(type("Closes", (nn.Linear,), {"__del__": lambda self: None})(4, 4)) is None


def test_memory_that_no_buffer_lies_in_is_not_copied():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.table = torch.ones(3)
    copy = Shadow(model).called
    assert copy.table is model.table
    assert copy[0].weight is model[0].weight
    assert copy[1].running_mean.data_ptr() != model[1].running_mean.data_ptr()


# ---- captured from a shadow --------------------------------------------------------------------------------


def test_a_program_holds_the_models_own_tensors(net):
    program, apart = capture_apart(net, X)
    assert apart
    assert program.state["count"] is net.count
    assert program.weights["layer.weight"].data_ptr() == net.layer.weight.data_ptr()
    assert program.weights["norm.running_mean"].data_ptr() == net.norm.running_mean.data_ptr()
    assert (int(net.count), net.calls, net.stats.calls) == (0, 0, 0)


REGISTRY: dict[int, nn.Module] = {}


class Global(nn.Module):
    """Finds its own child past itself."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)
        REGISTRY[0] = self.child

    def forward(self, x):
        return REGISTRY[0](x) + self.child(x)


class Keyed(nn.Module):
    """Is known by its id; a copy is not."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)
        REGISTRY[id(self)] = self.child

    def forward(self, x):
        return self.child(x) * len(REGISTRY[id(self)].weight)


@pytest.mark.parametrize("kind", [Global, Keyed])
def test_a_model_that_reaches_itself_past_its_shadow_is_captured_itself(kind):
    model = kind().eval()
    program, apart = capture_apart(model, X)
    assert not apart
    with torch.no_grad():
        torch.testing.assert_close(program.module()(X)[0], model(X))


def test_objects_that_a_model_returns_are_the_models_own():
    class Settings:
        def __init__(self):
            self.names = {"a"}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.settings = nn.Linear(4, 4), Settings()

        def forward(self, x):
            return self.layer(x), self.settings

    model = Net().eval()
    program = capture(model, X)
    assert program.signature.unbind([X], (X,), {})[1] is model.settings
