"""How kernels of several engines become the rows of a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tsopt.runtime.profiling.kernels import Kernel, Timed
from tsopt.runtime.profiling.limits import Limits
from tsopt.runtime.profiling.precisions import Precisions
from tsopt.runtime.profiling.rows import profile_of
from tsopt.runtime.profiling.work import OpWork


def test_a_module_of_several_ops_is_told_by_its_product(cnn):
    program = cnn[0].copy()
    head, mean = (next(node for node in program.calls() if name in node.name) for name in ("linear", "mean"))
    mean.meta.update(module="head", source=head.meta["source"])
    timed = Timed((Kernel("mean", 1.0, (mean,)), Kernel("gemm", 2.0, (head,))), 4.0)
    (row,) = profile_of("Cnn", {"engine": timed}).layers
    assert (row.op, row.ms["engine"]) == ("linear", 3.0)


@pytest.mark.parametrize(("made", "share"), [(6e9, 1.0), (5.5e9, 1.0), (1e9, 6.291456)], indirect=["made"])
def test_the_machine_is_as_fast_as_a_layer_that_exceeds_its_limit_by_a_little(made, share):
    assert made.layers[0].limit("engine") == pytest.approx(share)
    assert made.limits.macs == pytest.approx(6.291456e9 if share == 1 else 1e9)


def test_each_precision_is_as_fast_as_a_layer_that_exceeds_its_limit_by_a_little(cnn):
    """In the engine that runs: the others compute in float32."""
    program, inputs = cnn
    (block,) = (node for node in program.calls() if node.meta.get("module") == "block")
    timed = {name: Timed((Kernel("conv", 3.0, (block,)),), 4.0) for name in ("torch", "engine")}
    limits = Limits(macs=6e9, moved=((1, 1e18),), lowered={"bf16": 5.5e9})
    precisions = Precisions(others="bf16")
    found = profile_of("Cnn", timed, OpWork(program, inputs), limits, precisions=precisions)
    assert found.limits.macs == found.limits.lowered["bf16"] == pytest.approx(6.291456e9)
    of_bf16 = replace(limits, macs=1e12)
    found = profile_of("Cnn", timed, OpWork(program, inputs), of_bf16, precisions=precisions)
    assert (found.limits.macs, found.limits.lowered["bf16"]) == (1e12, pytest.approx(6.291456e9))
    assert found.layers[0].limit("engine") == pytest.approx(1.0)


def test_rows_are_sorted_by_what_they_take_in_the_engine_that_runs(made):
    assert [item.layer for item in made.layers] == ["block", "head", "stem.0"]
    assert made.layers[2].ms == {"torch": 2.0}
    assert made.elsewhere == {"torch": 1.0, "engine": 0.5}
    assert made.by_place("engine") == {item.where: item.ms["engine"] for item in made.layers[:2]}
