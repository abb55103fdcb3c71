"""Peak memory of `optimize`: of the caller and all its processes together, above what the caller held before.

Usage: python -m bench.memory [MODEL ...]; writes bench/results/memory.{json,md}. Linux only.

Proportional set sizes (each page divided by the number of processes that have it) are sampled ten times a second, in
the whole tree of processes; files in shared memory count as far as a process has mapped and read them.
`decoder_1500mb` runs in a control group of 6.5 GB where this process may create one. `NAME, quantization` is the peak
of calibration, measuring and choice alone, in one process that has captured the model before.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import transformers

import tsopt
from bench.int8 import drawn_like
from bench.models import MODELS, Case, tokens
from bench.process import Rows, measure_each
from tsopt.quantization.quantize import Int8Options, quantize
from tsopt.runtime.layer_table import summary
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.sandbox.processes import descendants

RESULTS = Path(__file__).parent / "results"
SAMPLE = 0.1  # seconds
LIMIT = 6_500_000_000  # bytes


def decoder() -> Case:
    """375 million parameters of float32: 1.5 GB."""
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=12,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return Case(lambda: transformers.LlamaForCausalLM(config), lambda: tsopt.example(tokens(32)))


CASES: dict[str, Case] = {name: MODELS[name] for name in ("mlp", "resnet18", "resnet50", "bert_base", "gpt2")}
CASES["decoder_1500mb"] = decoder()
LIMITED = {"decoder_1500mb"}
QUANTIZATION = ", quantization"
CASES |= {f"{name}{QUANTIZATION}": MODELS[name] for name in ("resnet50", "bert_base")}
VARIANTS = ("int8-static", "int8-weights", "int8")

CHILD = """
import sys
from bench.memory import child
child(sys.argv[1])
"""


def main() -> None:
    measure_each("bench.memory:one", CASES, RESULTS / "memory.json", line, page)


def child(name: str) -> None:
    """Loads a model, waits for a line, optimizes it, says what came of it."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    model, example = CASES[name].load()
    work = quantized(model, example) if name.endswith(QUANTIZATION) else optimized(model, example)
    weights = sum(p.nbytes for p in {p.data_ptr(): p for p in model.parameters()}.values())
    print(json.dumps({"weights": weights}), flush=True)
    sys.stdin.readline()
    print(json.dumps(work()), flush=True)


def optimized(model: Any, example: tsopt.Example) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        report = tsopt.optimize(model, example, cache=False).report
        return {"winner": report.winner, "rows": {row.name: row.status for row in report.rows}}

    return work


def quantized(model: Any, example: tsopt.Example) -> Callable[[], dict[str, Any]]:
    program = tsopt.transform(tsopt.capture(model, example))
    data, _ = drawn_like(example)

    def work() -> dict[str, Any]:
        start = time.perf_counter()
        found = quantize(model, program, example, VARIANTS, Int8Options(calibration=data))
        spent = time.perf_counter() - start
        return {
            "winner": f"{len(data)} inputs, {spent:.0f} s",
            "rows": {name: summary(r) for name, r in found.layers.items()},
        }

    return work


def one(name: str) -> dict[str, Any]:
    """The peak of one model, in bytes."""
    with control_group(LIMIT if name in LIMITED else None) as (join, limited):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=join,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        weights = json.loads(process.stdout.readline())["weights"]
        before = held_by([process.pid])
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(process.stdout or ()))
        reader.start()
        process.stdin.write("go\n")
        process.stdin.flush()
        peak = 0
        while process.poll() is None:
            pids = running([process.pid, *descendants(process.pid)])
            held = held_by(pids)
            # Where one has ended in between, its share of what is mapped may have been counted twice.
            if pids == running(pids):
                peak = max(peak, held - before)
            time.sleep(SAMPLE)
        reader.join()
    found = json.loads(said[-1]) if said and process.returncode == 0 else {"winner": "", "rows": {}}
    row = {"weights": weights, "peak": peak, "limit": limited, "code": process.returncode}
    return row | found


def running(pids: Iterable[int]) -> list[int]:
    """Those that have not ended; a process that has holds no memory, but keeps its number until its parent asks."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/statm").read_text().split()[0] != "0":
                found.append(pid)
    return found


def held_by(pids: Iterable[int]) -> int:
    """The proportional set sizes of processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


@contextlib.contextmanager
def control_group(limit: int | None) -> Iterator[tuple[Any, int | None]]:
    """What makes a new process join a group with this limit, and the limit; None twice where there can be none."""
    made = None
    for line_ in Path("/proc/self/cgroup").read_text().splitlines() if limit else ():
        _, controllers, path = line_.split(":", 2)
        root, file = ("", "memory.max") if not controllers else ("memory", "memory.limit_in_bytes")
        place = Path("/sys/fs/cgroup") / root / path.lstrip("/") / f"tsopt-bench-{os.getpid()}"
        if not controllers or controllers == "memory":
            with contextlib.suppress(OSError):
                place.mkdir()
                made = place
                (place / file).write_text(str(limit))
                break
    try:
        if made is None:
            yield None, None
        else:
            yield (lambda: (made / "cgroup.procs").write_text(str(os.getpid()))), limit
    finally:
        if made is not None:
            for _ in range(50):  # processes that have been killed take a moment to leave
                with contextlib.suppress(OSError):
                    made.rmdir()
                    break
                time.sleep(0.1)


def line(name: str, row: dict[str, Any]) -> str:
    weights, peak = row["weights"] / 1e6, row["peak"] / 1e6
    ended = row["winner"] or f"ended with {row['code']}"
    if name.endswith(QUANTIZATION):
        return f"| {name.removesuffix(QUANTIZATION)} | {weights:.0f} | {peak:.0f} | {peak / weights:.1f} | {ended} |"
    limit = f"{row['limit'] / 1e9:.1f} GB" if row["limit"] else ""
    return f"| {name} | {weights:.0f} | {peak:.0f} | {max(0.0, peak - 800) / weights:.1f} | {limit} | {ended} |"


def page(environment: Environment, rows: Rows) -> Iterator[str]:
    yield "Peak memory of `optimize` with default settings in MB: the caller and all its processes, above what the"
    yield "caller held before. `times the weights`: the peak less 800 MB, which torch and the engines take."
    yield ""
    yield "| model | weights | peak | times the weights | limit | winner |"
    yield "|---|--:|--:|--:|--:|---|"
    yield from (line(name, row) for name, row in rows.items() if not name.endswith(QUANTIZATION))
    if any(name.endswith(QUANTIZATION) for name in rows):
        yield ""
        yield "Peak memory of quantization in MB, for the three int8 variants, above that of the captured program:"
        yield ""
        yield "| model | weights | peak | times the weights | calibration |"
        yield "|---|--:|--:|--:|---|"
        yield from (line(name, row) for name, row in rows.items() if name.endswith(QUANTIZATION))


if __name__ == "__main__":
    main()
