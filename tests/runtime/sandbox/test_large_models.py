"""Of large models, and where memory is short, few candidates are alive at once, and the fastest get to the rounds."""

from __future__ import annotations

import pytest

from tests.runtime.sandbox.helpers import FAULTY
from tsopt.errors import BackendError
from tsopt.runtime.racing import contenders, preparation
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.contenders import Maker
from tsopt.runtime.sandbox.isolated import Isolated

pytestmark = pytest.mark.usefixtures("as_shipped", "no_winner")
ONE_OF_TWO = "of a model of this size, only 2 candidates are timed"


@pytest.fixture
def paces(monkeypatch):
    """Sets how many seconds a call takes: the first ones, and those that are compared side by side."""

    def set_paces(first, later=None):
        later = first if later is None else later
        monkeypatch.setattr(preparation, "HOPELESS_IF_LONG", 9.0)
        monkeypatch.setattr(preparation, "HOPELESS", 9.0)
        monkeypatch.setattr(preparation, "first_calls", lambda made, *_: [first[made.candidate.key]])
        monkeypatch.setattr(preparation, "once_warm", lambda spent, *_: min(spent))
        monkeypatch.setattr(preparation, "seconds_of", lambda made, *_: later[made.candidate.key])
        monkeypatch.setattr(race_module, "seconds_of", lambda *_: 1.0)

    return set_paces


@pytest.fixture
def large(monkeypatch):
    """All models are large."""
    monkeypatch.setattr(contenders, "MANY", 0)


def statuses(rows):
    return [row.status for row in list(rows.values())[1:]]


def test_where_memory_is_short_only_the_fastest_are_kept(try_all, paces):
    took = {FAULTY + "Right": 3.0, FAULTY + "Noisy": 2.0, "eager": 1.0}
    paces(took)
    rows, _ = try_all(*took, memory=1)
    assert statuses(rows) == ["not timed", "ok", "ok"]
    assert rows["Right"].reason == "about 3.0 times slower than the best; memory is short"
    rows, _ = try_all(*took, memory=1 << 40)
    assert {row.status for row in rows.values()} == {"ok"}


@pytest.mark.parametrize(("memory", "kept"), [(499, 4), (399, 3), (1, 2)])
def test_as_many_are_kept_as_there_is_room_for(try_all, paces, monkeypatch, memory, kept):
    took = {"eager": 1.0, "torchscript": 1.5, FAULTY + "Noisy": 2.0, "onnxruntime": 2.5, FAULTY + "Right": 3.0}
    paces(took)
    monkeypatch.setattr(contenders, "COPIES", 1.0)
    monkeypatch.setattr(Maker, "_weight_bytes", lambda self, variant: 100)
    rows, _ = try_all(*took, memory=memory)
    assert statuses(rows) == ["ok"] * kept + ["not timed"] * (len(took) - kept)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("last", "later", "left_out"),
    [(1.04, (1.0, 1.01, 1.04), "Right"), (1.2, (1.0, 1.01, 0.5), "Noisy"), (0.5, (2.0, 2.02, 2.4), "Right")],
    ids=["behind", "slow in a moment only", "on a machine that is slower now"],
)
def test_of_a_large_model_only_the_two_fastest_are_timed(try_all, paces, last, later, left_out):
    first = {"eager": 1.0, FAULTY + "Noisy": 1.01, FAULTY + "Right": last}
    paces(first, dict(zip(first, later, strict=True)))
    rows, _ = try_all(*first)
    assert [name for name, row in rows.items() if row.status != "ok"] == [left_out]
    assert rows[left_out].status == "not timed"
    assert rows[left_out].reason.endswith(f"times slower than the best; {ONE_OF_TWO}")
    rows, _ = try_all(*first, time_all=True)
    assert {row.status for row in rows.values()} == {"ok"}


@pytest.mark.usefixtures("large")
def test_only_the_fastest_is_alive_while_another_is_compiled(try_all, sandbox, paces, monkeypatch):
    """The one that is second at the end is opened again from its files, and only then checked."""
    took = {"onnxruntime": 1.1, "eager": 1.0, "torchscript": 1.2, FAULTY + "Right": 1.3}
    paces(took)
    begun, begin, of_other_tests = [], Isolated.begin, list(sandbox._contenders)

    def begin_and_count(self, files=None):
        others = [item for item in sandbox._contenders if item is not self and item not in of_other_tests]
        begun.append((self.candidate.key, files is not None, sum(not item.retired for item in others)))
        begin(self, files)

    monkeypatch.setattr(Isolated, "begin", begin_and_count)
    told: list[str] = []
    rows, _ = try_all(*took, progress=told.append)
    assert begun == [
        ("onnxruntime", False, 0),
        ("eager", False, 1),
        ("torchscript", False, 1),
        (FAULTY + "Right", False, 1),
        ("onnxruntime", True, 1),
    ]
    steps = [text for text in told if text.startswith(("check", "compile")) and "ONNX" in text]
    assert steps == ["compile ONNX Runtime (1 of 4)", "check ONNX Runtime", "compile ONNX Runtime once more"]
    assert statuses(rows) == ["ok", "ok", "not timed", "not timed"]


@pytest.mark.usefixtures("large")
def test_one_without_files_is_compiled_once_more(try_all, paces):
    took = {"torchscript": 1.1, "eager": 1.0, FAULTY + "Right": 1.2}
    paces(took)
    rows, _ = try_all(*took)
    assert statuses(rows) == ["ok", "ok", "not timed"]


@pytest.mark.usefixtures("large")
def test_where_the_fastest_is_wrong_the_next_one_takes_its_place(try_all, paces):
    took = {FAULTY + "WrongValue": 0.1, "eager": 1.0, "torchscript": 1.1, FAULTY + "Right": 1.2}
    paces(took)
    rows, _ = try_all(*took)
    assert statuses(rows) == ["wrong", "ok", "ok", "not timed"]


@pytest.mark.usefixtures("large")
def test_one_that_cannot_be_opened_again_is_out(try_all, paces, monkeypatch):
    took = {"torchscript": 1.1, "eager": 1.0, FAULTY + "Right": 1.2}
    paces(took)
    begin = Isolated.begin
    begun = []

    def begin_once(self, files=None):
        begun.append(self.candidate.key)
        if begun.count("torchscript") > 1 and self.candidate.key == "torchscript":
            raise OSError("no more processes")
        begin(self, files)

    monkeypatch.setattr(Isolated, "begin", begin_once)
    rows, _ = try_all(*took)
    assert statuses(rows) == ["system error", "ok", "ok"]


@pytest.mark.usefixtures("large")
def test_the_fastest_that_is_right_stays_while_a_faster_one_is_checked(try_all, paces, monkeypatch):
    """When the budget is used up meanwhile, it is there."""
    took = {"eager": 1.0, FAULTY + "WrongValue": 0.5, "torchscript": 1.2}
    paces(took)
    times_up = iter([100.0] * 999)
    check = preparation._Preparation._check

    def check_until_the_end(self, entry):
        check(self, entry)
        if entry.candidate.backend == FAULTY + "WrongValue":
            monkeypatch.setattr(contenders.Clock, "left", 0.0)

    monkeypatch.setattr(contenders.Clock, "left", property(lambda self: next(times_up)))
    monkeypatch.setattr(preparation._Preparation, "_check", check_until_the_end)
    rows, _ = try_all(*took)
    assert statuses(rows) == ["ok", "wrong", "timed out"]


@pytest.mark.usefixtures("large")
def test_where_its_files_cannot_be_saved_it_is_compiled_once_more(try_all, paces, monkeypatch):
    took = {"onnxruntime": 1.1, "eager": 1.0, "torchscript": 1.2}
    paces(took)
    opened, begin = [], Isolated.begin

    def no_room(self):
        raise BackendError("no space left on device")

    def begin_and_note(self, files=None):
        opened.append((self.candidate.key, files))
        begin(self, files)

    monkeypatch.setattr(Isolated, "saved", no_room)
    monkeypatch.setattr(Isolated, "begin", begin_and_note)
    rows, _ = try_all(*took)
    assert statuses(rows) == ["ok", "ok", "not timed"]
    assert opened.count(("onnxruntime", None)) == 2


@pytest.mark.usefixtures("large")
def test_files_of_those_that_have_left_are_gone(try_all, sandbox, paces):
    took = {"onnxruntime": 1.1, "eager": 1.0, "torchscript": 1.05, "onnxruntime?threads=1": 2.0}
    paces(took)
    rows, _ = try_all(*took)
    assert rows["ONNX Runtime"].status == "not timed"
    assert list(sandbox.directory.glob("saved-*")) == []


@pytest.mark.parametrize("memory", [1, None])
@pytest.mark.usefixtures("large")
def test_to_time_all_is_to_check_all_that_there_is_room_for(try_all, paces, monkeypatch, memory):
    took = {"eager": 1.0, "torchscript": 1.5, FAULTY + "Right": 2.0}
    paces(took)
    monkeypatch.setattr(preparation, "HOPELESS", 1.1)
    monkeypatch.setattr(preparation, "HOPELESS_IF_LONG", 1.1)
    rows, _ = try_all(*took, memory=memory, time_all=True)
    assert statuses(rows) == ["ok", "ok", "ok" if memory is None else "not timed"]
