"""How long does one wait until a detector is optimized, how much faster is it, and are the detections the same?

Usage: python -m bench.detectors [MODEL ...]; writes bench/results/detectors.{json,md}. Detectors of torchvision
(`pip install --no-deps torchvision pillow`) with random weights, a picture of 3 x 240 x 320. They are no single graph:
the parts between what depends on the detections are optimized. Where torchvision's compiled operators do not load, as
those of its wheels for CUDA beside a CPU build of torch, they are written in Python here.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import tsopt
from bench.process import Rows, measure_each
from tsopt.runtime.racing.environment import Environment

RESULTS = Path(__file__).parent / "results"
NAMES = ("fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn")
PICTURE = (3, 240, 320)
ROUNDS, PICTURES = 5, 3


def main() -> None:
    measure_each("bench.detectors:one", NAMES, RESULTS / "detectors.json", line, page)


def one(name: str) -> dict[str, Any]:
    model = load(name)
    draw = torch.Generator().manual_seed(0)
    pictures = [torch.rand(PICTURE, generator=draw) for _ in range(1 + PICTURES)]
    stages: list[str] = []
    start = time.perf_counter()
    fast = tsopt.optimize(model, ([pictures[0]],), cache=False, progress=lambda stage, *_: stages.append(str(stage)))
    seconds = time.perf_counter() - start
    differences = []
    with torch.no_grad():
        for picture in pictures[1:]:
            for wanted, found in zip(tree_leaves(model([picture])), tree_leaves(fast([picture])), strict=True):
                is_equal = wanted.shape == found.shape
                differences.append(float((found.double() - wanted.double()).abs().max()) if is_equal else float("inf"))
        times = [[seconds_of(run, pictures[1]) for run in (model, fast)] for _ in range(ROUNDS)]
    return {
        "seconds": seconds,
        "stages": stages,
        "winner": fast.report.winner,
        "frontend": fast.report.frontend,
        "difference": max(differences),
        "times": times,
    }


def seconds_of(run: Any, picture: torch.Tensor) -> float:
    start = time.perf_counter()
    run([picture])
    return time.perf_counter() - start


def load(name: str) -> torch.nn.Module:
    """A detector with random weights, and norms as they are after training."""
    define_operators()
    from torchvision.models import detection

    torch.manual_seed(0)
    model: torch.nn.Module = getattr(detection, name)(weights=None, weights_backbone=None)
    return model.eval()


def define_operators() -> None:
    """Writes the operators of torchvision in Python if its compiled ones do not load."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        raise SystemExit("detectors need torchvision: pip install --no-deps torchvision pillow")
    try:
        torch.ops.load_library(Path(package.origin).parent / "_C.so")
        return
    except OSError:  # it needs the libraries of CUDA
        for name in ("nms", "qnms"):  # torchvision itself says what they return
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
        torch.library.define(
            "torchvision::roi_align",
            "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
            "int sampling_ratio, bool aligned) -> Tensor",
        )
        torch.library.impl("torchvision::nms", "CPU", nms)
        torch.library.impl("torchvision::roi_align", "CPU", roi_align)
    import torchvision.extension
    from torchvision.ops import roi_align as aligning

    torch.library.register_fake("torchvision::roi_align", fake_roi_align)
    for module in (torchvision.extension, sys.modules[aligning.__module__]):
        module._has_ops = lambda: True


def nms(boxes: torch.Tensor, scores: torch.Tensor, limit: float) -> torch.Tensor:
    """Of boxes [n, 4] as corners, those that overlap none with a higher score by more than the limit."""
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    kept: list[int] = []
    left = torch.ones(len(boxes), dtype=torch.bool)
    for place in range(len(boxes)):
        if not left[place]:
            continue
        kept.append(place)
        low = torch.maximum(boxes[place, :2], boxes[place + 1 :, :2])
        high = torch.minimum(boxes[place, 2:], boxes[place + 1 :, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        left[place + 1 :] &= shared / (areas[place] + areas[place + 1 :] - shared) <= limit
    return order[kept]


def roi_align(
    features: torch.Tensor, boxes: torch.Tensor, scale: float, height: int, width: int, samples: int, aligned: bool
) -> torch.Tensor:
    """torchvision's own formula in Python."""
    from torchvision.ops.roi_align import _roi_align

    uncompiled = getattr(_roi_align, "__wrapped__", _roi_align)
    return uncompiled(features, boxes, scale, height, width, samples, aligned)


def fake_roi_align(
    features: torch.Tensor, boxes: torch.Tensor, scale: float, height: int, width: int, samples: int, aligned: bool
) -> torch.Tensor:
    return features.new_empty(boxes.shape[0], features.shape[1], height, width)


def line(name: str, row: dict[str, Any]) -> str:
    times = np.array(row["times"])
    ratios = times[:, 0] / times[:, 1]
    cells = (
        name,
        f"{row['difference']:.1e}",
        f"{row['seconds']:.0f}",
        str(len(row["stages"])),
        row["winner"],
        f"{np.median(times[:, 0]):.2f}",
        f"{np.median(times[:, 1]):.2f}",
        f"{np.median(ratios):.2f}x [{ratios.min():.2f}, {ratios.max():.2f}]",
    )
    return f"| {' | '.join(cells)} |"


def page(environment: Environment, rows: Rows) -> Iterator[str]:
    yield f"Detectors of torchvision, random weights, a picture of {' x '.join(map(str, PICTURE))}, {ROUNDS} rounds."
    yield ""
    yield (
        "| model | largest difference | optimize, s | lines of progress | winner | eager, s | tsopt, s "
        "| ratio, lowest and highest |"
    )
    yield "|---|--:|--:|--:|---|--:|--:|---|"
    yield from (line(name, row) for name, row in rows.items())


if __name__ == "__main__":
    main()
