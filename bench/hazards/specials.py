"""NaN, infinities, zeros of both signs: where an engine drops them, or puts them elsewhere."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from bench.hazards import Case
from bench.hazards.values import Model, case

ORDINARY = torch.linspace(-3, 3, 24).reshape(2, 12)
SPECIAL = ORDINARY.clone().reshape(-1)
SPECIAL[:7] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40])
SPECIAL[14] = math.nan
SPECIAL = SPECIAL.reshape(2, 12)


def special(name: str, model: Model) -> Case:
    return case(name, model, (ORDINARY,), (ORDINARY.flip(0),), (SPECIAL,), (SPECIAL.flip(1),), notes="NaN")


CASES = (
    special("argmax", lambda x: x.argmax(1)),
    special("argmin", lambda x: x.argmin(1)),
    special("largest of a row", lambda x: x.amax(1)),
    special("smallest of a row", lambda x: x.amin(1)),
    special("largest and where", lambda x: x.max(1)),
    special("topk", lambda x: x.topk(3)[0]),
    special("sort", lambda x: x.sort(1, stable=True)[0]),
    special("maximum", lambda x: torch.maximum(x, x.flip(0))),
    special("minimum", lambda x: torch.minimum(x, x.flip(0))),
    special("clamp", lambda x: x.clamp(-1, 1)),
    special("relu", torch.relu),
    special("relu6", F.relu6),
    special("hardtanh", F.hardtanh),
    special("leaky relu", F.leaky_relu),
    special("max pool", lambda x: F.max_pool1d(x[None], 2)),
    special("remainder by 4", lambda x: x % 4),
    special("floor division by 4", lambda x: x // 4),
    special("sign", torch.sign),
    special("gelu", F.gelu),
    special("logsumexp", lambda x: x.logsumexp(1)),
    special("softmax", lambda x: x.softmax(1)),
    special("power of a half", lambda x: x**0.5),
    special("as a flag", lambda x: x.bool()),
    special("as a whole number", lambda x: x.int()),
    special("where it is not less", lambda x: torch.where(x < 0, 0.0, x)),
    special("sum", lambda x: x.sum(1)),
    special("layer norm", lambda x: F.layer_norm(x, (12,))),
    special("nan_to_num", torch.nan_to_num),
    special("linear by zeros", lambda x: x @ torch.zeros(12, 3)),
)
