"""`hybridize`: settings of the process and of threads, which may differ between calls."""

from __future__ import annotations

import contextlib
import threading
import warnings
from functools import partial
from queue import SimpleQueue

import pytest
import torch
from torch import nn

import tsopt
from tests.forks import FORKS, in_a_fork
from tests.hybrid.models import QUICK, Net, X, close, eager
from tsopt import hybrid_choice, hybrid_state
from tsopt.hybrid import compiled_of
from tsopt.runtime.calling.audit import difference
from tsopt.runtime.calling.eager_calls import EagerCalls


def test_another_default_dtype_is_eagers(always_faster):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        net(X)
        torch.set_default_dtype(torch.float64)
        try:
            with pytest.warns(UserWarning, match="the default dtype has changed"):
                close(net(X), eager(net))
        finally:
            torch.set_default_dtype(torch.float32)


def test_modes_are_looked_at_where_the_model_asks_for_them(always_faster):
    class Asks(Net):
        def forward(self, x):
            found = super().forward(x)
            return found * 3 if torch.is_inference_mode_enabled() or torch.is_grad_enabled() else found

    net = tsopt.hybridize(Asks().eval().requires_grad_(False), **QUICK)
    with torch.no_grad():
        wanted = net(X)
    with torch.inference_mode(), pytest.warns(UserWarning, match="queries the grad mode"):
        close(net(X), wanted * 3)
    close(net(X), wanted * 3)
    with torch.no_grad():
        close(net(X), wanted)


def test_another_number_of_threads_is_compiled_for(always_faster, calls, torch_threads):
    torch_threads(1)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        wanted = net(X)
        torch_threads(2)
        close(net(X), wanted)
        assert len(calls) == 2
        torch_threads(1)
        close(net(X), wanted)
        assert len(calls) == 3


@pytest.mark.filterwarnings("ignore:tsopt. Net runs in eager mode:UserWarning")
def test_a_number_of_threads_that_always_changes_leaves_one_compiled(always_faster, calls, torch_threads):
    torch_threads(1)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        for turn in range(2 * hybrid_state.CHANGES):
            torch_threads(1 + turn % 2)
            net(X)
        before = tsopt.report(net)
        torch_threads(1 + hybrid_state.CHANGES % 2)
        net(X)
    assert len(calls) == hybrid_state.CHANGES + 1
    assert tsopt.report(net).in_eager == before.in_eager, "it is compiled for this number"
    assert list(before.in_eager) == ["torch's number of threads has changed since it was compiled"]


def test_differences_that_audits_find_again_and_again_are_the_reason_for_eager(always_faster, calls, monkeypatch):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    monkeypatch.setattr(hybrid_state, "executable_difference", lambda *_: "output: none")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(100 * (hybrid_state.CHANGES + 2)):
            net(X)
    assert len(calls) == hybrid_state.CHANGES + 1
    assert list(tsopt.report(net).in_eager) == [hybrid_state.DIFFERED]


def doubled(default_dtype):
    default_dtype(torch.float64)
    return contextlib.nullcontext()


def without_a_device(default_dtype):
    return contextlib.nullcontext()


def on_a_device(default_dtype):
    return torch.device("cpu")


@pytest.mark.parametrize("made", [contextlib.nullcontext, lambda: torch.device("meta")])
@pytest.mark.parametrize("settings", [doubled, without_a_device, on_a_device])
def test_settings_that_change_before_the_first_call_are_those_it_is_compiled_for(
    always_faster, default_dtype, made, settings
):
    model = Net().eval()
    with made():
        net = tsopt.hybridize(model, **QUICK)
    with torch.no_grad(), settings(default_dtype):
        for _ in range(3):
            close(net(X), eager(net))
    assert (tsopt.report(net).in_eager, compiled_of(net).fast.executable is None) == ({}, False)


def test_a_hybrid_that_another_thread_calls_first_is_compiled_for_its_number_of_threads(
    always_faster, torch_threads, in_a_thread
):
    torch_threads(1)
    net = tsopt.hybridize(Net().eval(), **QUICK)

    def elsewhere():
        torch.set_num_threads(2)
        with torch.no_grad():
            for _ in range(3):
                net(X)

    in_a_thread(elsewhere)
    assert (tsopt.report(net).calls, tsopt.report(net).in_eager) == (3, {})


def test_a_thread_that_waits_for_a_form_of_other_settings_is_not_served_by_it(always_faster, monkeypatch):
    """It asks what serves its call before another one compiles the model under a default device of its own."""

    class Makes(nn.Module):
        def forward(self, x):
            return x.shape[0] + torch.arange(3)

    net, real = tsopt.hybridize(Makes().eval(), **QUICK), EagerCalls.reason
    behind = compiled_of(net)

    def compiled_meanwhile(*args, **options):
        monkeypatch.setattr(behind, "_reason", partial(real, behind._own))
        found = real(behind._own, *args, **options)
        thread = threading.Thread(target=lambda: net(X))
        thread.start()
        thread.join()
        return found

    monkeypatch.setattr(behind, "_reason", compiled_meanwhile)
    with torch.device("meta"), pytest.warns(UserWarning, match="the default device has changed"):
        assert net(X).device.type == "meta"
    assert behind.fast is not None


@pytest.mark.filterwarnings("ignore:tsopt. Net runs in eager mode:UserWarning")
def test_a_model_that_is_refused_in_one_dtype_is_tried_in_another(always_faster, monkeypatch, default_dtype):
    real = hybrid_state.optimize

    def optimize(*args, **options):
        if torch.get_default_dtype() == torch.float64:
            raise tsopt.CaptureError("no matter")
        return real(*args, **options)

    monkeypatch.setattr(hybrid_state, "optimize", optimize)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        default_dtype(torch.float64)
        for _ in range(3):
            net(X)
        default_dtype(torch.float32)
        close(net(X), eager(net))
    assert tsopt.report(net).in_eager == {"no matter": 3}


def test_another_number_of_threads_in_another_thread_is_eagers(always_faster, calls, torch_threads):
    torch_threads(1)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        wanted = net(X)
    found = []

    def elsewhere():
        torch.set_num_threads(2)
        with torch.no_grad(), pytest.warns(UserWarning, match="number of threads has changed"):
            found.append(net(X))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    close(found[0], wanted)
    assert len(calls) == 1


@FORKS
def test_a_fork_with_one_thread_is_eagers(always_faster, calls, torch_threads):
    """As the workers of a DataLoader are."""
    torch_threads(2)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        wanted = net(X)

    def served_by_eager():
        torch.set_num_threads(1)
        with torch.no_grad(), pytest.warns(UserWarning, match="number of threads has changed"):
            close(net(X), wanted)
        return len(calls) == 1 and sum(tsopt.report(net).in_eager.values()) == 1

    assert in_a_fork(served_by_eager)


def test_a_given_number_of_threads_stays(always_faster, calls, torch_threads):
    torch_threads(1)
    net = tsopt.hybridize(Net().eval(), threads=1, **QUICK)
    with torch.no_grad():
        net(X)
        torch_threads(2)
        net(X)
    assert len(calls) == 1


def test_a_mode_that_overrides_functions_is_eagers(always_faster):
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **kwargs or {})
            return found * 2 if func is nn.functional.linear else found

    net = tsopt.hybridize(nn.Linear(8, 3).eval(), **QUICK)
    with torch.no_grad():
        wanted = net(X)
        with Twice(), pytest.warns(UserWarning, match="Twice intercepts the functions of the call"):
            close(net(X), wanted * 2)
        close(net(X), wanted)


def test_another_default_device_is_eagers(always_faster):
    class Makes(nn.Module):
        def forward(self, x):
            return x.shape[0] + torch.arange(3)

    net = tsopt.hybridize(Makes().eval(), **QUICK)
    with torch.no_grad():
        assert net(X).device.type == "cpu"
        with torch.device("meta"), pytest.warns(UserWarning, match="the default device has changed"):
            assert net(X).device.type == "meta"


@pytest.mark.usefixtures("another_thread")
def test_what_another_thread_loads_during_an_audit_stays(always_faster, in_a_thread):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        net(X)
    loaded = {"shift": torch.full((3,), 7.0)}

    def load_in_the_middle(x):
        in_a_thread(lambda: net.load_state_dict(loaded, strict=False))
        net.layers[2].training = False
        return nn.Module.__call__(model, x)

    model = tsopt.hybridize(net, active=False)
    with torch.no_grad():
        difference(load_in_the_middle, model, tsopt.example(X))
        close(net.shift, loaded["shift"])


@pytest.fixture
def normed():
    """A model with statistics, and others to load into it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    return model, {name: value + 2 for name, value in model.state_dict().items()}


def test_what_another_thread_loads_while_calls_are_compared_stays(always_faster, monkeypatch, in_a_thread, normed):
    model, loaded = normed
    net = tsopt.hybridize(model, **QUICK)
    monkeypatch.setattr(hybrid_choice, "loss", lambda *_: in_a_thread(lambda: net.load_state_dict(loaded)) or "")
    with torch.no_grad():
        net(X)
        close(net[1].running_mean, loaded["1.running_mean"])
        close(net(X), eager(net))


def load(model, values):
    model.load_state_dict(values)


def assign(model, values):
    model.load_state_dict(values, assign=True)


@pytest.mark.parametrize("change", [load, assign])
@pytest.mark.parametrize("after", ["optimize", "call_effects"])
def test_what_another_thread_loads_while_it_is_compiled_is_used(
    always_faster, monkeypatch, in_a_thread, normed, change, after
):
    model, loaded = normed
    net, real = tsopt.hybridize(model, **QUICK), getattr(hybrid_state, after)

    def and_then(*args, **options):
        made = real(*args, **options)
        in_a_thread(lambda: change(net, loaded))
        monkeypatch.setattr(hybrid_state, after, real)
        return made

    monkeypatch.setattr(hybrid_state, after, and_then)
    with torch.no_grad():
        for _ in range(2):
            close(net(X), eager(net))


def test_the_model_itself_is_called_only_to_compare_its_copies_with_it(always_faster):
    called = SimpleQueue()  # a list would be an effect

    class Told(nn.Module):
        def forward(self, x):
            called.put(self)
            return x.relu() + 1

    model = Told().eval()
    with torch.no_grad():
        tsopt.hybridize(model, **QUICK, audit=0)(X)
    assert sum(called.get() is model for _ in range(called.qsize())) == 2


def deterministic():
    return torch.are_deterministic_algorithms_enabled()


def flash_attention():
    return torch.backends.cuda.flash_sdp_enabled()


def medium_precision():
    return torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize(
    ("query", "change", "back"),
    [
        (
            deterministic,
            partial(torch.use_deterministic_algorithms, True),
            partial(torch.use_deterministic_algorithms, False),
        ),
        (
            flash_attention,
            partial(torch.backends.cuda.enable_flash_sdp, False),
            partial(torch.backends.cuda.enable_flash_sdp, True),
        ),
        (
            medium_precision,
            partial(torch.set_float32_matmul_precision, "medium"),
            partial(torch.set_float32_matmul_precision, "highest"),
        ),
    ],
    ids=["deterministic", "attention", "precision"],
)
def test_a_setting_of_torch_that_code_queries_is_looked_at(query, change, back, always_faster):
    class Asks(Net):
        def forward(self, x):
            found = super().forward(x)
            return found * 3 if query() else found

    net = tsopt.hybridize(Asks().eval(), **QUICK)
    with torch.no_grad():
        wanted = net(X)
        change()
        try:
            with pytest.warns(UserWarning, match="queries a setting of torch"):
                found = net(X)
            close(found, eager(net))
            assert not torch.equal(found, wanted)
        finally:
            back()
        close(net(X), wanted)
    assert sum(tsopt.report(net).in_eager.values()) == 1
