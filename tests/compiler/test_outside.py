"""What a model's code reaches outside of the model is as it was after calls that nobody has asked for."""

from __future__ import annotations

import collections
import copy
import random
import subprocess
import sys
import threading
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.outside import Outside, kept_outside
from tsopt.compiler.protect import protected

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
QUICK = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("torchscript",)}
SEEN, TABLES, NAMED = [torch.ones(3)], {"seen": []}, collections.defaultdict(list)
LAST = None
MODULES = sys.modules
QUEUE = collections.deque(maxlen=3)
LATEST = collections.OrderedDict(first=torch.ones(1), second=torch.zeros(1))


class Recorder:
    count = 0

    def __init__(self) -> None:
        self.seen, self.last, self.calls = [], None, 0

    def see(self, y):
        self.seen.append(y)
        self.last, self.calls = y, self.calls + 1
        Recorder.count += 1


RECORDER = Recorder()


def in_a_list(x):
    SEEN.append(x + 1)
    return x.relu()


def in_a_dict(x):
    TABLES["seen"].append(x + 1)
    return x.relu()


def in_a_defaultdict(x):
    NAMED["seen"].append(x + 1)
    return x.relu()


def in_a_queue(x):
    QUEUE.append(x + 1)
    return x.relu()


def in_an_ordered_dict(x):
    LATEST["third"] = x + 1
    LATEST.move_to_end("first")
    return x.relu()


def in_an_object(x):
    RECORDER.see(x + 1)
    return x.relu()


def in_a_global(x):
    global LAST
    LAST = x + 1
    return x.relu()


def state():
    held = [*SEEN, *TABLES["seen"], *NAMED.values(), *QUEUE, *LATEST.values(), *RECORDER.seen]
    return [*map(id, held)], id(RECORDER.last), RECORDER.calls, Recorder.count, id(LAST), [*TABLES], [*LATEST]


WAYS = [in_a_list, in_a_dict, in_a_defaultdict, in_a_queue, in_an_ordered_dict, in_an_object, in_a_global]


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("function", WAYS)
def test_optimize_leaves_what_a_call_keeps_outside_as_it_was(always_faster, function):
    before = state()
    fast = tsopt.optimize(function, X, **QUICK)
    assert state() == before
    torch.testing.assert_close(fast(X), X.relu())
    with kept_outside(function):
        function(X)
        assert state() != before


def by_its_name(x):
    return x + 1 if "no such module" in sys.modules else x.relu()


def by_another_name(x):
    return x + 1 if "no such module" in MODULES else x.relu()


class InAnAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.modules_of_python = sys.modules

    def forward(self, x):
        return by_another_name(x) if self.modules_of_python else x


class Lazy(ModuleType):
    """Imports what it holds on demand, as packages do whose modules take long."""


LAZY = Lazy("lazy")


def from_a_lazy_module(x):
    return x.relu() * LAZY.factor


@pytest.mark.parametrize("model", [by_its_name, by_another_name, InAnAttribute().eval()])
def test_modules_that_are_imported_meanwhile_stay(model, monkeypatch):
    """What tsopt imports itself is most of torch."""
    with monkeypatch.context() as patch, kept_outside(model), protected(model):
        patch.setitem(sys.modules, "imported_meanwhile", Lazy("imported_meanwhile"))
    assert "imported_meanwhile" not in sys.modules
    with kept_outside(model), protected(model):
        sys.modules["imported_meanwhile"] = Lazy("imported_meanwhile")
    assert sys.modules.pop("imported_meanwhile")


def test_so_does_what_a_module_imports_on_demand(monkeypatch):
    monkeypatch.setattr(LAZY, "factor", 2.0, raising=False)
    with kept_outside(from_a_lazy_module):
        monkeypatch.setattr(LAZY, "other", 3.0, raising=False)
    assert LAZY.other == 3.0


def test_a_first_optimize_leaves_torch_as_it_is_in_a_process_that_compiles_by_itself_afterwards(tmp_path):
    """In a process of its own: in this one, all that tsopt imports has been imported."""
    script = tmp_path / "first.py"
    script.write_text(FIRST)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("right\n", 0), done.stderr


FIRST = """
import sys, torch, tsopt

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x + 1 if "jax" in sys.modules else x).relu()

net, x = Net().eval(), torch.randn(2, 8)
fast = tsopt.optimize(net, x, seconds=0.05, isolate=False, cache=False, backends=("torchscript",))
compiled = torch.compile(net, backend="eager")
torch.testing.assert_close(compiled(x), fast(x))
torch.export.export(net, (x,))
print("right")
"""


@pytest.mark.filterwarnings("ignore:tsopt")
def test_hooks_collect_what_they_did(always_faster):
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), {"0": [], "1": []}
    for name, child in model.named_children():
        child.register_forward_hook(lambda module, args, output, name=name: seen[name].append(output))
    tsopt.optimize(model, X, **QUICK)
    assert seen == {"0": [], "1": []}
    with torch.no_grad():
        net = tsopt.hybridize(model, **QUICK)
        for _ in range(3):
            found = net(X)
        torch.testing.assert_close(found, model(X))
    assert [len(found) for found in seen.values()] == [4, 4]


class Watched(nn.Module):
    """Puts hooks on its layers when it is called first, as libraries do that collect outputs of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.seen, self.is_watched = [], False

    def forward(self, x):
        if not self.is_watched:
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.is_watched = True
        self.seen.clear()
        return self.layers(x) + self.seen[0]


@pytest.mark.usefixtures("single_threaded")
def test_hooks_of_the_first_call_come_and_go():
    model = Watched().eval()
    expected = copy.deepcopy(model)(X)
    program = tsopt.capture(model, X)
    assert [list(layer._forward_hooks.items()) for layer in model.layers] == [[], []]
    torch.testing.assert_close(program.module()(X)[0], expected)
    torch.testing.assert_close(model(X), expected)


class Draws(nn.Module):
    """Has generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.python = torch.Generator().manual_seed(0), random.Random(0)
        self.numpy, self.old = np.random.default_rng(0), np.random.RandomState(0)

    def forward(self, x):
        return x * torch.rand(1, generator=self.torch) + self.python.random() + self.numpy.random() + self.old.rand()


@pytest.mark.sliced(1)
@pytest.mark.filterwarnings("ignore:tsopt")
@pytest.mark.parametrize("how", ["optimize", "hybridize"])
def test_generators_of_the_model_draw_what_they_would_have_drawn(how):
    expected = Draws()(X)
    model = Draws().eval()
    made = tsopt.optimize(model, X, **QUICK) if how == "optimize" else tsopt.hybridize(model, **QUICK)
    found = made(X)
    torch.testing.assert_close(found, expected)


def test_among_threads_only_what_has_brought_tensors_is_taken_back(another_thread):
    seen, counts = [1], {"calls": 0}

    def function(x):
        seen.append(x)
        counts["calls"] += 1
        return x

    with kept_outside(function):
        function(X)
        seen.append(2)
    assert (seen, counts) == ([1, 2], {"calls": 1})


@pytest.mark.usefixtures("single_threaded")
def test_what_is_as_it_was_is_not_touched():
    found, before = Outside(in_a_list), [*SEEN]
    assert not found.put_back()
    SEEN.append(3)
    assert found.put_back()
    assert len(SEEN) == len(before)


class Cache(dict):
    """A class of its own, which refuses what its users must not do."""

    def __setitem__(self, key, value):
        raise TypeError("use put")

    def put(self, key, value):
        super().__setitem__(key, value)


class Base:
    count = 0


class Derived(Base):
    pass


CACHE, COUNTER = Cache(), collections.Counter()


def in_many_ways(x):
    CACHE.put(len(CACHE), 1)
    COUNTER["calls"] += 1
    Derived.count += 1
    return x.relu()


@pytest.mark.usefixtures("single_threaded")
def test_subclasses_and_attributes_of_base_classes_go_back():
    with kept_outside(in_many_ways):
        in_many_ways(X)
        in_many_ways(X)
    assert (dict(CACHE), dict(COUNTER), "count" in vars(Derived), Derived.count) == ({}, {}, False, 0)


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("function", WAYS)
def test_capture_leaves_it_too(function):
    before = state()
    tsopt.capture(function, X)
    assert state() == before


def test_locks_are_left_as_they_are():
    held = threading.Condition()

    def function(x):
        with held:
            return x

    waiting = threading.Thread(target=lambda: held.acquire() and held.wait(5) and held.release())
    with kept_outside(function):
        waiting.start()
        while not held._waiters:
            waiting.join(0.01)
    with held:
        held.notify_all()
    waiting.join(5)
    assert not waiting.is_alive()


def test_long_chains_come_to_an_end():
    class Link:
        def __init__(self, next):
            self.next = next

    chain = None
    for _ in range(3000):
        chain = Link(chain)
    with kept_outside(lambda x: x + chain.next):
        pass
