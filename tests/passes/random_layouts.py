"""Random chains of moves around axes of size 1, of size 0, expanded ones, and channels-last convolutions."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F

Step = Callable[[torch.Tensor], torch.Tensor]
SIZES = (1, 1, 1, 2, 3, 4)
MOST = 512  # elements


def chain(seed: int, steps: int = 8) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """A function of one tensor, made of random steps that fit, and an input for it."""
    draw = random.Random(seed)
    sizes = [draw.choice((*SIZES, 0) if draw.random() < 0.1 else SIZES) for _ in range(4)]
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    if draw.random() < 0.3:
        x = x.to(memory_format=torch.channels_last)
    chosen: list[Step] = []
    value = x
    while len(chosen) < steps:
        step = _step(draw, value)
        found = step(value)
        if found.numel() <= MOST and found.dim() <= 6:
            chosen.append(step)
            value = found

    def run(x: torch.Tensor) -> torch.Tensor:
        for step in chosen:
            x = step(x)
        return x

    return run, x


def _step(draw: random.Random, x: torch.Tensor) -> Step:
    makers = (_permute, _reshape, _unsqueeze, _squeeze, _expand, _convolution, _arithmetic, _join, _slice, _other)
    return draw.choice(makers)(draw, x)


def _permute(draw: random.Random, x: torch.Tensor) -> Step:
    axes = draw.sample(range(x.dim()), x.dim())
    return lambda x: x.permute(axes)


def _reshape(draw: random.Random, x: torch.Tensor) -> Step:
    if not x.numel():
        return lambda x: x.flatten()
    sizes, left = [], x.numel()
    while left > 1 and len(sizes) < 4:
        sizes.append(draw.choice([size for size in range(1, left + 1) if left % size == 0]))
        left //= sizes[-1]
    sizes.append(left)
    return lambda x: x.reshape(sizes)


def _unsqueeze(draw: random.Random, x: torch.Tensor) -> Step:
    axis = draw.randint(0, x.dim())
    return lambda x: x.unsqueeze(axis)


def _squeeze(draw: random.Random, x: torch.Tensor) -> Step:
    ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    axis = draw.choice(ones) if ones else None
    return (lambda x: x) if axis is None else lambda x: x.squeeze(axis)


def _expand(draw: random.Random, x: torch.Tensor) -> Step:
    shape = [draw.choice((1, 2, 3)) if size == 1 else size for size in x.shape]
    return lambda x: x.expand(shape)


def _convolution(draw: random.Random, x: torch.Tensor) -> Step:
    if x.dim() not in (3, 4) or not x.numel():
        return lambda x: x * 2
    kernel = draw.choice((1, 1, 3))
    weight = torch.linspace(-1, 1, 2 * x.shape[1] * kernel ** (x.dim() - 2)).reshape(2, -1, *[kernel] * (x.dim() - 2))
    conv = F.conv2d if x.dim() == 4 else F.conv1d
    return lambda x: conv(x, weight, padding=kernel // 2)


def _arithmetic(draw: random.Random, x: torch.Tensor) -> Step:
    steps: tuple[Step, ...] = (torch.relu, lambda x: x + 1, lambda x: x * x, lambda x: x.softmax(-1) if x.dim() else x)
    return draw.choice(steps)


def _join(draw: random.Random, x: torch.Tensor) -> Step:
    if not x.dim():
        return lambda x: x.neg()
    axis = draw.randrange(x.dim())
    join = draw.choice((torch.cat, torch.stack))
    return lambda x: join([x, x.neg()], axis)


def _slice(draw: random.Random, x: torch.Tensor) -> Step:
    if not x.dim():
        return lambda x: x.abs()
    axis = draw.randrange(x.dim())
    length = draw.randint(min(1, x.shape[axis]), x.shape[axis])
    return lambda x: x.narrow(axis, x.shape[axis] - length, length)


def _other(draw: random.Random, x: torch.Tensor) -> Step:
    steps: list[Step] = [torch.clone, lambda x: x.contiguous(), lambda x: x.sum(0, keepdim=True) if x.dim() else x]
    if x.dim() == 4:
        steps.append(lambda x: x.contiguous(memory_format=torch.channels_last))
        if all(x.shape):
            steps += [lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: F.interpolate(x, scale_factor=2.0)]
            steps.append(lambda x: F.pixel_shuffle(x, 2) if x.shape[1] % 4 == 0 else F.avg_pool2d(x, 1))
    if x.dim() >= 2:
        steps.append(lambda x: x @ x.transpose(-1, -2))
    if x.dim() >= 1 and all(x.shape):
        steps.append(lambda x: F.layer_norm(x, x.shape[-1:]))
    return draw.choice(steps)
