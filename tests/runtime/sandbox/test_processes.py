"""What processes of tsopt's own are started with."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tsopt
from tsopt.background import job
from tsopt.compiler.calls.types import TensorType
from tsopt.runtime.bundles import probe
from tsopt.runtime.sandbox import processes
from tsopt.runtime.sandbox import sandbox as isolation
from tsopt.runtime.sandbox.processes import OWN, environment_of_child


def test_engines_report_nothing_from_a_process_of_ours_unless_the_user_wants_it(monkeypatch):
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    assert environment_of_child()["ORT_DISABLE_TELEMETRY"] == "1"
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    assert environment_of_child()["ORT_DISABLE_TELEMETRY"] == "0"


def test_a_child_imports_what_this_process_does(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    first, second, *_ = environment_of_child("here")["PYTHONPATH"].split(":")
    assert (first, second) == ("here", str(tmp_path))


def test_a_child_gets_what_imports_use_of_the_import_path_without_the_working_directory(monkeypatch, tmp_path):
    """But for this package, wherever it was found."""
    monkeypatch.chdir(tmp_path)
    entries = ["first", Path("skipped"), "", ".", "./", "last"]
    for path, wanted in ((entries, [OWN, "first", "last"]), ([*entries, OWN], ["first", "last", OWN])):
        monkeypatch.setattr(sys, "path", path)
        assert environment_of_child()["PYTHONPATH"].split(os.pathsep) == wanted
        assert processes.working_directory(path) == [""]
        assert processes.working_directory(wanted) == []


def test_in_a_frozen_application_no_process_is_started(monkeypatch, mlp, mlp_input):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    with isolation.Sandbox() as sandbox, pytest.raises(tsopt.BackendError, match="a frozen application"):
        sandbox.open({"fp32": tsopt.capture(mlp, mlp_input)}, threads=1)
    with pytest.raises(tsopt.CaptureError, match="a frozen application"):
        job.Job(mlp, [job.Example((mlp_input,), {})], {})
    with pytest.raises(tsopt.BundleError, match="a frozen application"):
        probe.try_out(Path(), "eager", {}, tsopt.capture(mlp, mlp_input).signature, {}, False)


def test_files_of_background_processes_whose_caller_was_killed_are_removed(monkeypatch, mlp, mlp_input, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(job, "python", lambda *_: ["/no/such/file"])
    (tmp_path / "tsopt-1-left.job").mkdir()
    (tmp_path / "tsopt-1-left.job" / "model.tsopt").write_text("")
    with pytest.raises(FileNotFoundError):
        job.Job(mlp, [job.Example((mlp_input,), {})], {})
    assert not list(tmp_path.glob("tsopt-1-*"))


@pytest.mark.parametrize("module", [isolation, probe, job])
def test_every_process_of_ours_is_started_so(module, monkeypatch, mlp, mlp_input, tmp_path):
    seen = []

    def started(command, *args, env, **options):
        assert command[1] == "-P", "a file of the working directory could stand in for a module"
        seen.append(env)
        raise OSError("enough")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    if module is isolation:
        isolation.Sandbox().__enter__()
    elif module is probe:
        probe._run(b"", 1.0, sees_gpus=False)
    else:
        with pytest.raises(OSError, match="enough"):
            job.Job(mlp, [job.Example((mlp_input,), {})], {})
    assert [env["ORT_DISABLE_TELEMETRY"] for env in seen] == ["1"]
    assert [env["PYTHONPATH"].endswith(sys.path[-1]) for env in seen] == [True]
    hidden = [(env.get("CUDA_VISIBLE_DEVICES"), env.get("HIP_VISIBLE_DEVICES")) == ("-1", "-1") for env in seen]
    assert hidden == [module is not job], "what is on the CPU sees no GPU; the model of a background job may be on one"


def test_a_bundle_on_a_gpu_is_tried_where_it_can_be_seen(monkeypatch):
    """And is given the time to initialize it."""
    seen = []

    def run(request, seconds, *, sees_gpus):
        seen.append((json.loads(request)["cpu"], sees_gpus))
        return b"", 1

    monkeypatch.setattr(probe, "_run", run)
    for device in ("cpu", "cuda:0"):
        kind = TensorType("float32", (2,), (1,), device)
        signature = tsopt.capture(torch.relu, torch.ones(2)).signature
        items = [tuple(replace(item, type=kind) for item in ends) for ends in (signature.inputs, signature.outputs)]
        with pytest.raises(tsopt.BundleError, match="did not start"):
            probe.try_out(Path(), "eager", {}, replace(signature, inputs=items[0], outputs=items[1]), {}, False)
    assert seen == [(probe.CPU_SECONDS, False), (probe.GPU_SECONDS, True)]


@pytest.mark.parametrize(
    ("group", "place", "limit", "used", "files"),
    [
        ("0::/a/b", "a/b", "memory.max", "memory.current", "inactive_file"),
        ("0::/a/b", "", "memory.max", "memory.current", "inactive_file"),
        (
            "5:devices:/\n4:memory:/a\n0::/",
            "memory/a",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
        (
            "4:cpu,memory:/elsewhere",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_a_control_group_of_either_version_limits_what_is_free(tmp_path, group, place, limit, used, files):
    directory = tmp_path / place
    directory.mkdir(parents=True, exist_ok=True)
    (directory / used).write_text("3000\n")
    (directory / "memory.stat").write_text(f"anon 1000\n{files} 500\n")
    for allowed, left in (("10000", [7500]), ("2000", [0]), ("max", [])):
        (directory / limit).write_text(f"{allowed}\n")
        assert list(processes._left_in_control_groups(tmp_path, group)) == left


def test_what_a_control_group_allows_is_what_there_is(monkeypatch):
    monkeypatch.setattr(processes, "_left_in_control_groups", lambda: iter([5000]))
    assert processes.available_memory() == 5000
    monkeypatch.setattr(processes, "_left_in_control_groups", lambda: iter([]))
    assert processes.available_memory() > 5000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")
def test_what_has_been_freed_is_given_back():
    blocks = [torch.ones(16_000) for _ in range(4000)]  # 64 kB each: from the heap, which grows at its end only
    last = torch.ones(16_000)  # keeps the end where it is
    del blocks
    before = resident_bytes()
    processes.give_back_memory()
    assert before - resident_bytes() > 200e6
    assert last.all()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
