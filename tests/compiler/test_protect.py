"""A block runs, or a model is captured, and everything is as it was."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

from bench.untouched import changed, state_of
from tests.compiler.helpers import Net
from tsopt.compiler.calls.example import example
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.other_threads import THREADS
from tsopt.compiler.protect import is_untouched, protected, training_flags
from tsopt.errors import CaptureError

X = torch.randn(2, 3)


@pytest.mark.parametrize("fails", [False, True])
def test_the_world_is_put_back(fails):
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    threads, filters = torch.get_num_threads(), list(warnings.filters)
    try:
        with protected(None):
            torch.rand(3), np.random.rand(3), random.random()
            torch.set_num_threads(threads + 1)
            torch.set_default_dtype(torch.float64)
            warnings.simplefilter("error")
            torch.set_grad_enabled(True)
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert random.getstate() == python_state
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    assert list(warnings.filters) == filters
    assert torch.is_grad_enabled()


def test_the_model_is_put_back():
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.known, model.items, model.unique = {"a": 1}, [1], {1}
    held = model.items
    with protected(model):
        model.new = 1
        model.known["b"] = 2
        model.items.append(2)
        model.unique = None
        model[0].running_mean.fill_(7)
        model[0].num_batches_tracked = torch.tensor(3)
        model.register_buffer("more", torch.ones(1))
        model.training = False
        del model._modules["0"]
    assert not hasattr(model, "new")
    assert (model.known, model.items, model.unique) == ({"a": 1}, [1], {1})
    assert model.items is held
    assert model[0].running_mean.tolist() == [0, 0]
    assert model[0].num_batches_tracked == 0
    assert "more" not in dict(model.named_buffers())
    assert model.training


class Slotted(nn.Module):
    """Writes to what is not in its `__dict__`."""

    __slots__ = ("calls", "gone", "log", "new")

    def __init__(self):
        super().__init__()
        self.calls, self.gone, self.log = 0, "there", [1]

    def forward(self, x):
        self.calls += 1
        self.log.append(2)
        self.new = x
        del self.gone
        return x * 2


def test_what_a_module_holds_in_slots_is_put_back():
    model = Slotted()
    with protected(model):
        model(torch.ones(2))
    assert (model.calls, model.gone, model.log) == (0, "there", [1])
    assert not hasattr(model, "new")
    assert is_untouched(model, lambda: None)
    assert not is_untouched(model, lambda: setattr(model, "calls", 5))


def test_an_untouched_buffer_is_not_written():
    """NaN included: its version counter would rise, and autograd would complain."""
    model = nn.Module()
    model.register_buffer("b", torch.tensor([1.0, float("nan"), float("inf")]))
    version = model.b._version
    with protected(model):
        pass
    assert model.b._version == version


@pytest.mark.parametrize(
    ("old", "new"), [(0.0, -0.0), (float("inf"), 3.4028234663852886e38), (1.0, float("nan")), (float("nan"), 0.0)]
)
def test_a_buffer_is_put_back_to_the_bit(old, new):
    model = nn.Module()
    model.register_buffer("b", torch.tensor([old, float("nan")]))
    with protected(model):
        model.b[0] = new
    assert repr(model.b[0].item()) == repr(old)


def test_written_parameters_are_put_back_when_named():
    weight = nn.Parameter(torch.zeros(2))
    with protected(None, written=[weight]):
        weight.add_(1)
    assert weight.tolist() == [0, 0]


def test_gradients_are_off_inside_unless_asked_for():
    with protected(None):
        assert not torch.is_grad_enabled()
    with protected(None, inference=False):
        assert torch.is_grad_enabled()


def test_training_flags_come_back_one_by_one():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    model[0].eval()
    model.train = None  # models override it with effects of their own
    try:
        with training_flags(model, False):
            assert not any(module.training for module in model.modules())
            raise ValueError
    except ValueError:
        pass
    assert [module.training for module in model.modules()] == [True, False, True, True]


def test_weights_that_a_model_converts_are_the_old_memory_again():
    model = nn.Linear(2, 2)
    weight, memory = model.weight, model.weight.data_ptr()
    with protected(model):
        model.double()
        model.bias.data = torch.zeros(3)
    assert model.weight is weight
    assert (weight.dtype, weight.data_ptr(), weight.requires_grad) == (torch.float32, memory, True)
    assert model.bias.shape == (2,)
    before = model.weight._version
    with protected(model):
        pass
    assert model.weight._version == before, "nobody has written it"


@pytest.mark.parametrize("change", [lambda data: data.t(), lambda data: data[:1]], ids=["strides", "shape"])
def test_weights_that_are_seen_otherwise_are_seen_as_before(change):
    model = nn.Linear(2, 2)
    with protected(model):
        model.weight.data = change(model.weight.data)
    assert (model.weight.shape, model.weight.stride()) == ((2, 2), (2, 1))


def test_a_lazy_module_is_left_to_whoever_refuses_it():
    with protected(nn.LazyLinear(2)):
        pass


@pytest.mark.parametrize("among_threads", [False, True])
def test_what_a_call_converts_is_put_back_beside_other_threads_too(among_threads):
    model = nn.Linear(2, 2)
    before = model.weight.data_ptr()
    with protected(model, among_threads=among_threads):
        model.to(torch.float64)
    assert (model.weight.dtype, model.weight.data_ptr()) == (torch.float32, before)


def test_a_directory_that_is_gone_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with protected(None):
        os.chdir(tmp_path)
        (tmp_path / "here").rmdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with protected(None):
        pass


# ---- by capture -------------------------------------------------------------------------------------------


class Messy(nn.Module):
    """Leaves marks everywhere that a forward can."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))
        self.fails, self.calls, self.cache, self.log = fails, 0, {"old": 1}, ["old"]
        self.nested = {"inner": ["old"]}

    def forward(self, x):
        self.calls += 1
        self.last = x
        self.cache["x"] = x
        self.log.append("called")
        self.nested["inner"].append("called")
        self.count.add_(1)
        os.environ["TSOPT_MESS"] = "1"
        os.chdir("/")
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if self.fails:
            raise ValueError("as asked")
        return self.linear(x) + torch.zeros(3)


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
def test_everything_is_left_as_it_was(fails):
    model = Messy(fails).eval()
    before = state_of(model, example(X))
    if fails:
        with pytest.raises(CaptureError, match="as asked"):
            capture(model, X)
    else:
        capture(model, X)
    assert not changed(before, state_of(model, example(X)))


@pytest.mark.usefixtures("another_thread")
def test_what_another_thread_sets_of_the_process_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("TSOPT_MESS", "1")
    monkeypatch.chdir("/")
    with protected(None):
        os.environ["TSOPT_MESS"] = "2"
        os.chdir(tmp_path)
    assert (os.environ["TSOPT_MESS"], os.getcwd()) == ("2", str(tmp_path))


def test_threads_of_our_own_are_no_reason_to_leave_it(monkeypatch, tmp_path):
    found = [threading.current_thread(), threading.Thread(name=f"{THREADS}output")]
    monkeypatch.setattr(threading, "enumerate", lambda: found)
    monkeypatch.setenv("TSOPT_MESS", "1")
    monkeypatch.chdir(tmp_path)
    with protected(None):
        os.environ["TSOPT_MESS"] = "2"
        os.chdir("/")
    assert (os.environ["TSOPT_MESS"], os.getcwd()) == ("1", str(tmp_path))


@pytest.mark.usefixtures("another_thread")
@pytest.mark.parametrize("before", [None, "here"])
def test_where_inductor_keeps_its_files_is_put_back_all_the_same(monkeypatch, tmp_path, before):
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "here")
    if before is None:
        monkeypatch.delenv(name)
    with protected(None):
        assert os.environ.get(name) == before
        cache_dir()
        assert os.environ[name].startswith(str(tmp_path))
    assert os.environ.get(name) == before
    with protected(None):
        os.environ[name] = "theirs"
    assert os.environ[name] == "theirs"


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
def test_containers_inside_containers_are_left_as_they_were(fails):
    model = Messy(fails).eval()
    try:
        capture(model, X)
    except CaptureError:
        assert fails
    assert model.nested == {"inner": ["old"]}


def test_parameters_that_a_failing_model_writes_are_left_as_they_were():
    """The model is run once more, for real, to tell its own error from torch.export's."""

    def model(self, x):
        with torch.no_grad():
            self.w.add_(1)
        raise ValueError("after the write")

    net = Net(model, w=nn.Parameter(torch.zeros(3)))
    with pytest.raises(CaptureError, match="after the write"):
        capture(net, X)
    assert torch.equal(net.w, torch.zeros(3))


def test_gradients_and_grad_mode_are_left_as_they_were():
    model = nn.Linear(3, 2).eval()
    model.weight.grad = torch.ones(2, 3)
    with torch.no_grad():
        capture(model, X)
        assert not torch.is_grad_enabled()
    assert torch.equal(model.weight.grad, torch.ones(2, 3))


class Watched(dict):
    """A module's attributes, which note who is written."""

    def __init__(self, held):
        super().__init__(held)
        self.written = []

    def __setitem__(self, name, value):
        self.written.append(name)
        super().__setitem__(name, value)

    def update(self, *args, **kwargs):
        self.written.append("all")
        super().update(*args, **kwargs)


def test_what_is_as_it_was_is_not_written_for_another_thread_may_be_writing_it():
    model = nn.Linear(2, 2)
    model.known, model.kept = {"a": [1]}, [1]
    model.__dict__ = watched = Watched(model.__dict__)
    with protected(model):
        model.__dict__["training"] = False
        watched.written.clear()
    assert watched.written == ["training"]
    assert model.training


def test_a_container_that_is_as_it_was_is_not_refilled():
    model = nn.Linear(2, 2)
    model.known, model.names, model.unique = {"a": 1}, ["a"], {1}
    with protected(model):
        iterators = iter(model.known), iter(model.unique)
    assert [next(item) for item in iterators] == ["a", 1], "a refilled container would raise: it has changed"


@pytest.mark.parametrize(
    ("change", "untouched"),
    [
        (lambda model: None, True),
        (lambda model: model.b.add_(1), False),
        (lambda model: setattr(model, "calls", 1), False),
        (lambda model: model.names.append(1), False),
        (lambda model: model.known.update(a=2), False),
        (lambda model: model.unique.add(2), False),
        (lambda model: delattr(model, "names"), False),
    ],
)
def test_a_call_that_changes_a_model_is_told_from_one_that_does_not(change, untouched):
    model = nn.Linear(2, 2)
    model.register_buffer("b", torch.ones(1))
    model.known, model.names, model.unique = {"a": 1}, ["a"], {1}
    assert is_untouched(model, lambda: change(model)) is untouched


def test_among_threads_what_they_load_stays_and_all_else_goes_back():
    model = nn.BatchNorm1d(2).eval()
    variance = model.running_var
    with protected(model, written=[variance], among_threads=True):
        model.running_mean.fill_(3.0)
        variance.fill_(5.0)
        model.running_var, model.calls = torch.zeros(2), 1
        torch.set_default_dtype(torch.float64)
    assert (float(model.running_mean[0]), float(variance[0])) == (3.0, 1.0)
    assert model.running_var is variance
    assert not hasattr(model, "calls")
    assert torch.get_default_dtype() == torch.float32
