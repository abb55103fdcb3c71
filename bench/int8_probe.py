"""One matrix product in int8, on data that int8 engines are known to get wrong: exact sums, and SQNR.

Usage: python -m bench.int8_probe; writes bench/results/int8_probe.{json,md}. Each engine is asked twice: as it is on
this machine, and with weights as they are made for processors without VNNI instructions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import tsopt
from bench.int8 import ENGINES
from tsopt.compiler.calls.example import as_example
from tsopt.errors import NoGain, TsoptError
from tsopt.quantization.quantize import Int8Options, quantize
from tsopt.runtime.backends.backend import compile as compile_by
from tsopt.runtime.racing.environment import environment

RESULTS = Path(__file__).parent / "results"
INPUTS, OUTPUTS, ROWS = 256, 64, 128
CALLS = 16
Draw = Callable[[torch.Generator, tuple[int, int]], torch.Tensor]


def normal(draw: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=draw)


def uniform(low: float, high: float) -> Draw:
    return lambda draw, shape: low + (high - low) * torch.rand(shape, generator=draw)


DATA: dict[str, tuple[Draw, Draw]] = {
    "normal weights, normal inputs": (normal, normal),
    "normal weights, inputs after ReLU": (normal, lambda draw, shape: normal(draw, shape).relu()),
    "uniform weights in [0, 1], uniform inputs in [0, 1]": (uniform(0, 1), uniform(0, 1)),
    "uniform weights in [-1, 1], uniform inputs in [0.5, 1]": (uniform(-1, 1), uniform(0.5, 1)),
}
EXACT = 64 * 255 * 127


def main() -> None:
    found = {}
    for title, hidden in {"as it is": False, "without VNNI": True}.items():
        with mock.patch("torch.cpu._is_vnni_supported", (lambda: False) if hidden else torch.cpu._is_vnni_supported):
            found[title] = {"exact": _exact(), "sqnr": {name: _sqnr(*draws) for name, draws in DATA.items()}}
    env = environment()
    (RESULTS / "int8_probe.json").write_text(json.dumps({"environment": env.to_json(), "found": found}, indent=1))
    header = ("weights", "data", *ENGINES)
    lines = [f"On {env}.", "", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for title, rows in found.items():
        cells = [_cell(rows["exact"][engine], "{:,.0f}") for engine in ENGINES]
        lines.append(f"| {title} | 64 products of 255 and 127: {EXACT:,} | {' | '.join(cells)} |")
        for name, by_engine in rows["sqnr"].items():
            cells = [_cell(by_engine[engine], "{:.1f} dB") for engine in ENGINES]
            lines.append(f"| {title} | {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"- SQNR of {ROWS} x {INPUTS} x {OUTPUTS} products on data that calibration has not seen; more is better",
        "- without VNNI: weights have 7 bits, so that sums of two products fit into 16 bits; int8-weights is not made",
        "- -: not made, or no faster in int8 than in float32 here",
    ]
    text = "\n".join(lines) + "\n"
    (RESULTS / "int8_probe.md").write_text(text)
    print(text)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _by_engine(
    model: nn.Module, data: list[torch.Tensor], measure: Callable[[tsopt.Executable], float]
) -> dict[str, float | None]:
    program = tsopt.transform(tsopt.capture(model, data[0]))
    options = Int8Options(calibration=data, metric="cosine", max_drop=1.0)
    made = quantize(model, program, as_example(data[0]), {variant for variant, _ in ENGINES.values()}, options)
    found: dict[str, float | None] = {}
    for title, (variant, backend) in ENGINES.items():
        program_in_int8 = made.variants[variant]
        try:
            found[title] = (
                None if isinstance(program_in_int8, NoGain) else measure(compile_by(program_in_int8, backend))
            )
        except TsoptError:
            found[title] = None
    return found


def _exact() -> dict[str, float | None]:
    """The sum of 64 products of the largest integers, of which kernels that add pairs in 16 bits return about half."""
    model = nn.Linear(64, 4, bias=False).eval()
    with torch.no_grad():
        model.weight.fill_(127.0)
    x = torch.full((1, 64), 255.0)
    return _by_engine(model, [x] * CALLS, lambda called: float(called(x).mean()))


def _sqnr(weights: Draw, inputs: Draw) -> dict[str, float | None]:
    draw = torch.Generator().manual_seed(0)
    model = nn.Linear(INPUTS, OUTPUTS, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(weights(draw, (OUTPUTS, INPUTS)))
    data = [inputs(draw, (ROWS, INPUTS)) for _ in range(2 * CALLS)]

    def measure(called: tsopt.Executable) -> float:
        noise = size = 0.0
        with torch.no_grad():
            for x in data[CALLS:]:
                wanted = model(x).double()
                noise += float((called(x).double() - wanted).square().sum())
                size += float(wanted.square().sum())
        return 10 * math.log10(size / noise)

    return _by_engine(model, data[:CALLS], measure)


if __name__ == "__main__":
    main()
