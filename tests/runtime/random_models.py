"""Random models as people write them: dtypes, in-place operations, views and aliases, all drawn from a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

INTEGERS = (torch.int64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16)
FLOATS = (torch.float32, torch.float32, torch.float64, torch.float16)
DTYPES = (*INTEGERS, *FLOATS, torch.bool, torch.complex64)
SHAPE = (3, 4)
MOST = 7  # steps

Unary = Callable[[torch.Tensor, random.Random], Any]


def _number(r: random.Random) -> Any:
    return r.choice((1, 2, 3, 7, -1, 100, 0.5))


def _ones_like_first(x: torch.Tensor) -> torch.Tensor:
    """A copy whose first column is written through a view of a view."""
    y = x.clone()
    y.t()[0].add_(1)
    return y


def _through_a_view(x: torch.Tensor, number: Any) -> torch.Tensor:
    y = x * 1
    y.view(-1)[::2].mul_(number)
    return y


def _item(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = y[1]
    y[1:, 2] = 3
    return y


def _write_a_part(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:] = 2
    return x


def _twice(x: torch.Tensor) -> torch.Tensor:
    """Two names of one memory, each written."""
    y = x.clone()
    z = y[:2]
    y += 1
    z *= 2
    return y + z.sum()


# Each takes a tensor and what draws its numbers; numbers are drawn once, when the model is made.
CALLS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "neg": lambda x, n: -x,
    "abs": lambda x, n: abs(x),
    "square": lambda x, n: x * x,
    "add": lambda x, n: x + n,
    "mul": lambda x, n: x * n,
    "rsub": lambda x, n: n - x,
    "floor_divide": lambda x, n: x // abs(n) if n else x,
    "remainder": lambda x, n: x % 7,
    "trunc_div": lambda x, n: torch.div(x, 3, rounding_mode="trunc"),
    "true_div": lambda x, n: x / 3,
    "clamp": lambda x, n: x.clamp(-3, 100),
    "relu": lambda x, n: torch.relu(x),
    "sign": lambda x, n: x.sign(),
    "not": lambda x, n: ~x,
    "shift": lambda x, n: x >> 1,
    "and": lambda x, n: x & 6,
    "sum": lambda x, n: x.sum(-1, keepdim=True),
    "mean": lambda x, n: x.mean(-1, keepdim=True),
    "cumsum": lambda x, n: x.cumsum(0),
    "amax": lambda x, n: x.amax(-1, keepdim=True),
    "argmax": lambda x, n: x.argmax(-1, keepdim=True),
    "topk": lambda x, n: x.topk(2, -1)[0],
    "lt": lambda x, n: x < n,
    "eq": lambda x, n: x == n,
    "floor": lambda x, n: x.floor(),
    "round": lambda x, n: x.round(),
    "exp": lambda x, n: x.exp(),
    "sqrt": lambda x, n: x.sqrt(),
    "softmax": lambda x, n: x.softmax(-1),
    "isnan": lambda x, n: x.isnan(),
    "conj": lambda x, n: x.conj() * 2,
    "real": lambda x, n: torch.view_as_real(x)[..., 0],
    **{f"to {dtype}": lambda x, n, dtype=dtype: x.to(dtype) for dtype in dict.fromkeys(DTYPES)},
    "t": lambda x, n: x.t(),
    "flip": lambda x, n: x.flip(0),
    "slice": lambda x, n: x[:, 1:],
    "step": lambda x, n: x[::2],
    "row": lambda x, n: x[1].expand(3, 4),
    "reshape": lambda x, n: x.reshape(4, 3),
    "look up": lambda x, n: torch.arange(5).to(x.dtype)[(x % 5).long()],
    "gather": lambda x, n: x.gather(1, torch.tensor([[0, 2], [1, 1], [3, 0]])),
    "one_hot": lambda x, n: nn.functional.one_hot(x.long() % 4, 4),
    "scatter": lambda x, n: torch.zeros_like(x).scatter(1, torch.tensor([[0, 2], [1, 3], [3, 0]]), x),
    "through a view": _through_a_view,
    "first column": lambda x, n: _ones_like_first(x),
    "item": lambda x, n: _item(x),
    "twice": lambda x, n: _twice(x),
    "in place": lambda x, n: x.clone().mul_(2).sub_(1),
    "fill": lambda x, n: x.clone().masked_fill_(x > 1, 5),
    # These write to the value itself, which may be an input, or a view of one.
    "write": lambda x, n: x.add_(n),
    "write a part": lambda x, n: _write_a_part(x),
    "write a row": lambda x, n: x[0].fill_(1),
    "write and go on": lambda x, n: x.mul_(2) + 1,
}
PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "eq": lambda x, y: x == y,
    "lt": lambda x, y: x < y,
    "xor": lambda x, y: x ^ y,
    "cat": lambda x, y: torch.cat([x, y]),
    "matmul": lambda x, y: x @ y.t(),
    "copy": lambda x, y: x.clone().copy_(y),
    "add in place": lambda x, y: x.clone().add_(y),
    "row": lambda x, y: x.clone().index_copy_(0, torch.tensor([2]), y[:1]),
}


def example(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small numbers, of which no dtype holds too few."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 6, SHAPE, generator=generator).to(dtype)


class RandomModel(nn.Module):
    """One or two inputs, some steps, the last values as outputs. What eager refuses on the example is no step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        r = random.Random(seed)
        dtypes = [r.choice(DTYPES) for _ in range(r.randint(1, 2))]
        self.example = tuple(example(dtype, seed * 2 + i) for i, dtype in enumerate(dtypes))
        self.steps: list[tuple[str, int, Any]] = []
        values: list[torch.Tensor] = [x.clone() for x in self.example]
        for _ in range(20):
            if len(self.steps) == r.randint(2, MOST):
                break
            unary = r.random() < 0.7
            name = r.choice(list(CALLS if unary else PAIRS))
            step = (name, r.randrange(len(values)), _number(r) if unary else (r.randrange(len(values)),))
            try:
                made = self.run(step, values)
            except (RuntimeError, TypeError, IndexError, ValueError):
                continue
            if made.numel() <= 64:
                values.append(made)
                self.steps.append(step)
        self.eval()

    @staticmethod
    def run(step: tuple[str, int, Any], values: list[torch.Tensor]) -> torch.Tensor:
        name, place, other = step
        made: torch.Tensor = (
            PAIRS[name](values[place], values[other[0]])
            if isinstance(other, tuple)
            else CALLS[name](values[place], other)
        )
        return made

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for step in self.steps:
            values.append(self.run(step, values))
        return tuple(values[-2:]) if len(self.steps) > 1 else (values[-1] + 0,)

    def extra_repr(self) -> str:
        return f"{[str(x.dtype) for x in self.example]}: {self.steps}"
