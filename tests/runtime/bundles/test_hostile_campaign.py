"""Some hundred hostile bundles, made systematically: each is refused in our words, or opened, in time and in bounds."""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.hazards import bundles as hazards
from bench.hazards import load_trial
from bench.hazards.bundle_changes import Change
from bench.hazards.sound_bundles import sign

KINDS = ("eager", "onednn", "torchscript", "onnxruntime", "openvino")
JUNK = (None, -1, 2**70, True, "", "x" * 10_000, [], {}, [[]], {"node": 0}, 1.5)
PIECES, FLIPS = 16, 12
WANTED = 400
SIGNED = {"manifest.json"}


@pytest.fixture(scope="module")
def clean():
    """Not this process: engines have run here, and what is collected in a fork of it would wait for their threads."""
    with load_trial.Clean() as process:
        yield process


@pytest.fixture(scope="module")
def sound(tmp_path_factory, clean):
    """A sound bundle of each kind, made when it is asked for; that of OpenVINO is ONNX Runtime's with another name."""

    @functools.cache
    def made(kind: str) -> Path:
        place = tmp_path_factory.mktemp(kind)
        if kind == "openvino":
            shutil.copytree(made("onnxruntime"), place, dirs_exist_ok=True)
            options = {"threads": 1, "hint": "latency", "precision": "fp32"}
            sign(place / "m.tsopt", lambda manifest: manifest.update(backend="openvino", options=options))
            return place
        answer = clean.ask("make", kind, str(place))
        assert answer["kind"] == "made", answer
        return place

    return made


def cut(name: str, sixteenths: int, bundle: Path) -> None:
    raw = (bundle / name).read_bytes()
    (bundle / name).write_bytes(raw[: len(raw) * sixteenths // PIECES])
    sign(bundle)


def flipped(name: str, seed: int, bundle: Path) -> None:
    raw, draw = bytearray((bundle / name).read_bytes()), random.Random(f"{name} {seed}")
    for _ in range(1 + seed % 4):
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    (bundle / name).write_bytes(raw)
    sign(bundle)


def replaced(name: str, path: tuple[Any, ...], value: Any, bundle: Path) -> None:
    """One value of a JSON member, or of the manifest, by another; where there is none, it goes."""
    data = json.loads((bundle / name).read_text())
    *way, last = path
    inner = functools.reduce(lambda item, key: item[key], way, data)
    inner[last] = copy.deepcopy(value)
    if name == "manifest.json":
        sign(bundle, lambda manifest: (manifest.clear(), manifest.update(data)))
        return
    (bundle / name).write_text(json.dumps(data))
    sign(bundle)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values within a JSON value."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def changes(kind: str, bundle: Path) -> Iterator[tuple[str, Change]]:
    for name in sorted(file.name for file in bundle.iterdir() if file.name not in ("manifest.json", "report.json")):
        for sixteenths in range(0, PIECES, 3):
            yield f"{name} cut at {sixteenths}/{PIECES}", functools.partial(cut, name, sixteenths)
        for seed in range(FLIPS):
            yield f"{name} flipped {seed}", functools.partial(flipped, name, seed)
    for name in ("manifest.json", "program.json"):
        if not (bundle / name).exists():
            continue
        found = [
            path for path in places(json.loads((bundle / name).read_text())) if path[0] not in ("sha256", "members")
        ]
        draw = random.Random(name)
        for number, path in enumerate(draw.sample(found, min(len(found), 24))):
            value = JUNK[number % len(JUNK)]
            yield f"{name} {path} is {str(value)[:20]}", functools.partial(replaced, name, path, value)


def all_changes(sound: Callable[[str], Path], kinds: Sequence[str] = KINDS) -> list[tuple[str, str, Change]]:
    return [(kind, *change) for kind in kinds for change in changes(kind, sound(kind) / "m.tsopt")]


def outcome(clean: load_trial.Clean, kind: str, change: Change, source: Path, place: Path) -> str:
    """What is wrong with what becomes of a bundle; empty when all is well. Other weights give other answers."""
    shutil.copytree(source, place, dirs_exist_ok=True)
    try:
        change(place / "m.tsopt")
        said = load_trial.in_process("loaded", str(place)) if kind == "openvino" else clean.ask("loaded", str(place))
    finally:
        shutil.rmtree(place)
    found = load_trial.judged(said)
    return "" if found.kind in ("right", "refused") or said["kind"] == "other" else found.why


@pytest.mark.slow
def test_there_are_enough_of_them(sound):
    assert len(all_changes(sound)) + len(hazards.CASES) >= WANTED


def test_every_one_is_refused_or_opened(clean, sound, tmp_path, fuzz_factor):
    chosen = all_changes(sound) if fuzz_factor > 1 else all_changes(sound, ["onnxruntime"])[::11]
    wrong = []
    for number, (kind, name, change) in enumerate(chosen):
        said = outcome(clean, kind, change, sound(kind), tmp_path / str(number))
        if said:
            wrong.append(f"{kind}: {name}: {said}")
    assert not wrong, "\n".join(wrong)


# What the loader finds by itself: an engine loads some of its libraries only when it fails.
SYSTEM_LIBRARY = re.compile(r"(/usr)?/lib(64|32)?/([\w-]+/)?[\w.+-]+\.so[.\d]*")


def traced(kind: str, place: Path) -> tuple[set[str], int]:
    """The files that loading a bundle opens, also in engines and the probing process, and how many it executes."""
    trace = place / "trace"
    load = [sys.executable, "-m", "bench.hazards.load_trial", "loaded", str(place)]
    path = os.pathsep.join(filter(None, sys.path))
    command = ["strace", "-f", "-qq", "-e", "trace=open,openat,openat2,execve", "-s", "4096", "-o", str(trace), *load]
    environment = os.environ | {"PYTHONPATH": path, "ORT_DISABLE_TELEMETRY": "1"}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=120, check=True)
    lines = [line for line in trace.read_text(errors="replace").splitlines() if not re.search(r"= -1 E\w+", line)]
    calls = [re.search(r'(open\w*|execve)\((?:AT_FDCWD, )?"([^"]*)"', line) for line in lines]
    opened = {os.path.realpath(call[2]) for call in calls if call is not None and call[1] != "execve"}
    return opened, sum(call is not None and call[1] == "execve" for call in calls)


@pytest.mark.skipif(not os.environ.get("TSOPT_FUZZ"), reason="make fuzz")
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("kind", ["onnxruntime", "openvino"])
def test_nothing_outside_of_the_bundle_is_opened_and_nothing_is_run(sound, tmp_path, kind):
    """Seen by strace: what a C++ library opens does not reach an audit hook."""
    shutil.copytree(sound(kind), tmp_path / "sound")
    usual, started = traced(kind, tmp_path / "sound")
    assert "/etc/passwd" not in usual
    own = [*sys.path, sys.prefix, sys.base_prefix, tempfile.gettempdir(), "/proc", "/sys", "/dev"]
    wrong = []
    for number, (name, change) in enumerate(hazards.MODELS.items()):
        place = tmp_path / str(number)
        shutil.copytree(sound(kind), place)
        change(place / "m.tsopt")
        opened, runs = traced(kind, place)
        beside = {path for path in opened if path.startswith(f"{place}/witness")}
        strange = {path for path in opened - usual if not path.startswith(tuple(filter(None, own)))}
        strange = {path for path in strange if not SYSTEM_LIBRARY.fullmatch(path)} | beside
        wrong += [f"{name}: {path}" for path in sorted(strange)] + [f"{name}: runs something"] * (runs > started)
    assert wrong == []
