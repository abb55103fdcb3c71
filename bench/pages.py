"""Are profiles right, and do the pages of reports and profiles open at once?

Usage: python -m bench.pages [MODEL ...]; writes bench/results/pages.{json,md}. Needs Chromium and the extra `dev`.

What a profile says of the program as torch runs it is compared with torch.profiler on the model itself, with a mark
around each module that holds no other: the ten marked modules with the most time, and those that the profile puts
first. What passes have folded into another module, such as a batch norm, counts for that one.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, sync_playwright
from torch import nn
from torch.profiler import ProfilerActivity, record_function

import tsopt
from bench.models import MODELS, Case, Ensemble
from bench.process import Rows, measure_each
from tsopt.compiler.calls.example import Example
from tsopt.runtime.profiling.profile import Profile
from tsopt.runtime.racing.environment import Environment

RESULTS = Path(__file__).parent / "results"
NAMES = ("mlp", "lstm", "resnet18", "resnet50", "mobilenet_v2", "bert_base", "gpt2", "vit_b16", "ensemble_1000")
LARGE = {"ensemble_1000": Case(lambda: Ensemble(1000, 16), lambda: tsopt.example(torch.randn(1, 16)))}  # 5,000 values
CALLS = 10  # under torch.profiler
TOP = 10  # layers
MARK = "module: "


def main() -> None:
    measure_each("bench.pages:one", NAMES, RESULTS / "pages.json", line, page)


def one(name: str) -> dict[str, Any]:
    model, example = (MODELS | LARGE)[name].load()
    start = time.perf_counter()
    fast = tsopt.optimize(model, example, cache=False)
    race_seconds = time.perf_counter() - start
    start = time.perf_counter()
    profile = fast.profile()
    profile_seconds = time.perf_counter() - start
    pages = {"report": fast.report.html, "profile": profile.html}
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = {kind: open_page(browser, text) for kind, text in pages.items()}
        browser.close()
    last = profile.engines[-1]
    return {
        "race_seconds": race_seconds,
        "profile_seconds": profile_seconds,
        "engines": list(profile.engines),
        "rows": {engine: sum_of_rows(profile, engine) for engine in profile.engines},
        "elsewhere": {engine: profile.elsewhere[engine] / profile.calls[engine] for engine in profile.engines},
        "highest_limit": max((item.limit(last) or 0.0 for item in profile.layers), default=0.0),
        "top": agreement(by_module(profile), by_torch(model, example)),
        "values": len(fast.report.graphs[0]) if fast.report.graphs else 0,
        "bytes": {kind: len(text.encode()) for kind, text in pages.items()},
        "opened": opened,
    }


def open_page(browser: Browser, text: str) -> dict[str, Any]:
    """Seconds until a page has been loaded, and its scripts have run; and what the browser says on its console."""
    said: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "page.html"
        file.write_text(text)
        tab = browser.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(file.as_uri(), wait_until="load")
        milliseconds = tab.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
        tab.close()
    return {"seconds": milliseconds / 1e3, "said": said}


def sum_of_rows(profile: Profile, engine: str) -> float:
    """All rows of a profile, as a share of the call."""
    rows = sum(item.ms.get(engine, 0.0) for item in profile.layers) + profile.elsewhere[engine]
    return rows / profile.calls[engine]


def by_module(profile: Profile) -> dict[str, float]:
    """Milliseconds of the program as torch runs it, by module path."""
    found: Counter[str] = Counter()
    for item in profile.layers:
        found[item.layer] += item.ms.get(profile.engines[0], 0.0)
    return dict(found)


def by_torch(model: nn.Module, example: Example) -> dict[str, float]:
    """Milliseconds of modules that hold no other, by path, as measured by torch.profiler."""
    marks: dict[nn.Module, list[Any]] = {}

    def begin(module: nn.Module, path: str) -> None:
        mark = record_function(MARK + path)
        mark.__enter__()
        marks.setdefault(module, []).append(mark)

    with ExitStack() as stack, torch.no_grad():
        for path, module in model.named_modules():
            if not any(module.children()):
                before = module.register_forward_pre_hook(lambda module, args, path=path: begin(module, path))
                after = module.register_forward_hook(lambda module, *_: marks[module].pop().__exit__(None, None, None))
                stack.callback(before.remove)
                stack.callback(after.remove)
        model(*example.args, **example.kwargs)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(CALLS):
                model(*example.args, **example.kwargs)
    return {
        item.key.removeprefix(MARK): item.cpu_time_total / 1e3 / CALLS
        for item in found.key_averages()
        if item.key.startswith(MARK)
    }


def agreement(mine: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Of the modules with the most time by torch.profiler, how many are among ours, and what share of their time.

    Which of several equally expensive layers are among the ten is random: then the share tells, not the number.
    """
    known = {path: ms for path, ms in mine.items() if path in theirs}
    first, wanted = (sorted(times, key=times.__getitem__)[-TOP:] for times in (known, theirs))
    share = sum(theirs[path] for path in first) / sum(theirs[path] for path in wanted)
    return {"same": len({*first} & {*wanted}), "of": len(wanted), "share": share}


def line(name: str, row: dict[str, Any]) -> str:
    rows, elsewhere, top = row["rows"], row["elsewhere"], row["top"]
    cells = (
        name,
        ", ".join(f"{engine} {share:.0%}" for engine, share in rows.items()),
        ", ".join(f"{share:.0%}" for share in elsewhere.values()),
        f"{top['same']} of {top['of']}, {top['share']:.1%}",
        f"{row['highest_limit']:.0%}",
        f"{row['profile_seconds'] / row['race_seconds']:.2f}x",
        str(row["values"]),
        *(f"{row['bytes'][kind] / 1e3:.0f} kB, {row['opened'][kind]['seconds']:.2f} s" for kind in row["bytes"]),
        str(sum(len(found["said"]) for found in row["opened"].values())),
    )
    return f"| {' | '.join(cells)} |"


def page(environment: Environment, rows: Rows) -> Iterator[str]:
    yield (
        "| model | all rows of the profile, of the call | elsewhere in the engine | ten most expensive layers by torch "
        "| highest share of the limit | profile over race, s | values | report | profile | console messages |"
    )
    yield "|---|---|---|---|--:|--:|--:|---|---|--:|"
    yield from (line(name, row) for name, row in rows.items())
    yield ""
    yield "- ten most expensive layers: how many torch.profiler puts among its ten as well, and the share of the time"
    yield "  of its ten that ours take; which of several equally expensive layers are among the ten is random"
    yield "- report, profile: the size of the page, and how long headless Chromium takes to load it and run its scripts"


if __name__ == "__main__":
    main()
