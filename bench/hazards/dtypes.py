"""Numbers at the ends of their dtypes: what an engine that computes in fewer bits gets wrong."""

from __future__ import annotations

import torch
from torch import nn

from bench.hazards.values import case


def whole(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def real(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


INT = torch.int32
SMALL, MORE = whole(5, 6, 7, 8), whole(8, 6, 1, 0)
LARGE = whole(2**40, 2**41, 1_700_000_000_123, -(2**40))
HALFWAY = whole(2**31, 3, -(2**31) - 1, 2**32 - 1)  # signed, the lower halves are in another order
BYTES, BYTE = whole(255, 200, 128, 1, dtype=torch.uint8), torch.uint8
DOUBLES = real(1.7e9 + 0.25, 2.0**53, 1 + 2.0**-40, 1e300, dtype=torch.float64)
HALVES = real(65504, 4e4, 2049, 1, dtype=torch.half)
ORDINARY = real(0.5, 1.5, 2.5, 3.5)


class Hashed(nn.Module):
    """A hash of identifiers, then a bucket."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * 2_654_435_761) >> 16) % 1024


class Constant(nn.Module):
    """An offset that int32 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("since", torch.tensor(1_600_000_000_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.since) // 1000


class Doubled(nn.Module):
    """A float64 weight under float32 activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1 + 2.0**-40], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() * self.scale - x.double()


CASES = (
    case("days of milliseconds", lambda t: t // 86_400_000, (SMALL,), (whole(1_732_233_600_000, 5, 1, 0),)),
    case("2**40 == 2**41", lambda x, y: x == y, (SMALL, MORE), (LARGE[:1].expand(4), LARGE[1:2].expand(4))),
    case("sum of int64", lambda x: x.sum(), (SMALL,), (LARGE,), (whole(2**62, 2**62, 1, 1),), (whole(2**53, 1, 1, 1),)),
    case("seconds since, in float64", lambda t: (t - 1.7e9).float(), (ORDINARY.double(),), (DOUBLES,)),
    case("uint8 + uint8", lambda x, y: x + y, (SMALL.byte(), MORE.byte()), (BYTES, BYTES.flip(0))),
    case("float32 3e9 as int64", lambda x: x.long(), (ORDINARY,), (real(3e9, -3e9, 1.7e12, 2.0),)),
    case("int64 product", lambda x: x * x, (SMALL,), (LARGE,), (whole(2**20, 2**16, -(2**31), 3),)),
    case("int64 compared with a number", lambda x: x > 1_000_000, (SMALL,), (LARGE,)),
    case("int64 remainder", lambda x: x % 1000, (SMALL,), (LARGE,), (whole(2**31 - 1, 2**53 + 1, -7, 16_777_217),)),
    case("int64 truncated division", lambda x: torch.div(x, 3, rounding_mode="trunc"), (SMALL,), (LARGE,)),
    case("int64 floor division", lambda x: torch.div(x, 3, rounding_mode="floor"), (SMALL,), (LARGE + 1,)),
    case("int64 clamped", lambda x: x.clamp(0, 6), (SMALL,), (LARGE,), (whole(2**31, 2**32 + 5, -(2**31) - 1, 3),)),
    case("the larger of int64 and 0", lambda x: torch.maximum(x, x * 0), (SMALL,), (LARGE,), (HALFWAY,)),
    case("the smaller of two int64", torch.minimum, (SMALL, MORE), (LARGE, MORE), (HALFWAY, HALFWAY.flip(0))),
    case("sign of int64", lambda x: x.sign(), (SMALL,), (LARGE,), (HALFWAY,)),
    case("largest of each row of int64", lambda x: x.reshape(2, 2).amax(-1), (SMALL,), (LARGE,), (HALFWAY,)),
    case("smallest of int64 and its place", lambda x: x.min(0), (SMALL,), (LARGE,), (HALFWAY,)),
    case("order of int64", lambda x: x.sort(descending=True)[0], (SMALL,), (LARGE,), (HALFWAY,)),
    case("int64 as float32", lambda x: x.float() / 1000, (SMALL,), (LARGE,)),
    case("largest of int64", lambda x: x.max(), (SMALL,), (LARGE,)),
    case("place of the largest of int64", lambda x: x.argmax(), (SMALL,), (LARGE,)),
    case("best two of int64", lambda x: x.topk(2)[0], (SMALL,), (LARGE,)),
    case("int64 returned as it is", lambda x: x.flip(0), (SMALL,), (LARGE,)),
    case("int64 chosen by a mask", lambda x: torch.where(x > 5, x, 0), (SMALL,), (LARGE,)),
    case("running sum of int64", lambda x: x.cumsum(0), (SMALL,), (LARGE,)),
    case("bits of int64", lambda x: (x ^ (x >> 7)) & 0xFFFF, (SMALL,), (LARGE,)),
    case("a hash", Hashed(), (SMALL,), (LARGE,), (whole(123_456_789, 987_654_321, 1, 2),)),
    case("a constant beyond int32", Constant(), (SMALL,), (MORE,), (LARGE,)),
    case("int32 divided", lambda x: x // 3, (SMALL.int(),), (whole(2**31 - 1, -(2**31), 2**24 + 1, 5, dtype=INT),)),
    case("int32 product", lambda x: x * 3, (SMALL.int(),), (whole(2**31 - 1, -(2**31), 2**30, 5, dtype=INT),)),
    case("uint8 - uint8", lambda x, y: x - y, (SMALL.byte(), MORE.byte()), (whole(0, 1, 2, 3, dtype=BYTE), BYTES)),
    case("uint8 * 3", lambda x: x * 3, (SMALL.byte(),), (BYTES,)),
    case("int8 + 100", lambda x: x + 100, (SMALL.to(torch.int8),), (whole(127, -128, 28, 0, dtype=torch.int8),)),
    case("int8 negated", lambda x: -x, (SMALL.to(torch.int8),), (whole(127, -128, 28, 0, dtype=torch.int8),)),
    case("int64 as uint8", lambda x: x.to(BYTE), (SMALL,), (whole(256, 300, -1, 2**40),)),
    case("int16 squared", lambda x: x * x, (SMALL.short(),), (whole(32_767, -32_768, 300, 2, dtype=torch.int16),)),
    case("float64 product", lambda x: x * x - x, (ORDINARY.double(),), (DOUBLES,)),
    case("float64 infinite or not", lambda x: x.isinf(), (ORDINARY.double(),), (DOUBLES,)),
    case("float64 weight", Doubled(), (ORDINARY,), (real(1.0, 3.0, 5.0, 7.0),)),
    case("float32 as uint8", lambda x: x.to(BYTE), (ORDINARY,), (real(256.0, 300.0, 255.0, 1.0),)),
    case("float32 remainder", lambda x: x % 7, (ORDINARY,), (real(1.7e9, 3e9, 1.7e12, 2.0),)),
    case("float32 floor division", lambda x: x // 0.1, (ORDINARY,), (real(1.0, 0.3, 2.0, 0.7),)),
    case("half beyond its largest", lambda x: x * 2 - x, (ORDINARY.half(),), (HALVES,), notes="infinities"),
    case("a counter in a branchless loop", lambda x: ((x + 1) * 3 + 1) * 3 + x, (SMALL,), (LARGE,)),
)  # fmt: skip
