"""Every guard of every rule is there for a reason that some test knows: without it, a test goes red.

A few guards in `make slow`, all of them (an hour of one core) with TSOPT_FUZZ=1. TSOPT_MUTATIONS chooses: `3/20`,
`all`, or the beginning of a guard such as `algebra.times_one`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.passes import mutate
from tests.passes.mutate import Guard, all_guards

ROOT = Path(__file__).parents[2]
PARTS = 20
FEW, QUICK = 2, "algebra"  # in `make slow`: guards of a module whose tests take seconds

# Guards that make no difference to what comes out, each with what it is there for.
WITHOUT_EFFECT: dict[str, str] = {
    "constants.number_in: bool(first != last)": "most constants are known by two elements, without a look at all",
}


def choices() -> list[str]:
    """One case for each; all guards come in parts, so that several processes can share them."""
    if wanted := os.environ.get("TSOPT_MUTATIONS"):
        return [wanted]
    return [f"{index}/{PARTS}" for index in range(PARTS)] if os.environ.get("TSOPT_FUZZ") else [""]


def chosen(guards: list[Guard], wanted: str) -> list[int]:
    """The numbers of the guards whose mutants are run."""
    order = sorted(range(len(guards)), key=lambda number: zlib.crc32(guards[number].key.encode()))
    if not wanted:
        return [number for number in order if guards[number].module == QUICK][:FEW]
    if wanted == "all":
        return order
    if "/" in wanted:
        index, count = map(int, wanted.split("/"))
        return order[index::count]
    return [number for number in order if guards[number].key.startswith(wanted)]


@pytest.mark.slow
@pytest.mark.parametrize("wanted", choices())
def test_a_guard_that_is_taken_out_is_missed_by_a_test(wanted):
    guards = all_guards()
    numbers = [number for number in chosen(guards, wanted) if guards[number].key not in WITHOUT_EFFECT]
    command = [sys.executable, "-m", "tests.passes.mutate", *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == len(numbers)
    assert [line for line in lines if not line.startswith("red ")] == []


def test_guards_are_found():
    """Of the rules as they are now there are hundreds; a few that must be among them."""
    keys = {guard.key for guard in all_guards()}
    assert len(keys) > 100
    assert "algebra.minus_zero: alpha != 1" in keys
    assert "algebra.times_one: at.same_type(x)" in keys
    assert WITHOUT_EFFECT.keys() <= keys
    assert all(WITHOUT_EFFECT.values())


SOURCE = """
def rule(at, x, y):
    if x is None or y is None:
        return None
    if not x:
        return at.skip("why")
    for z in x:
        if z:
            continue
    if y:
        return x
    return y if x and z else at.skip("why not")
"""


def test_each_condition_is_a_guard_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "some.py").write_text(SOURCE)
    monkeypatch.setattr(mutate, "PASSES", tmp_path)
    guards = mutate.guards_of("some")
    assert [guard.text for guard in guards] == ["x is None", "y is None", "not x", "z", "x", "z"]
    assert {guard.function for guard in guards} == {"rule"}
    mutants = [mutate.without_guard(guard) for guard in guards]
    assert "if y is None:" in mutants[0]
    assert "x is None" not in mutants[0]
    assert "if x is None:" in mutants[1]
    assert "why'" not in mutants[2]
    assert "continue" not in mutants[3]
    assert "return y if z else" in mutants[4]
    assert "return y if x else" in mutants[5]


@pytest.mark.slow
def test_a_mutant_is_as_red_as_its_tests(tmp_path):
    """Where no test looks at the guard, it is green; what is no test of the module is not run."""
    (tmp_path / "test_one.py").write_text(
        "from tsopt.passes import algebra\ndef test_one(): assert algebra.neg_neg.body(None, 1) == 1"
    )
    code = f"""
from tests.passes import mutate
mutate.tests_of = lambda module: [{str(tmp_path)!r}]
(tmp,) = [guard for guard in mutate.guards_of("algebra") if guard.key == "algebra.minus_zero: alpha != 1"]
print(mutate.is_red("algebra"), mutate.is_red("algebra", tmp))
mutate.without_guard = lambda guard: "neg_neg = None"
print(mutate.is_red("algebra", tmp))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
