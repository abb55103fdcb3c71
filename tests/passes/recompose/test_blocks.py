"""Blocks of well-known models, written by hand as people write them, end with one op each."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import check
from tests.passes.recompose.examples import op_of, repeated, values
from tsopt.passes import SIMPLIFY, STANDARD


class HandLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.g, self.b, self.eps = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width)), eps

    def forward(self, x):
        m = x.mean(-1, keepdim=True)
        return self.g * (x - m) / torch.sqrt(((x - m) ** 2).mean(-1, keepdim=True) + self.eps) + self.b


class HandRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


def hand_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class MinGPT(nn.Module):
    """A decoder block: one projection, a causal buffer, dropouts, a GELU by hand."""

    def __init__(self, width=16, heads=4, length=8):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln_1, self.ln_2 = HandLayerNorm(width), HandLayerNorm(width)
        self.fc, self.proj, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
        self.heads = heads

    def attend(self, x):
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.c_attn(x).split(c, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.drop(F.softmax(att, dim=-1)) @ v
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.drop(self.proj(hand_gelu(self.fc(self.ln_2(x)))))


class Vit(nn.Module):
    """Patches by a convolution, a class token, packed q, k, v, a GELU with erf."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.patch, self.heads = nn.Conv2d(3, width, 4, 4), heads
        self.token, self.pos = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 5, width))
        self.norm1, self.norm2 = HandLayerNorm(width, 1e-6), HandLayerNorm(width, 1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.pos
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        att = ((q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        x = x + self.out((att @ v).transpose(1, 2).reshape(b, n, c))
        h = self.fc1(self.norm2(x))
        return (x + self.fc2(h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))))[:, 0]


class Einops(nn.Module):
    """Attention by einsum, patches that stay permuted."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.patch, self.heads, self.norm = nn.Conv2d(3, width, 4, 4), heads, HandLayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        b, n, c = x.shape
        q, k, v = (part.view(b, n, self.heads, -1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        att = (torch.einsum("bihd,bjhd->bhij", q, k) * (c // self.heads) ** -0.5).softmax(-1)
        return x + self.out(F.gelu(torch.einsum("bhij,bjhd->bihd", att, v).reshape(b, n, c)))


class Swin(nn.Module):
    """Shifted windows, a table of relative positions, a mask of -100 for each window."""

    def __init__(self, width=12, heads=3, window=2, size=4):
        super().__init__()
        self.window, self.heads, self.shift = window, heads, window // 2
        self.norm, self.qkv, self.proj = HandLayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offset = (grid[:, :, None] - grid[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", offset[..., 0] * (2 * window - 1) + offset[..., 1])
        image, count = torch.zeros(1, size, size, 1), 0
        for rows in (slice(0, -window), slice(-window, -self.shift), slice(-self.shift, None)):
            for columns in (slice(0, -window), slice(-window, -self.shift), slice(-self.shift, None)):
                image[:, rows, columns], count = count, count + 1
        parts = self.split(image).view(-1, window * window)
        other = parts.unsqueeze(1) - parts.unsqueeze(2)
        self.register_buffer("mask", other.masked_fill(other != 0, -100.0))

    def split(self, x):
        b, h, w, c = x.shape
        n = self.window
        return x.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)

    def forward(self, x):
        b, _, _, c = x.shape
        x = self.split(torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)))
        n, windows = x.shape[1], self.mask.shape[0]
        qkv = self.qkv(x).reshape(-1, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        att = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        att = att + self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        att = att.view(b, windows, self.heads, n, n) + self.mask.unsqueeze(1).unsqueeze(0)
        att = att.view(-1, self.heads, n, n).softmax(dim=-1)
        return F.gelu(self.proj((att @ v).transpose(1, 2).reshape(-1, n, c)))


class Llama(nn.Module):
    """Rotary positions, fewer key heads, scores in float32, a mask of the lowest number, SwiGLU by hand."""

    def __init__(self, width=32, heads=4, groups=2, length=6):
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.width, bias=False) for _ in range(2))
        self.norm1, self.norm2 = HandRMSNorm(width), HandRMSNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)
        angle = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, self.width, 2) / self.width))
        self.register_buffer("cos", torch.cat([angle, angle], -1).cos())
        self.register_buffer("sin", torch.cat([angle, angle], -1).sin())

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat([-b, a], -1) * self.sin.to(x.dtype)

    def attend(self, x):
        b, t, c = x.shape
        q, k, v = (layer(x).view(b, t, -1, self.width).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (repeated(part, self.heads // self.groups) for part in (k, v))
        mask = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        att = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.width) + mask
        att = F.softmax(att, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o(torch.matmul(att, v).transpose(1, 2).contiguous().reshape(b, t, c))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        h = self.norm2(x)
        gate = self.gate(h)
        return x + self.down(gate * torch.sigmoid(gate) * self.up(h))


class Alibi(nn.Module):
    """Merged heads and bmm, slopes instead of positions."""

    def __init__(self, width=16, heads=4, length=6):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = HandLayerNorm(width)
        slopes = torch.tensor([2.0**-i for i in range(1, heads + 1)])
        position = torch.arange(length)
        self.register_buffer("alibi", slopes[:, None, None] * (position[None] - position[:, None]).float())

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.reshape(b, t, self.heads, -1).transpose(1, 2).reshape(b * self.heads, t, -1)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        att = (torch.bmm(q, k.transpose(1, 2)) / math.sqrt(c // self.heads)).view(b, self.heads, t, t) + self.alibi
        att = att.masked_fill(torch.triu(torch.ones(t, t, dtype=torch.bool), 1), float("-inf")).softmax(-1)
        y = torch.bmm(att.view(b * self.heads, t, t), v).view(b, self.heads, t, -1)
        return hand_gelu(self.out(y.transpose(1, 2).reshape(b, t, c)))


class Annotated(nn.Module):
    """The encoder of many tutorials: four projections, a mask that is an input."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.heads, self.norm = heads, HandLayerNorm(width)

    def forward(self, x, mask):
        b, h = x.size(0), self.norm(x)
        q, k, v = (layer(h).view(b, -1, self.heads, 4).transpose(1, 2) for layer in self.layers[:3])
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        p = scores.masked_fill(mask[:, None, None] == 0, -1e9).softmax(dim=-1)
        y = torch.matmul(p, v).transpose(1, 2).contiguous().view(b, -1, 16)
        return x + F.gelu(self.layers[3](y))


TOKENS = values(2, 6, 16)
BLOCKS = {
    "minGPT": (MinGPT, TOKENS, {"layer_norm": 2, "gelu": 1, "linear": 4}, ["is_causal"]),
    "ViT": (Vit, values(2, 3, 8, 8), {"layer_norm": 2, "gelu": 1, "linear": 4, "conv2d": 1}, []),
    "einsum": (Einops, values(2, 3, 8, 8), {"layer_norm": 1, "gelu": 1, "linear": 2}, []),
    "Swin, one image": (Swin, values(1, 4, 4, 12), {"layer_norm": 1, "gelu": 1, "linear": 2}, []),
    "Swin, two images": (Swin, values(2, 4, 4, 12), {"layer_norm": 1, "gelu": 1, "linear": 2}, []),
    "LLaMA": (Llama, values(2, 6, 32), {"rms_norm": 2, "silu": 1, "linear": 7}, ["is_causal", "enable_gqa"]),
    "ALiBi": (Alibi, TOKENS, {"layer_norm": 1, "gelu": 1, "linear": 2}, []),
    "annotated": (
        Annotated,
        (TOKENS, torch.tensor([[1, 1, 1, 1, 0, 0], [0] * 6])),
        {"layer_norm": 1, "gelu": 1, "linear": 4},
        [],
    ),
}  # fmt: skip
GONE = {
    "softmax.int",
    "matmul",
    "bmm",
    "einsum",
    "mean.dim",
    "erf",
    "tanh",
    "sigmoid",
    "rsqrt",
    "sqrt",
    "clone",
    "contiguous",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_ends_with_one_op_each(name):
    torch.manual_seed(0)
    block, example, wanted, flags = BLOCKS[name]
    found = check(
        (*STANDARD[:4], SIMPLIFY, *STANDARD[5:]), block().eval(), example
    )  # layers of one input are merged later
    said = op_of(found)
    assert [flag for flag in ("is_causal", "enable_gqa") if said[flag]] == flags
    assert not GONE & set(found.ops), found.ops
    counts = Counter(found.ops)
    assert {op: counts[op] for op in wanted} == wanted


def test_a_block_in_bfloat16():
    torch.manual_seed(0)
    found = check(STANDARD, Llama().eval().bfloat16(), values(2, 6, 32).bfloat16())
    assert Counter(found.ops)["rms_norm"] == 2
    assert "to.dtype" not in found.ops
