"""The table of layers: whatever an engine has made of the program, its kernels are told by the user's modules."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.profiling.models import Cnn, optimized
from tests.runtime.racing.helpers import fast_timings
from tsopt.passes.lower_precision import in_precision
from tsopt.runtime.backends.backend import Profiles, get_backend
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.profiling import limits, op_by_op, ort
from tsopt.runtime.profiling.engines import profile
from tsopt.runtime.profiling.kernels import Kernel, Timed, ms_of_values
from tsopt.runtime.profiling.limits import Limits
from tsopt.runtime.profiling.profile import ELSEWHERE, WHOLE
from tsopt.runtime.profiling.rows import profile_of
from tsopt.runtime.profiling.work import Work

ENGINES = ("eager", "onednn", "onnxruntime", "openvino")


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Scores(nn.Module):
    def forward(self, x):
        return x.sin() @ x.T


@pytest.mark.parametrize("engine", ENGINES)
def test_kernels_are_told_by_the_users_modules(engine, cnn):
    program, inputs = cnn
    found = profile("Cnn", {"fp32": program}, Candidate(engine), inputs, None)
    layers = {item.layer: item for item in found.layers}
    title = Candidate(engine).title
    for name, op in (("stem.0", "conv2d"), ("block", "conv2d"), ("head", "linear")):
        assert layers[name].op == op
        assert layers[name].ms[title] > 0
        assert layers[name].kernels[title]
        assert "profiling/models.py" in layers[name].where
    assert found.engines == tuple(dict.fromkeys((Candidate("eager").title, title)))
    assert found.notes == ()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_program_is_drawn_with_the_time_of_each_value(engine, cnn):
    program, inputs = cnn
    found = profile("Cnn", {"fp32": program}, Candidate(engine), inputs, None)
    drawn = {origin for item in found.drawing if item.ms for origin in item.origins}
    assert {"stem.0", "block", "head"} <= {origin.partition(",")[0] for origin in drawn}
    known = sum(item.ms.get(found.engines[-1], 0.0) for item in found.layers)
    assert sum(item.ms for item in found.drawing) == pytest.approx(known)
    assert f"<h3>With the times of {found.engines[-1]}</h3>" in found.html


def test_a_kernel_of_a_value_that_the_program_does_not_have_counts_where_it_comes_from(cnn):
    program, _ = cnn
    copied = tsopt.transform(tsopt.capture(Cnn().eval(), torch.randn(2, 3, 32, 32)))
    (block,) = (node for node in copied.calls() if node.meta.get("module") == "block")
    block.name = "of_the_engine"
    (own,) = (node for node in program.calls() if node.meta.get("module") == "block")
    assert ms_of_values(program, [Kernel("k", 2.0, (block,)), Kernel("other", 1.0)]) == {own.name: 2.0}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_fuses_across_modules_is_told_too(engine):
    program, inputs = optimized(Attending(), torch.randn(2, 9, 64))
    made = get_backend(engine).profile(program, inputs)
    known = {kernel.node.meta.get("module") for kernel in made.kernels if kernel.node is not None}
    assert {"qkv", "out"} <= known
    unknown = [kernel for kernel in made.kernels if kernel.node is None]
    assert len(unknown) <= len(made.kernels) / 4, [kernel.name for kernel in unknown]


def test_ops_on_one_line_outside_of_modules_have_a_row_each():
    program, inputs = optimized(Scores(), torch.randn(9, 9))
    found = profile("Scores", {"fp32": program}, Candidate("onnxruntime"), inputs, None)
    assert {"sin", "matmul"} <= {item.op for item in found.layers}
    (where,) = {item.where for item in found.layers if item.op in ("sin", "matmul")}
    assert found.by_place(found.engines[0])[where] == max(item.ms[found.engines[0]] for item in found.layers)


def test_the_work_of_a_layer_is_told_beside_its_times(cnn):
    program, inputs = cnn
    found = profile("Cnn", {"fp32": program}, Candidate("onnxruntime"), inputs, None)
    layers, engine = {item.layer: item for item in found.layers}, found.engines[-1]
    block = layers["block"]
    assert block.work.macs == 2 * 32 * 32 * 32 * 32 * 9
    assert block.work.weights == (32 * 32 * 9 + 32) * 4
    assert block.at_best == pytest.approx(found.limits.seconds(block.work) * 1e3)
    assert block.limit(engine) == pytest.approx(block.at_best / block.ms[engine])
    assert block.limit("another engine") is None
    cells = dict(zip(found.header, found.cells()[-1], strict=True))
    assert float(cells["MMACs"]) == pytest.approx(found.work.macs / 1e6, rel=1e-2)
    assert found.work.macs == sum(item.work.macs for item in found.layers)
    record = next(item for item in found.to_json()["layers"] if item["layer"] == "block")
    assert (record["macs"], record["weights"]) == (block.work.macs, block.work.weights)
    assert record["intensity"] == pytest.approx(block.work.macs / block.work.bytes)
    assert (record["source"], record["precision"]) == (block.source, "fp32")


def test_layers_and_what_is_left_add_up_to_the_call(cnn):
    program, inputs = cnn
    found = profile("Cnn", {"fp32": program}, Candidate("onnxruntime"), inputs, 1)
    for engine in found.engines:
        total = sum(item.ms.get(engine, 0.0) for item in found.layers) + found.elsewhere[engine]
        assert total >= found.calls[engine] or math.isclose(total, found.calls[engine])


def test_an_engine_without_a_profiler_is_a_note(cnn):
    program, inputs = cnn
    assert not isinstance(get_backend("torchscript"), Profiles)
    found = profile("Cnn", {"fp32": program}, Candidate("torchscript"), inputs, None)
    assert found.engines == (Candidate("eager").title,)
    assert found.notes == ("no layer can be timed as TorchScript runs it",)
    assert found.notes[0] in str(found)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x).sin(), lambda x: self.b(x), (self.stem(x),))


def test_what_runs_in_a_branch_counts_for_the_condition():
    program, inputs = optimized(Branching(), torch.ones(2, 8))
    engine = Candidate("onnxruntime")
    found = profile("Branching", {"fp32": program}, engine, inputs, None)
    timed = {item.layer: item.op for item in found.layers if engine.title in item.ms}
    assert timed["stem"] == "linear"
    assert "cond" in timed.values()
    assert found.notes == ()


def test_an_engine_that_tells_no_layer_is_a_note(cnn, monkeypatch):
    program, inputs = cnn
    monkeypatch.setattr(ort, "fused", lambda nodes, model: [()] * len(nodes))
    found = profile("Cnn", {"fp32": program}, Candidate("onnxruntime"), inputs, None)
    said = "ONNX Runtime does not say which layer a kernel belongs to, so all of its time is elsewhere in the engine"
    assert found.notes == (said,)


@pytest.fixture
def asked_for(monkeypatch):
    """How many threads torch has in each program that is timed op by op, and what the limits of the machine are for."""
    seen = {"torch": [], "limits": [], "precisions": []}

    def called(call):
        seen["torch"].append(torch.get_num_threads())
        call()
        return [1.0]

    def measured(threads, precisions):
        seen["limits"].append(threads)
        seen["precisions"] += precisions
        return Limits(macs=1e9, moved=((1, 1e18),), lowered=dict.fromkeys(precisions, 2e9))

    monkeypatch.setattr(op_by_op, "called", called)
    monkeypatch.setattr(limits, "measured", measured)
    return seen


@pytest.mark.parametrize("engine", ["eager", "onednn"])
def test_torch_is_timed_with_the_threads_that_were_asked_for(engine, cnn, asked_for, torch_threads):
    program, inputs = cnn
    torch_threads(2)
    found = profile("Cnn", {"fp32": program}, Candidate(engine), inputs, 1)
    assert asked_for == {"torch": [1] * len(found.engines), "limits": [1], "precisions": []}
    assert torch.get_num_threads() == 2


def test_the_threads_of_the_winner_are_not_those_of_torch(asked_for, torch_threads, monkeypatch):
    torch_threads(2)
    fast_timings(monkeypatch, wins="ONNX Runtime, 1 thread")
    options = {
        "backends": ("onnxruntime?threads=1",),
        "seconds": 0.02,
        "isolate": False,
        "time_all": True,
        "cache": False,
    }
    fast = tsopt.optimize(nn.Linear(4, 4).eval(), torch.ones(1, 4), **options)
    assert fast.report.winner == "ONNX Runtime, 1 thread"
    fast.profile()
    assert asked_for == {"torch": [2], "limits": [1], "precisions": []}


def test_where_eager_won_the_program_is_timed_with_the_threads_of_the_race(asked_for, torch_threads):
    torch_threads(2)
    options = {"threads": 1, "backends": (), "seconds": 0.02, "isolate": False}
    tsopt.optimize(nn.Linear(4, 4).eval(), torch.ones(1, 4), **options).profile()
    assert asked_for == {"torch": [1], "limits": [1], "precisions": []}


def test_where_eager_won_the_profile_says_that_the_program_is_timed():
    fast = tsopt.optimize(nn.Linear(4, 4).eval(), torch.ones(1, 4), backends=(), seconds=0.02, isolate=False)
    assert fast.report.winner == "eager"
    assert fast.profile().notes == (
        "eager won, so calls run the model itself; what is timed here is the optimized program",
    )


def test_a_model_elsewhere_than_on_the_cpu_is_refused(cnn):
    program, _ = cnn
    with pytest.raises(tsopt.UsageError, match="only a model on the CPU can be profiled"):
        profile("Cnn", {"fp32": program}, Candidate("eager"), [torch.ones(1, device="meta")], None)


@pytest.mark.parametrize(
    ("engine", "in_bf16"),
    [
        ("openvino", []),
        ("openvino?precision=bf16", ["block", "head", "stem.0"]),
        ("eager?precision=bf16", ["block", "head", "stem.0"]),
    ],
)
def test_limits_are_those_of_the_precision_that_a_layer_runs_in(engine, in_bf16, cnn, asked_for):
    program, inputs = cnn
    winner = Candidate.parse(engine)
    programs = {"fp32": program, winner.variant: in_precision(program, winner.variant)}
    found = profile("Cnn", programs, winner, inputs, None)
    assert found.engines[-1] == winner.title
    assert asked_for["precisions"] == (["bf16"] if in_bf16 else [])
    layers = [item for item in found.layers if item.layer in ("block", "head", "stem.0")]
    assert sorted(item.layer for item in layers if item.precision == "bf16") == in_bf16
    for item in layers:  # of the two, the bytes take no time here
        assert item.at_best == pytest.approx(item.work.macs / found.limits.rate(item.precision) * 1e3)
    said = (
        f"MB are those of full precision, of which {winner.title} moves fewer; the limits are those of the precision "
        "that a layer runs in"
    )
    assert found.notes == ((said,) if in_bf16 else ())


def test_of_layers_in_int8_the_limit_is_that_of_int8(cnn, asked_for):
    program, inputs = cnn
    winner = Candidate.parse("onnxruntime?precision=int8-weights")
    programs = {"fp32": program, "int8-weights": in_precision(program, "int8-weights")}
    found = profile("Cnn", programs, winner, inputs, None)
    assert asked_for["precisions"] == ["int8-weights"]
    known = {item.layer: item.precision for item in found.layers}
    assert (known["block"], known["head"]) == ("fp32", "int8-weights")
    assert [series.name for series in found.charts[1].series][-2:] == [
        "limit of this machine",
        "limit of this machine in int8-weights",
    ]


def test_where_the_winner_cannot_be_timed_the_limits_are_those_of_what_is(cnn, asked_for):
    program, inputs = cnn
    winner = Candidate.parse("tests.runtime.racing.helpers:FaultyBackend?precision=bf16")
    found = profile("Cnn", {"fp32": program}, winner, inputs, None)
    assert found.engines == ("eager + passes",)
    assert found.limits is not None


def test_the_table_has_shares_and_ends_with_the_whole_call(made):
    assert made.header == ("layer", "op", "MMACs", "MB", "torch ms", "engine ms", "share", "of limit", "kernel")
    rows = made.cells()
    assert rows[0] == ("block", "conv2d", "18.9", "0.561", "2.00", "3.00", "75.0%", "629.1%", "fused")
    assert rows[2] == ("stem.0", "conv2d", "1.77", "0.29", "2.00", "-", "-", "-", "")
    assert rows[3] == (ELSEWHERE, "", "-", "-", "1.00", "0.500", "12.5%", "-", "")
    assert rows[4][:2] == (WHOLE, "")
    assert rows[4][4:] == ("6.00", "4.00", "100.0%", "-", "")


def test_outside_of_a_terminal_there_is_room_for_the_line_the_bytes_and_the_intensity(made):
    found = dict(zip(made.full_header, made.full_cells()[0], strict=True))
    assert (found["layer"], found["op"], found["in"]) == ("block", "conv2d", "fp32")
    assert found["line"] == made.layers[0].source
    assert "profiling/models.py:" in found["line"]
    work, columns = made.layers[0].work, ("MMACs", "MB read", "MB of weights", "MB written")
    assert [float(found[name]) for name in columns] == pytest.approx(
        [work.macs / 1e6, work.inputs / 1e6, work.weights / 1e6, work.outputs / 1e6], rel=0.01
    )
    assert float(found["MACs/byte"]) == pytest.approx(work.macs / work.bytes, rel=0.01)
    assert {len(row) for row in made.full_cells()} == {len(made.full_header)}
    assert [row[0] for row in made.full_cells()] == [row[0] for row in made.cells()]
    assert [row[2:6] for row in made.full_cells()] == [row[4:8] for row in made.cells()]  # the times come first
    assert [row[-1] for row in made.full_cells()] == [row[-1] for row in made.cells()]
    whole = dict(zip(made.full_header, made.full_cells()[-1], strict=True))
    assert float(whole["MB of weights"]) == pytest.approx(made.work.weights / 1e6, rel=0.01)
    assert " | MACs/byte | " in made.markdown
    assert "<th" in made.html
    assert "MACs/byte" in made.html


def test_large_numbers_are_written_out():
    timed = Timed((), 1.0)
    made = replace(profile_of("Cnn", {"engine": timed}), work=Work(macs=11_174_215_680, weights=1_234_000))
    assert made.cells()[-1][2:4] == ("11,174", "1.23")


def test_large_numbers_need_no_exponent():
    made = replace(profile_of("Cnn", {"engine": Timed((), 1.0)}), work=Work(macs=999_700_000))
    assert made.cells()[-1][2] == "1,000"


def test_what_is_not_shown_is_one_row(made):
    rows = made.cells(top=1)
    assert [row[0] for row in rows] == ["block", "2 more layers", ELSEWHERE, WHOLE]
    assert rows[1][2:7] == ("1.77", "-", "3.00", "0.500", "12.5%")
    assert all(item.layer in made.markdown for item in made.layers)


def test_json_has_every_layer(made):
    found = json.loads(json.dumps(made.to_json()))
    assert [item["layer"] for item in found["layers"]] == ["block", "head", "stem.0"]
    assert found["layers"][0]["kernels"] == {"torch": ["aten.conv2d"], "engine": ["fused"]}
    assert found["call_ms"] == {"torch": 6.0, "engine": 4.0}


def test_charts_have_a_point_for_each_layer_and_the_limit_of_the_machine(made):
    limits = Limits(macs=1e11, moved=((1 << 14, 1e11), (1 << 26, 1e10)))
    wall, roof = replace(made, limits=limits).charts
    assert [series.name for series in wall.series] == list(made.engines)
    timed = [layer for layer in made.layers if made.engines[0] in layer.ms]
    assert len(wall.series[0].points) == len(timed)
    megabytes, ms, said = wall.series[0].points[0]
    assert megabytes == timed[0].work.bytes / 1e6
    assert ms == timed[0].ms[made.engines[0]]
    assert said.startswith(f"{timed[0].layer} ({timed[0].op}) in {made.engines[0]}: ")
    limit = roof.series[-1]
    assert limit.is_line
    below, ridge, above = limit.points
    assert ridge[:2] == (10.0, 100.0)
    assert below[1] < 100.0 == above[1]
    assert replace(made, limits=None).charts[1].series[-1].name == made.engines[-1]
    in_bf16 = replace(limits, lowered={"bf16": 4e11})
    *_, limit = replace(made, limits=in_bf16).charts[1].series
    assert limit.name == "limit of this machine in bf16"
    assert max(rate for _, rate, _ in limit.points) == 400.0


def test_a_profile_is_a_page(made):
    assert made.model in made.html
    assert "iframe" in made._repr_html_()


def test_remarks_are_no_rows_of_the_table_in_markdown(made):
    remarks = ("no layer | can be timed", "a name\nof two lines\x1b[2J")
    table, rest = replace(made, notes=remarks).markdown.split("\n\n")[1:]
    assert all(line.startswith("| ") for line in table.splitlines())
    assert rest.splitlines() == ["- no layer \\| can be timed", "- a name of two lines?[2J"]
    assert made.markdown.endswith(" |")
