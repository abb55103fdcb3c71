"""Models that eager runs: `optimize` hands back something that equals eager, and says why where it is eager."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import rnn

import tsopt
from bench.hazards import ANY, RIGHT, Case, Outcome

OPTIONS: dict[str, Any] = {"seconds": 0.05, "backends": ("eager",), "cache": False, "isolate": False}
Made = tuple[Callable[..., Any], Any]  # a model, and a call of it


class Layers(nn.Module):
    """Two layers for a forward that is given as a function."""

    def __init__(self, function: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def graph() -> tuple[torch.Tensor, torch.Tensor]:
    """Six nodes and fourteen edges."""
    return torch.randn(6, 8), torch.randint(0, 6, (2, 14))


def of(function: Callable[..., Any], example: Any) -> Callable[[], Made]:
    return lambda: (Layers(function).eval(), example() if callable(example) else example)


def transformer(name: str, config: Callable[[Any], Any], call: Callable[[], Any]) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        return getattr(transformers, name)(config(transformers)).eval(), call()

    return make


# ---- graphs of nodes and edges -----------------------------------------------------------------------------


def messages(net: Layers, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    source, target = edges
    return net.head(torch.zeros_like(x).index_add(0, target, net.layer(x)[source]).relu())


def messages_without_loops(net: Layers, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    return messages(net, x, edges[:, edges[0] != edges[1]])


def messages_one_by_one(net: Layers, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    hidden = net.layer(x)
    return net.head(torch.stack([hidden[node] for node in edges[0].tolist()]))


def coalesced(net: Layers, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    keys = torch.unique(edges[0] * len(x) + edges[1])
    return messages(net, x, torch.stack([keys // len(x), keys % len(x)]))


def pooled(net: Layers, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    groups = int(batch.max()) + 1
    sums = torch.zeros(groups, 8).index_add(0, batch, net.layer(x))
    return net.head(sums / torch.bincount(batch, minlength=groups)[:, None])


def sparse_product(net: Layers, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (len(x), len(x)))
    return net.head(torch.sparse.mm(adjacency, net.layer(x)))


# ---- sizes and answers that values decide ------------------------------------------------------------------


def chosen(net: Layers, x: torch.Tensor) -> dict[str, torch.Tensor]:
    scores = net.head(net.layer(x)).softmax(1)
    keep = (scores[:, 0] > 0.4).nonzero().flatten()
    return {"scores": scores[keep], "places": keep}


def masked(net: Layers, x: torch.Tensor) -> torch.Tensor:
    hidden = net.layer(x)
    return net.head(hidden) + torch.masked_select(hidden, hidden > 0).sum()


def a_float(net: Layers, x: torch.Tensor) -> float:
    return float(net.head(x).sum())


def texts(net: Layers, x: torch.Tensor) -> list[str]:
    return [("no", "yes")[int(i)] for i in net.head(x).argmax(1)]


def through_numpy(net: Layers, x: torch.Tensor) -> torch.Tensor:
    return net.head(torch.from_numpy(np.sort(net.layer(x).detach().numpy(), axis=1)))


def packed(net: Layers, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    bundle = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return net.head(rnn.pad_packed_sequence(rnn.PackedSequence(net.layer(bundle.data), *bundle[1:]), True)[0])


def nested(net: Layers, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net.head(torch.nested.nested_tensor([x[:2], x[2:]]).to_padded_tensor(0.0))


def spectrum(net: Layers, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.ifft(torch.fft.fft(net.layer(x)) * torch.exp(1j * x)).abs()


def a_script(net: Layers, x: torch.Tensor) -> torch.Tensor:
    return torch.jit.script(_halved)(net.layer(x))


def _halved(x: torch.Tensor) -> torch.Tensor:
    while float(x.norm()) > 1.0:
        x = x * 0.5
    return x


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def a_function_of_its_own(net: Layers, x: torch.Tensor) -> torch.Tensor:
    return net.head(_Double.apply(net.layer(x)))


def reads_memory(net: Layers, x: torch.Tensor) -> torch.Tensor:
    hidden = net.layer(x).contiguous()
    return net.head(hidden) + (0.0 if hidden.data_ptr() else 1.0)


@dataclasses.dataclass
class Found:
    scores: torch.Tensor
    names: set[str]


def a_set(net: Layers, x: torch.Tensor) -> Found:
    return Found(net.head(x), {"a", "b"})


def at_a_point(net: Layers, x: torch.Tensor) -> torch.Tensor:
    start = int(x.argmax()) % 4
    return net.head(x[:, start : start + 4].repeat(1, 2))


# ---- inputs and weights that no program takes --------------------------------------------------------------


def _quantized() -> Made:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        return torch.ao.quantization.quantize_dynamic(layers, {nn.Linear}, dtype=torch.qint8), torch.randn(3, 8)


def _sparse_input() -> Made:
    return Layers(lambda net, x: net.head(torch.sparse.mm(x, net.layer.weight))).eval(), torch.eye(8).to_sparse()


def _sparse_weight() -> Made:
    net = Layers(lambda net, x: torch.sparse.mm(net.table, x)).eval()
    net.register_buffer("table", torch.eye(8).to_sparse())
    return net, torch.randn(8, 3)


def _no_finite_value() -> Made:
    return Layers(lambda net, x: net.head(x) / torch.zeros(2) - net.head(x) / torch.zeros(2)).eval(), torch.randn(2, 8)


def _only_numbers() -> Made:
    return Layers(lambda net, x: x.shape[0] * 2).eval(), torch.randn(2, 8)


def mobilevit(t: Any) -> Any:
    sizes = {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16]}
    return t.MobileViTConfig(image_size=64, num_attention_heads=2, num_labels=3, **sizes)


def mgp_str(t: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_token_length": 7}
    words = {"num_character_labels": 11, "num_bpe_labels": 13, "num_wordpiece_labels": 17}
    return t.MgpstrConfig(image_size=[32, 128], patch_size=4, **sizes, **words)


def udop(t: Any) -> Any:
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    places = {"image_size": 32, "patch_size": 16, "decoder_start_token_id": 0, "max_2d_position_embeddings": 64}
    return t.UdopConfig(**sizes, **places)


def longformer(t: Any) -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {"attention_window": 4, "max_position_embeddings": 64, "sep_token_id": 2, "pad_token_id": 1}
    return t.LongformerConfig(intermediate_size=37, **sizes, **words)


def pixels(height: int, width: int) -> Callable[[], Any]:
    return lambda: {"pixel_values": torch.randn(1, 3, height, width)}


def document() -> dict[str, torch.Tensor]:
    words, boxes = torch.randint(3, 99, (1, 7)), torch.rand(1, 7, 4).sort(-1).values
    answer = torch.randint(3, 99, (1, 5))
    return {"input_ids": words, "bbox": boxes, "pixel_values": torch.randn(1, 3, 32, 32), "decoder_input_ids": answer}


def question() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[0, 5, 6, 2, 2, 7, 8, 9, 10, 11, 12, 2]])}


def some(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


MODELS: dict[str, Callable[[], Made]] = {
    "messages along edges": of(messages, graph),
    "messages, without the loops": of(messages_without_loops, graph),
    "messages, one by one": of(messages_one_by_one, graph),
    "messages along unique edges": of(coalesced, graph),
    "pooled by groups, as many as the values say": of(
        pooled, lambda: (torch.randn(6, 8), torch.tensor([0, 0, 1, 1, 2, 2]))
    ),
    "a sparse product": of(sparse_product, graph),
    "rows above a limit": of(chosen, some(6, 8)),
    "masked_select": of(masked, some(6, 8)),
    "a number for an answer": of(a_float, some(6, 8)),
    "texts for an answer": of(texts, some(6, 8)),
    "through numpy": of(through_numpy, some(6, 8)),
    "packed sequences": of(packed, lambda: (torch.randn(3, 5, 8), torch.tensor([5, 2, 3]))),
    "a nested tensor": of(nested, some(6, 8)),
    "complex spectra": of(spectrum, some(6, 8)),
    "a script within": of(a_script, some(6, 8)),
    "an autograd.Function through numpy": of(a_function_of_its_own, some(6, 8)),
    "reads the address of a tensor": of(reads_memory, some(6, 8)),
    "a set among the answers": of(a_set, some(6, 8)),
    "a slice from where the largest is": of(at_a_point, some(6, 8)),
    "quantized weights": _quantized,
    "a sparse input": _sparse_input,
    "a sparse weight": _sparse_weight,
    "no finite value": _no_finite_value,
    "a number of the shapes for an answer": _only_numbers,
    "MobileViT, classes": transformer("MobileViTForImageClassification", mobilevit, pixels(64, 64)),
    "MobileViT, segments": transformer("MobileViTForSemanticSegmentation", mobilevit, pixels(64, 64)),
    "MGP-STR": transformer("MgpstrForSceneTextRecognition", mgp_str, pixels(32, 128)),
    "UDOP": transformer("UdopForConditionalGeneration", udop, document),
    "Longformer, questions": transformer("LongformerForQuestionAnswering", longformer, question),
}


def outcome(make: Callable[[], Made]) -> Outcome:
    """What becomes of a model: an error is wrong, by whatever name, for eager runs it."""
    torch.manual_seed(0)
    model, example = make()
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    args = args if isinstance(args, tuple) else (args,)
    with torch.no_grad():
        wanted = model(*args, **kwargs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fast = tsopt.optimize(model, example, **OPTIONS)
    except Exception as error:
        what = error.what if isinstance(error, tsopt.TsoptError) else str(error).partition("\n")[0]
        return Outcome("wrong", f"{type(error).__name__}: {what[:160]}")
    found = fast(*args, **kwargs)
    if not _same(found, wanted):
        return Outcome("wrong", f"other than eager, {fast!r}"[:200])
    if fast.backend == "eager" and not (fast.report.why and len(fast.report.rows)):
        return Outcome("wrong", "eager, and the report does not say why")
    return RIGHT


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
    if dataclasses.is_dataclass(b) and not hasattr(b, "keys"):
        return type(a) is type(b) and _same(vars(a), vars(b))
    if hasattr(b, "keys"):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and (a == b or type(b).__module__.startswith("transformers"))


CASES: tuple[Case, ...] = tuple(
    Case(name, lambda backend, make=make: outcome(make), ANY)  # type: ignore[misc]
    for name, make in MODELS.items()
)
