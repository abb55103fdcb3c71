"""How long does one wait until a detector is optimized, how much faster is it, and are the detections the same?

Usage: python -m bench.detectors [MODEL ...]; writes bench/results/detectors.{json,md}. Detectors of torchvision
(`pip install --no-deps torchvision pillow`) with random weights, and a picture of 3 x 240 x 320, which they enlarge.
They cannot be captured as one graph: the parts between what depends on the detections are optimized. Where the
compiled operators do not load, as those of wheels for CUDA beside a CPU build of torch, they are written in Python.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import tsopt
from bench.process import Rows, measure_each
from tsopt.runtime.racing.environment import Environment

RESULTS = Path(__file__).parent / "results"
NAMES = ("fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn")
PICTURE = (3, 240, 320)
ROUNDS, PICTURES = 5, 3
NMS = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
ROI_ALIGN = (
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor"
)


def main() -> None:
    measure_each("bench.detectors:one", NAMES, RESULTS / "detectors.json", line, page)


def one(name: str) -> dict[str, Any]:
    model = load(name)
    draw = torch.Generator().manual_seed(0)
    pictures = [torch.rand(PICTURE, generator=draw) for _ in range(1 + PICTURES)]
    told: list[tuple[float, str]] = []
    start = time.perf_counter()

    def tell(text: str) -> None:
        told.append((time.perf_counter() - start, text))

    fast = tsopt.optimize(model, ([pictures[0]],), cache=False, progress=tell)
    seconds = time.perf_counter() - start
    differences = []
    with torch.no_grad():
        for picture in pictures[1:]:
            wanted, found = tree_leaves(model([picture])), tree_leaves(fast([picture]))
            differences += [_difference(*pair) for pair in zip(wanted, found, strict=True)]
        times = [[_seconds_of(run, pictures[1]) for run in (model, fast)] for _ in range(ROUNDS)]
    return {
        "seconds": seconds,
        "told": told,
        "longest_silence": float(np.diff([0.0, *(at for at, _ in told), seconds]).max()),
        "winner": fast.report.winner,
        "frontend": fast.report.frontend.partition(":")[0],
        "rows": [[row.name, row.status, row.reason] for row in fast.report.rows],
        "difference": max(differences),
        "times": times,
    }


def load(name: str) -> torch.nn.Module:
    """A detector with random weights."""
    define_operators()
    from torchvision.models import detection

    torch.manual_seed(0)
    model: torch.nn.Module = getattr(detection, name)(weights=None, weights_backbone=None)
    return model.eval()


def define_operators() -> None:
    """Makes torchvision's operators known, before it is imported: it fails without them."""
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("bench.detectors needs torchvision: pip install --no-deps torchvision pillow")
    try:
        torch.ops.load_library(Path(spec.submodule_search_locations[0]) / "_C.so")
        return
    except OSError:
        print("torchvision's compiled operators do not load: they are written in Python")
    for schema, function in ((NMS, nms), (f"q{NMS}", nms), (ROI_ALIGN, roi_align)):
        name = f"torchvision::{schema.partition('(')[0]}"
        torch.library.define(name, schema[schema.index("(") :])
        torch.library.impl(name, "CPU", function)
    import_module("torchvision.ops")
    torch.library.register_fake("torchvision::roi_align", fake_roi_align)
    for name, module in list(sys.modules.items()):
        for check in ("_has_ops", "_assert_has_ops"):
            if name.startswith("torchvision.") and hasattr(module, check):
                setattr(module, check, lambda: True)


def nms(boxes: torch.Tensor, scores: torch.Tensor, limit: float) -> torch.Tensor:
    """Of boxes [n, 4] as corners, those that overlap none with a higher score by more than the limit."""
    order = scores.argsort(descending=True, stable=True)
    corners = boxes[order].numpy()
    low, high = corners[:, :2], corners[:, 2:]
    areas = (high - low).prod(1)
    kept: list[int] = []
    left = np.arange(len(corners))
    while len(left):
        first, left = left[0], left[1:]
        kept.append(int(first))
        sides = np.minimum(high[first], high[left]) - np.maximum(low[first], low[left])
        shared = sides.clip(min=0).prod(1)
        left = left[shared <= limit * (areas[first] + areas[left] - shared)]
    return order[kept]


def roi_align(
    features: torch.Tensor, boxes: torch.Tensor, scale: float, height: int, width: int, samples: int, aligned: bool
) -> torch.Tensor:
    """Bilinear samples in a grid of each box (He et al. 2017, arXiv:1703.06870), averaged over each cell.

    Args:
        features: [n, c, h, w].
        boxes: [k, 5]: the picture, and the corners.
        samples: on each side of a cell.
    """
    found = fake_roi_align(features, boxes, scale, height, width, samples, aligned)
    corners = boxes[:, 1:] * scale - (0.5 if aligned else 0.0)
    size = corners[:, 2:] - corners[:, :2]
    size = size if aligned else size.clamp(min=1.0)
    places = [
        corners[:, axis, None] + (torch.arange(cells * samples) + 0.5) / (cells * samples) * size[:, axis, None]
        for axis, cells in ((0, width), (1, height))
    ]
    for number, picture in enumerate(features):
        own = (boxes[:, 0] == number).nonzero()[:, 0]
        if not len(own):
            continue
        x, y = (place[own] for place in places)
        across = (2 * x / (picture.shape[2] - 1) - 1)[:, None].expand(-1, height * samples, -1)
        down = (2 * y / (picture.shape[1] - 1) - 1)[:, :, None].expand(-1, -1, width * samples)
        grid = torch.stack([across, down], -1).reshape(1, -1, width * samples, 2)
        sampled = F.grid_sample(picture[None], grid, padding_mode="border", align_corners=True)
        cells = F.avg_pool2d(sampled, samples)[0].reshape(len(picture), len(own), height, width)
        found[own] = cells.transpose(0, 1)
    return found


def fake_roi_align(
    features: torch.Tensor, boxes: torch.Tensor, scale: float, height: int, width: int, samples: int, aligned: bool
) -> torch.Tensor:
    return features.new_empty(boxes.shape[0], features.shape[1], height, width)


def _difference(wanted: torch.Tensor, found: torch.Tensor) -> float:
    if wanted.shape != found.shape:
        return float("inf")
    return float((found.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0


def _seconds_of(run: Any, picture: torch.Tensor) -> float:
    start = time.perf_counter()
    run([picture])
    return time.perf_counter() - start


def line(name: str, row: dict[str, Any]) -> str:
    eager, ours = np.array(row["times"]).T
    ratios = eager / ours
    cells = (
        name,
        row["winner"],
        f"{np.median(eager):.2f}",
        f"{np.median(ours):.2f}",
        f"{np.median(ratios):.2f}x [{ratios.min():.2f}, {ratios.max():.2f}]",
        f"{row['difference']:.1e}",
        f"{row['seconds']:.0f}",
        str(len(row["told"])),
        f"{row['longest_silence']:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def page(environment: Environment, rows: Rows) -> Iterator[str]:
    yield (
        "| model | winner | eager, s | tsopt, s | ratio, lowest and highest | largest difference | optimize, s "
        "| lines of progress | longest silence, s |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|"
    yield from (line(name, row) for name, row in rows.items())
    yield ""
    yield f"- a picture of {' x '.join(map(str, PICTURE))}; {ROUNDS} calls of each in turns, after `optimize`"
    yield f"- largest difference: of boxes, labels, scores and masks, on {PICTURES} other pictures"
    yield from (f"- {name}: {row['frontend']}" for name, row in rows.items())
    for name, row in rows.items():
        yield from (f"- {name}, {title}: {status}; {reason}" for title, status, reason in row["rows"] if reason)


if __name__ == "__main__":
    main()
