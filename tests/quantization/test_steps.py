"""Steps of a quantization that are stored: a second run repeats none of them, and takes none that is another's."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import tsopt
from tests.passes.quantize.models import mlp
from tests.quantization.helpers import hard, quantized, records, rows
from tsopt.errors import NoGain
from tsopt.quantization import measurements
from tsopt.quantization.measurements import Measurements
from tsopt.runtime.racing import cache_directory, cache_files

WANTED = ("int8-weights", "int8-static", "int8")
MEASURING = ("factors_for", "observe", "losses_with_effects")


@pytest.fixture
def steps(monkeypatch):
    """Counts the steps that are taken, not read."""
    found = Counter()

    def counting(name, plain):
        def counted(*args, **options):
            found[name] += 1
            return plain(*args, **options)

        return counted

    for name in MEASURING:
        monkeypatch.setattr(measurements, name, counting(name, getattr(measurements, name)))
    monkeypatch.setattr(Measurements, "_judged", counting("judged", Measurements._judged))
    return found


def run(model=None, data=None, **options):
    settings = {"calibration": data or rows(16), "wanted": WANTED, "cache": True} | options
    return quantized(model or hard(), rows(1)[0], **settings)


def contents(found):
    programs = {
        name: made.what if isinstance(made, NoGain) else made.fingerprint(contents=True)
        for name, made in found.variants.items()
    }
    return programs, found.layers


def stored():
    return sorted(cache_directory.directory().glob("*.step"))


def test_a_second_run_measures_nothing_and_makes_the_same(steps):
    first = run()
    assert set(steps) == {*MEASURING, "judged"}
    steps.clear()
    assert contents(run()) == contents(first)
    assert steps == {}


@pytest.mark.parametrize("other", ["weights", "data", "split"])
def test_what_decides_the_steps_is_part_of_their_names(steps, other):
    run()
    once = dict(steps)
    model, data = hard(), rows(16)
    if other == "weights":
        with torch.no_grad():
            model[0].weight[0, 0] += 1e-3
    elif other == "data":
        data[5] = data[5] + 1e-3
    else:
        data = 16
    run(model, data)
    assert all(steps[name] > count for name, count in once.items())


def test_layers_kept_by_the_user_are_never_taken_from_another_run(steps):
    run()
    kept = run(keep_float=("2",))
    assert [layer.kept for layer in records(kept)][1] == "keep_float '2'"
    assert contents(kept) == contents(run(keep_float=("2",), cache=False))


def test_a_run_goes_on_where_the_last_one_was_interrupted(steps):
    told = []

    def interrupted(text):
        told.append(text)
        if sum("layers" in item for item in told) == 3:
            raise KeyboardInterrupt

    wanted = contents(run(cache=False))
    whole = dict(steps)
    steps.clear()
    with pytest.raises(KeyboardInterrupt):
        run(progress=interrupted)
    assert steps["judged"] == 2
    first = dict(steps)
    steps.clear()
    assert contents(run()) == wanted
    assert {name: first.get(name, 0) + steps[name] for name in whole} == whole, "no step is taken twice"


def test_what_had_too_little_time_is_finished_by_the_next_runs(monkeypatch, steps):
    """Each run has the time for two more steps."""
    now = [0.0]
    monkeypatch.setattr(measurements.time, "monotonic", lambda: now[0])
    wanted = contents(run(cache=False))
    found, runs = None, 0
    while found is None or contents(found) != wanted:
        steps.clear()
        now[0] = 0.0

        def tell(text):
            now[0] += 1.0 * (sum(steps.values()) > 1)

        found, runs = run(progress=tell, seconds=1.0), runs + 1
        assert steps, "no run is in vain"
        assert runs < 50
    assert runs > 2


def test_the_users_metric_is_always_asked(steps):
    asked = []

    def metric(model):
        asked.append(model)
        return 1.0

    run(metric=metric)
    steps.clear()
    before = len(asked)
    run(metric=metric)
    assert set(steps) == {"judged"}
    assert len(asked) == 2 * before


def test_a_limit_of_zero_is_stored_too(steps):
    run(metric="cosine", max_drop=0)
    steps.clear()
    run(metric="cosine", max_drop=0)
    assert steps == {}
    run(metric="cosine", max_drop=0.5)
    assert set(steps) == {"judged"}


def test_without_a_cache_nothing_is_stored():
    run(cache=False)
    assert stored() == []
    tsopt.optimize(mlp(8, 8), rows(1, 8)[0], precision="int8", isolate=False, cache=False, seconds=0.01)
    assert stored() == []


def test_optimize_stores_steps_where_it_caches_races(steps):
    options = {"precision": "int8", "calibration": rows(4, 8), "isolate": False, "seconds": 0.01}
    tsopt.optimize(mlp(8, 8), rows(1, 8)[0], **options)
    assert stored()
    steps.clear()
    tsopt.optimize(mlp(8, 8), rows(1, 8)[0], **options)
    assert steps == {}


def changed(raw, change):
    tensors = load(raw)
    value = json.loads(tensors["json"].numpy().tobytes())
    tensors["json"] = torch.frombuffer(bytearray(json.dumps(change(value)).encode()), dtype=torch.uint8)
    return save(tensors)


def damaged_numbers(value):
    """The JSON value with every number replaced by a text, and every other leaf by a number."""
    if isinstance(value, dict):
        return {name: damaged_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [damaged_numbers(item) for item in value]
    return "1.0" if type(value) in (int, float) else 7


def out_of_bounds(value):
    """Scales and zero points that no `QParams` has."""
    if isinstance(value, dict):
        return {name: out_of_bounds(item) for name, item in value.items()}
    if isinstance(value, list):
        return [out_of_bounds(item) for item in value]
    return -1.0 if type(value) is float else 300 if type(value) is int else value


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"\xff" * 64,
        lambda raw: save({"other": torch.ones(3)}),
        lambda raw: changed(raw, damaged_numbers),
        lambda raw: changed(raw, lambda value: None),
        lambda raw: changed(raw, lambda value: [[]] * 5),
    ],
    ids=["half", "empty", "noise", "no JSON", "other types", "null", "lists"],
)
def test_damaged_steps_are_taken_again(steps, damage):
    wanted = contents(run())
    for path in stored():
        path.write_bytes(damage(path.read_bytes()))
    steps.clear()
    assert contents(run()) == wanted
    assert set(steps) >= {*MEASURING, "judged"} - {"factors_for"}, (
        "the entry of the factors is empty, so some kinds of damage do not change it"
    )
    steps.clear()
    assert contents(run()) == wanted, "what was damaged has been replaced"
    assert steps == {}


def test_scales_that_no_engine_could_have_are_not_taken_over(steps):
    wanted = contents(run())
    for path in stored():
        path.write_bytes(changed(path.read_bytes(), out_of_bounds))
    steps.clear()
    found = run()
    assert steps["observe"] == 1
    assert contents(found) == wanted


@pytest.mark.parametrize("kind", ["factors", "losses"])
def test_steps_that_do_not_fit_the_program_are_taken_again(steps, kind):
    wanted = contents(run(spread()))
    for path in stored():
        tensors = load(path.read_bytes())
        is_loss = any(value.dtype == torch.float64 for value in tensors.values())
        is_factor = any(value.dtype == torch.float32 for value in tensors.values())
        if (kind == "losses" and is_loss) or (kind == "factors" and is_factor):
            shorter = {name: value if name == "json" else value[:-1].clone() for name, value in tensors.items()}
            path.write_bytes(save(shorter))
    steps.clear()
    assert contents(run(spread())) == wanted
    assert steps["losses_with_effects" if kind == "losses" else "factors_for"] > 0


class Repeated(nn.Module):
    """One block that is called three times: its values have the same factors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        with torch.no_grad():
            self.up.weight[3] *= 100.0
            self.up.bias[3] = 50.0
            self.down.weight[:, 3] /= 100.0

    def forward(self, x):
        for _ in range(3):
            x = x + self.down(self.up(x).relu())
        return x


def spread():
    """Two layers with an outlier channel between them."""
    model = mlp(32, 32, 8)
    with torch.no_grad():
        model[0].weight[3] *= 100.0
        model[2].weight[:, 3] /= 100.0
    return model


def test_values_that_share_factors_still_do_in_the_second_run(steps):
    first = run(Repeated().eval())
    assert any("smooth" in name for name in first.variants["int8-static"].weights), "factors are worthwhile here"
    steps.clear()
    assert contents(run(Repeated().eval())) == contents(first)
    assert steps == {}


@pytest.mark.parametrize("setting", ["threads", "VNNI"])
def test_steps_of_another_setting_are_not_taken(steps, monkeypatch, torch_threads, setting):
    run()
    once = dict(steps)
    if setting == "threads":
        torch_threads(torch.get_num_threads() + 1)
    else:
        for place in ("quantize", "measurements"):
            monkeypatch.setattr(f"tsopt.quantization.{place}.largest_weight", lambda: 64)
    run()
    assert all(steps[name] > count for name, count in once.items())


def test_few_inputs_that_a_busy_machine_has_judged_on_do_not_judge_for_many(steps, monkeypatch):
    monkeypatch.setattr("tsopt.runtime.checking.answers.SECONDS", -1.0)
    run(data=rows(96))
    monkeypatch.setattr("tsopt.runtime.checking.answers.SECONDS", 60.0)
    steps.clear()
    run(data=rows(96))
    assert set(steps) == {"judged"}


def test_old_steps_are_removed(monkeypatch):
    monkeypatch.setattr(cache_files, "MOST_STEPS", 3)
    run()
    first = stored()
    assert len(first) > 3
    run(mlp(32, 32))
    assert len(set(first) & set(stored())) <= 3, "those of the first run, when the second one began"


def test_a_cache_that_cannot_be_written_to_costs_nothing(steps, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    monkeypatch.setenv("TSOPT_CACHE_DIR", str(file))
    assert contents(run()) == contents(run(cache=False))
    assert file.read_text() == "mine"


def test_a_step_that_is_too_large_is_not_stored(steps, monkeypatch):
    monkeypatch.setattr(cache_files, "LARGEST_STEP", 10)
    run()
    assert stored() == []
