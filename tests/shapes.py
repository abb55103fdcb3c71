"""Models of many shapes, small, as people write them: name -> how to make one, and a call of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tsopt.compiler.calls.example import Example

SHAPES: dict[str, Shape] = {}


@dataclass(frozen=True)
class Shape:
    """A way to make a model, a call of it, and whether it is a single graph."""

    make: Callable[[], Any]
    call: Callable[[], Example]
    one_graph: bool = True

    def load(self) -> tuple[Any, Example]:
        torch.manual_seed(0)
        model = self.make()
        return (model.eval() if isinstance(model, nn.Module) else model), self.call()


def shape(*inputs: Any, one_graph: bool = True, **named: Any) -> Callable[[Any], Any]:
    """Registers a class or a function that makes a model; inputs are sizes of random tensors, or what is passed."""

    def value(item: Any) -> Any:
        return torch.randn(item) if isinstance(item, tuple) else item() if callable(item) else item

    def register(make: Any) -> Any:
        def call() -> Example:
            return tsopt.example(*map(value, inputs), **{name: value(item) for name, item in named.items()})

        SHAPES[make.__name__] = Shape(make, call, one_graph)
        return make

    return register


def block(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


@shape((1, 3, 16, 16))
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = block(3, 8), block(8, 16), block(16, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last, self.out = block(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.middle(self.down2(F.max_pool2d(a, 2)))
        return self.out(self.last(torch.cat([a, self.up(b)], 1)))


@shape((2, 5, 6), lambda: (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)))
class LstmWithState(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return self.head(y), state


@shape((5, 2, 6))
class BidirectionalGru(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 4, num_layers=2, bidirectional=True)

    def forward(self, x):
        y, h = self.gru(x)
        return y[-1], h


@shape((3, 4), lambda: torch.randint(0, 5, (3, 2)))
class Categorical(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 3) for _ in range(2))
        self.norm, self.body = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(10, 16), nn.SELU(), nn.Linear(16, 1))

    def forward(self, numbers, classes):
        found = [table(classes[:, i]) for i, table in enumerate(self.tables)]
        return self.body(torch.cat([self.norm(numbers), *found], 1)).squeeze(-1)


@shape((2, 10))
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(10, 8 * 4 * 4)
        self.body = nn.Sequential(
            *(nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.BatchNorm2d(4)),
            *(nn.LeakyReLU(0.2, True), nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Tanh()),
        )

    def forward(self, z):
        return self.body(self.start(z).view(-1, 8, 4, 4))


@shape((2, 3, 20))
class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.turn, self.head = nn.Linear(32, 9), nn.Linear(32, 4)

    def forward(self, points):
        turn = self.turn(self.each(points).max(2).values).view(-1, 3, 3) + torch.eye(3)
        return F.log_softmax(self.head(self.each(turn @ points).amax(2)), -1), turn


@shape(left=(2, 8), right=(2, 8))
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, left, right):
        a, b = self.body(left), self.body(right)
        return {"distance": F.pairwise_distance(a, b), "cosine": F.cosine_similarity(a, b), "codes": [a, b]}


@shape((1, 3, 12, 12))
class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(
            [nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 5, padding=2)]
        )
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(3, 4, 1))

    def forward(self, x):
        return torch.cat([*(F.relu(branch(x)) for branch in self.branches), self.pool(x)], 1).mean((2, 3))


@shape((2, 6))
class EnsembleInALoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(5))

    def forward(self, x):
        total = torch.zeros(x.shape[0], 3)
        for member in self.members:
            total = total + member(x).softmax(-1)
        return total / len(self.members)


@shape((6, 8))
class MaskedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + (weights * (chosen == i)).sum(-1, keepdim=True) * expert(x)
        return out


@shape((6, 8), one_graph=False)
class RoutedExperts(nn.Module):
    """Each expert sees its own rows alone."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                out[mask] = expert(x[mask])
        return out


@shape((5, 4), lambda: torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]]))
class MessagePassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(8, 4), nn.GRUCell(4, 4)

    def forward(self, nodes, edges):
        for _ in range(2):
            sent = F.relu(self.message(torch.cat([nodes[edges[0]], nodes[edges[1]]], -1)))
            summed = torch.zeros_like(nodes).scatter_add(0, edges[1][:, None].expand_as(sent), sent)
            nodes = self.update(summed, nodes)
        return nodes


@shape(lambda: torch.rand(6, 4).cumsum(1), lambda: torch.rand(6), one_graph=False)
def Suppression():
    def suppress(boxes, scores, limit: float = 0.3):
        kept = []
        order = scores.argsort(descending=True)
        while order.numel() > 0:
            best = order[0]
            kept.append(best)
            low = torch.maximum(boxes[best, :2], boxes[order, :2])
            high = torch.minimum(boxes[best, 2:], boxes[order, 2:])
            shared = (high - low).clamp(min=0).prod(1)
            area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
            order = order[1:][(shared / (area[best] + area[order] - shared))[1:] <= limit]
        return torch.stack(kept)

    return suppress


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


@shape(lambda: torch.randint(0, 20, (1, 7)))
class DecoderByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.qkv, self.out = (
            nn.Embedding(20, 16),
            RmsNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
        )
        self.register_buffer("mask", torch.full((32, 32), -math.inf).triu(1), persistent=False)

    def turned(self, x):
        t = torch.arange(x.shape[-2], dtype=torch.float32)
        angle = torch.outer(t, 1e4 ** (-torch.arange(0, 4, 2).float() / 4))
        angle = torch.cat([angle, angle], -1)
        half = torch.cat([-x[..., 2:], x[..., :2]], -1)
        return x * angle.cos() + half * angle.sin()

    def forward(self, tokens):
        x = self.table(tokens)
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 4, 4).permute(2, 0, 3, 1, 4)
        scores = self.turned(q) @ self.turned(k).transpose(-1, -2) / 2 + self.mask[:n, :n]
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, 16))
        return x @ self.table.weight.t()


class Answer(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor
    nothing: Any = None


@shape((2, 4))
class NamedAnswer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return Answer(self.head(hidden), hidden)


@shape((2, 6, 3))
class UnrolledCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 5)
        out = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            out.append(self.head(h))
        return torch.stack(out, 1)


@shape((2, 5, 8), src_key_padding_mask=lambda: torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))
def EncoderWithMask():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)


@shape((2, 4, 8), (2, 3, 8))
def WholeTransformer():
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


@shape((4, 3))
def ScriptedByValues():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            y = self.layer(x)
            if bool(y.sum() > 0):
                y = y * 2
            while bool(y.norm() > 1):
                y = y / 2
            return y

    return torch.jit.script(Decides().eval())


@shape((1, 1, 200))
class Waveform(nn.Module):
    """Dilated convolutions with gates, as in WaveNet."""

    def __init__(self):
        super().__init__()
        self.start = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(4))
        self.mixes = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))

    def forward(self, x):
        x, skips = self.start(x), 0
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = mix(torch.tanh(a) * torch.sigmoid(b))
            x, skips = x + y, skips + y
        return skips.mean(-1)


@shape((1, 400))
class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.head = nn.Linear(33, 4)

    def forward(self, wave):
        found = torch.stft(wave, 64, 32, window=self.window, return_complex=True)
        return self.head(torch.log1p(found.abs()).transpose(1, 2))


@shape((2, 3, 8, 8))
class SqueezeAndShuffle(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.Hardswish(), nn.Conv2d(2, 8, 1))

    def forward(self, x):
        x = F.hardswish(self.first(x))
        x = x * F.hardsigmoid(self.squeeze(x))
        b, c, h, w = x.shape
        x = self.deep(x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w))
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False).flatten(1)


@shape((2, 3, 8, 8))
class Windows(nn.Module):
    """Attention in shifted windows."""

    def __init__(self):
        super().__init__()
        self.patch, self.attention = nn.Conv2d(3, 8, 2, 2), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.patch(x).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        y = torch.roll(x, (-1, -1), (1, 2)).view(b, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
        y, _ = self.attention(y, y, y, need_weights=False)
        y = y.view(b, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(b, h, w, c)
        return x + torch.roll(y, (1, 1), (1, 2))


@shape((3, 6), scale=2.0, names="ab")
class OptionsOfManyKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, mask=None, *, scale: float = 1.0, names: str = "a", **rest):
        y = self.layer(x) * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return {name: y + i for i, name in enumerate(names)} | rest


@shape((2, 8))
class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8) / 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        code = F.softplus(F.linear(x, self.weight))
        return F.linear(code, self.weight.t()) * self.scale, code, x


@shape((4, 5))
class Normalized(nn.Module):
    """Weight norm and spectral norm."""

    def __init__(self):
        super().__init__()
        parametrizations = nn.utils.parametrizations
        self.body = parametrizations.weight_norm(nn.Linear(5, 6))
        self.head = parametrizations.spectral_norm(nn.Linear(6, 2))

    def forward(self, x):
        return self.head(F.mish(self.body(x)))


@shape((2, 4), lambda: {"a": torch.randn(2, 4), "b": [torch.randn(2, 4), torch.randn(2, 4)]})
class NestedInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, more):
        return self.layer(x + more["a"]) * more["b"][0] - more["b"][1], more["a"]


@shape(lambda: torch.randint(0, 9, (2, 6)), lambda: torch.tensor([6, 4]))
class Tagger(nn.Module):
    """A CRF's forward pass over padded sentences."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(9, 6), nn.Conv1d(6, 6, 3, padding=1), nn.Linear(6, 4)
        self.moves = nn.Parameter(torch.randn(4, 4))

    def forward(self, words, lengths):
        scores = self.head(torch.relu(self.body(self.table(words).transpose(1, 2))).transpose(1, 2))
        alpha = scores[:, 0]
        for i in range(1, words.shape[1]):
            new = torch.logsumexp(alpha[:, :, None] + self.moves, 1) + scores[:, i]
            alpha = torch.where((i < lengths)[:, None], new, alpha)
        return torch.logsumexp(alpha, -1), scores.argmax(-1)


@shape((2, 6, 4))
class StateSpace(nn.Module):
    """A diagonal state-space layer, scanned."""

    def __init__(self):
        super().__init__()
        self.decay, self.enter, self.leave = (nn.Parameter(torch.rand(4)) for _ in range(3))

    def forward(self, x):
        state, out = torch.zeros_like(x[:, 0]), []
        for i in range(x.shape[1]):
            state = torch.exp(-self.decay) * state + self.enter * x[:, i]
            out.append(self.leave * state + x[:, i])
        return torch.stack(out, 1)
