"""`hybridize(background=True)`: eager serves until what another process has made is ready."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import tsopt
from tests.background.helpers import QUICK, Net, X, reports
from tsopt.background import in_background
from tsopt.hybrid import compiled_of
from tsopt.runtime.calling.model_changes import Watch


class Decides(Net):
    def forward(self, x):
        return self.layers(x) if float(x.sum()) > 0 else x


def test_eager_serves_until_it_is_ready_and_then_what_was_made(monkeypatch):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    wanted = Net().eval().layers(X)
    assert torch.equal(net(X), wanted)
    assert reports(net) == []
    assert tsopt.wait(net, 0.0) is False
    assert tsopt.wait(net) is True
    assert reports(net)[0].winner == "TorchScript", reports(net)[0]
    assert torch.equal(net(X[:1]), Net().eval().layers(X[:1])), "another form is eager's until it is ready as well"
    assert tsopt.wait(net) is True
    monkeypatch.setattr(nn.functional, "gelu", None)
    for rows in (4, 1):
        torch.testing.assert_close(net(X[:rows]), wanted[:rows])
    assert net.x == 4, "the buffers that a call writes are those of the model"


@pytest.mark.sliced(1)
def test_a_model_of_the_working_directory_is_found_and_nothing_there_stands_in_for_a_library(monkeypatch, tmp_path):
    """As in a console."""
    (tmp_path / "model_of_a_console.py").write_text("from tests.background.helpers import Net\nclass Mine(Net): pass\n")
    (tmp_path / "queue.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    net = tsopt.hybridize(importlib.import_module("model_of_a_console").Mine().eval(), **QUICK)
    net(X)
    assert tsopt.wait(net)
    assert [report.winner for report in reports(net)] == ["TorchScript"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_where_eager_wins_a_counter_does_not_begin_it_again(monkeypatch, tmp_path):
    slower = "from tsopt.runtime.racing import race\nfrom tsopt.runtime.racing.speedup import Speedup\n"
    (tmp_path / "sitecustomize.py").write_text(f"{slower}race.speedup = lambda *_: Speedup(0.5, 0.4, 0.6)\n")
    monkeypatch.syspath_prepend(tmp_path)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    net(X)
    tsopt.wait(net)
    net(X)
    assert [report.winner_key for report in reports(net)] == ["model"], "it is known that eager wins"
    assert net.x == 3


@pytest.mark.slow
def test_weights_that_change_meanwhile_or_later_are_used():
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    net.layers[0].linear.weight.mul_(2)
    tsopt.wait(net)
    assert reports(net) == [], "it was made of other weights"
    torch.testing.assert_close(net(X), net.layers(X))
    tsopt.wait(net)
    assert len(reports(net)) == 1
    torch.testing.assert_close(net(X), net.layers(X))
    net.layers[0].linear.weight.mul_(2)
    torch.testing.assert_close(net(X), net.layers(X))
    assert reports(net) == []


def refused(net, words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = net(X)
        tsopt.wait(net)
        assert torch.equal(net(X), found)
    said = [str(item.message) for item in caught if "tsopt" in str(item.message)]
    assert len(said) == 1
    assert words in said[0]


def test_what_cannot_be_sent_runs_eager_and_says_why():
    model = Net().eval()
    model.lock = threading.Lock()
    refused(tsopt.hybridize(model, **QUICK), "the model cannot be sent to another process; TypeError: cannot pickle")


@pytest.mark.slow
def test_what_is_no_single_graph_runs_eager_and_says_why():
    refused(tsopt.hybridize(Decides().eval(), **QUICK), "the model has data-dependent control flow")


@pytest.mark.slow
def test_parts_run_eager_and_it_says_why():
    net = tsopt.hybridize(Decides().eval(), **QUICK, frontend="parts")
    refused(net, "only a model captured as one graph can be compiled in the background; partitioned")


def test_a_process_that_is_killed_is_told():
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(X)
        process = compiled_of(net).fast._job.job._process
        os.kill(process.pid, signal.SIGKILL)
        tsopt.wait(net)
        net(X)
    assert "the background process ended without a result; exit status -9" in str(caught[-1].message)


def test_a_wrong_option_is_an_error():
    net = tsopt.hybridize(Net().eval(), **QUICK | {"backends": ("nonsense",)})
    net(X)
    for _ in range(2):
        with pytest.raises(tsopt.UsageError, match="unknown backend 'nonsense'"):
            tsopt.wait(net)
    with pytest.raises(tsopt.UsageError, match="nonsense"):
        net(X)


def test_nothing_is_left_behind():
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    job = compiled_of(net).fast._job.job
    process, directory = job._process, job.directory
    assert directory.exists()
    compiled_of(net).fast = compiled_of(net)._watch = None
    del job, net
    assert process.poll() is not None
    assert not directory.exists()


def test_forms_are_limited(monkeypatch):
    monkeypatch.setattr(in_background, "MAX_CAPTURES", 0)
    refused(tsopt.hybridize(Net().eval(), **QUICK), "0 signatures were compiled")


def test_wait_is_for_hybrids():
    with pytest.raises(tsopt.UsageError, match="is not a hybrid"):
        tsopt.wait(nn.Linear(2, 2))
    assert tsopt.wait(tsopt.hybridize(nn.Linear(2, 2))) is True


SCRIPT = """
import sys, time, torch, tsopt
from torch import nn

class Mine(nn.Module):
    def forward(self, x):
        return x.exp() + offset

offset = 3
net = tsopt.hybridize(Mine().eval(), background=True, seconds=0.05, isolate=False, cache=False, backends=("eager",))
with torch.no_grad():
    net(torch.ones(2))
    if sys.argv[1] == "wait":
        tsopt.wait(net)
        print(net(torch.ones(2)).tolist()[0] > 5, len(net._tsopt_compiled.fast.reports))
    else:
        print(net._tsopt_compiled.fast._job.job._process.pid, flush=True)
        time.sleep(60)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return [sys.executable, str(path)]


@pytest.mark.slow
def test_a_class_of_the_script_itself_without_a_main_guard(script):
    done = subprocess.run([*script, "wait"], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "1"], done.stderr


@pytest.mark.sliced(1)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_the_process_ends_with_its_caller(script, end):
    with subprocess.Popen([*script, "stay"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as caller:
        pid = int(caller.stdout.readline())
        caller.send_signal(end)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("it is still there")


def test_what_is_another_model_there_is_not_taken(monkeypatch):
    monkeypatch.setattr(torch, "ambient", 1.01, raising=False)  # a global of a module, set at run time
    net = tsopt.hybridize(Ambient().eval(), **QUICK)
    refused(net, "the model computes different values in the background process")


class Ambient(Net):
    def forward(self, x):
        return self.layers(x) * getattr(torch, "ambient", 1.0)


class Answer(Enum):
    YES = 1


class Pair(NamedTuple):
    a: object
    b: object


class Chooses(Net):
    def forward(self, x, answer):
        y = super().forward(x)
        return Pair(y, {"answer": answer, "ordered": OrderedDict(a=y + 1)}) if answer is Answer.YES else y


@pytest.mark.slow
def test_calls_take_and_return_what_no_file_holds():
    net = tsopt.hybridize(Chooses().eval(), **QUICK)
    net(X, Answer.YES)
    tsopt.wait(net)
    assert len(reports(net)) == 1
    found = net(X, Answer.YES)
    assert type(found) is Pair
    assert found.b["answer"] is Answer.YES
    assert type(found.b["ordered"]) is OrderedDict


@pytest.mark.slow
def test_weights_that_are_put_in_the_place_of_others_are_used(monkeypatch):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    tsopt.wait(net)
    assert not compiled_of(net).fast.changed()
    changes = [
        lambda: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}, assign=True),
        lambda: setattr(net.layers[1], "linear", nn.Linear(16, 16)),
        lambda: net.layers.__setitem__(0, nn.Identity()),
    ]
    for change in changes:
        watch = Watch(net)
        assert not watch.changed()
        change()
        assert watch.changed()
    torch.testing.assert_close(net(X), net.layers(X))


def test_autocast_is_eager():
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="autocast is enabled"):
        assert net(X).dtype == Net()(X).dtype
    assert compiled_of(net).fast is None


def test_an_argument_that_contains_itself_is_eager():
    cycle: list[object] = []
    cycle.append(cycle)
    net = tsopt.hybridize(lambda x, y: x * 2, **QUICK)
    assert torch.equal(net(X, cycle), X * 2)


def test_what_changes_of_the_model_is_seen_in_the_background_as_well():
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    tsopt.wait(net)
    assert reports(net)[0].winner == "TorchScript"
    net.layers[3].linear.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(net(X), net.layers(X))
    assert reports(net) == [], "it is made again"


class Counts(Net):
    """Counts its calls in Python too."""

    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.slow
def test_what_calls_of_the_model_count_in_python_is_no_change():
    net = tsopt.hybridize(Counts().eval(), **QUICK)
    for _ in range(3):
        net(X)
    with pytest.warns(UserWarning, match="compiled calls do not change its attribute 'calls'"):
        tsopt.wait(net)
    assert len(reports(net)) == 1


@pytest.mark.slow
def test_an_audit_finds_what_nobody_sees_in_the_background():
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    tsopt.wait(net)
    for module in net.layers:
        module.linear.weight.detach().numpy()[:] *= -3
    compiled_of(net)._audits.left = 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.testing.assert_close(net(X), net.layers(X))
    assert "an audit found a difference (output: " in str(said[0].message)


def test_calls_with_an_iterator_are_those_of_the_model_and_are_not_sent():
    def function(x, scales):
        return x * sum(scales)

    fast = tsopt.hybridize(function, **QUICK)
    with torch.no_grad():
        assert torch.equal(fast(X, iter([1.0, 2.0])), X * 3)
    assert tsopt.wait(fast, 0.0) is True, "nothing is compiled"


def test_calibration_data_that_cannot_be_read_is_an_error_at_once():
    def data():
        yield X
        raise ValueError("a bad row")

    with pytest.raises(tsopt.UsageError, match="calibration raises ValueError after 1 item") as caught:
        tsopt.hybridize(Net().eval(), **QUICK, precision="int8", calibration=data())
    assert "a bad row" in caught.value.why


class Returns(Net):
    def forward(self, x):
        return self.layers(x), self.layers[0].linear.weight, self.layers[1].linear.bias[2:]


def test_the_weights_that_it_returns_are_the_models():
    net = tsopt.hybridize(Returns().eval(), **QUICK)
    net(X)
    assert tsopt.wait(net)
    assert reports(net)[0].winner == "TorchScript", reports(net)[0]
    with torch.no_grad():
        _, weight, bias = net(X)
    assert weight is net.layers[0].linear.weight
    assert bias.data_ptr() == net.layers[1].linear.bias[2:].data_ptr()
