"""What a model's Python code asks of its inputs, and inputs that are not plain dense tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import tsopt
from bench.hazards import RIGHT, Case, Outcome, served_by

Make = Callable[[], torch.Tensor]


class Scaled(torch.Tensor):
    """A subclass without a function of its own."""


class Doubling(torch.Tensor):
    """A subclass whose sums are doubled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if getattr(func, "__name__", "") in ("add", "__add__") else found


def contiguous(x):
    return x * 2 if x.is_contiguous() else x * 3


def channels_last(x):
    return x * 2 if x.is_contiguous(memory_format=torch.channels_last) else x * 3


def strides(x):
    return x * float(x.stride(0))


def all_strides(x):
    return x + sum(x.stride())


def offset(x):
    return x + x.storage_offset()


def of_a_view(x):
    return x * 2 if x.transpose(0, 1).is_contiguous() else x * 3


def of_a_result(x):
    return x * 2 if (x + 1).is_contiguous() else x * 3


def wants_gradients(x):
    return x * 2 if x.requires_grad else x * 3


def is_leaf(x):
    return x * 2 if x.is_leaf else x * 3


def inference(x):
    return x * 2 if torch.is_inference_mode_enabled() else x * 3


def is_inference(x):
    return x * 2 if x.is_inference() else x * 3


def conjugated(x):
    return torch.view_as_real(x.resolve_conj()) * (2 if x.is_conj() else 3)


def of_a_class(x):
    return x * 2 if isinstance(x, Scaled) else x * 3


def adds(x):
    return x + 1


def writes_contiguous(x):
    x.contiguous().add_(1)
    return x * 2


def writes_flat(x):
    x.reshape(-1)[0] = 9
    return x * 2


def as_strided(x):
    return torch.as_strided(x, (2, 2), (1, 2)) * 1.0


def layout(x):
    return x * 2 if x.layout == torch.strided else (x.to_dense() * 3)


def dense() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4) + 1


def transposed() -> torch.Tensor:
    return (torch.arange(12.0) + 1).reshape(4, 3).t()


def shifted() -> torch.Tensor:
    return (torch.arange(20.0))[5:17].view(3, 4)


def spread() -> torch.Tensor:
    return (torch.arange(24.0) + 1).reshape(3, 8)[:, ::2]


def image() -> torch.Tensor:
    return torch.arange(24.0).reshape(1, 2, 3, 4)


def image_channels_last() -> torch.Tensor:
    return image().contiguous(memory_format=torch.channels_last)


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return dense() * 1


def check(
    model: Callable[[torch.Tensor], torch.Tensor],
    example: Make,
    *later: Make,
    mode: Any = torch.no_grad,
    shown: Callable[[Any], Any] = lambda value: value,
) -> Callable[[str], Outcome]:
    """Calls what was made with other inputs, and compares results, their class, and what is left in the inputs."""

    def outcome(backend: str) -> Outcome:
        warnings.simplefilter("ignore")
        refused = ""
        for called in served_by(model, example(), backend):
            for make in (example, *later):
                mine, theirs = make(), make()
                with mode():
                    wanted = model(theirs)
                    try:
                        found = called(mine)
                    except tsopt.SignatureError as error:
                        refused = error.what
                        continue
                same = type(found) is type(wanted) and torch.allclose(shown(found), shown(wanted))
                if not same or not torch.allclose(shown(mine), shown(theirs)):
                    return Outcome("wrong", f"{make.__name__}: other than eager")
        return Outcome("refused", refused) if refused else RIGHT

    return outcome


def to_dense(value: Any) -> Any:
    plain = value.as_subclass(torch.Tensor) if type(value) is not torch.Tensor else value
    return plain if plain.layout == torch.strided else plain.to_dense()


def named(name: str, make: Make) -> Make:
    make.__name__ = name
    return make


SPARSE = named("sparse", lambda: dense().to_sparse())
MKLDNN = named("mkldnn", lambda: dense().to_mkldnn())
CSR = named("csr", lambda: dense().to_sparse_csr())
NESTED = named("nested", lambda: torch.nested.nested_tensor([dense()[0], dense()[1]]))
WANTING = named("requires_grad", lambda: dense().requires_grad_())
CONJUGATED = named("conjugated", lambda: torch.complex(dense(), dense()).conj())
COMPLEX = named("complex", lambda: torch.complex(dense(), dense()))
SCALED = named("subclass", lambda: dense().as_subclass(Scaled))
DOUBLING = named("subclass with a function", lambda: dense().as_subclass(Doubling))

CASES = (
    Case("asks is_contiguous", check(contiguous, dense, transposed, spread)),
    Case("asks is_contiguous, the example is transposed", check(contiguous, transposed, dense)),
    Case("asks for channels_last", check(channels_last, image, image_channels_last)),
    Case("asks for one stride", check(strides, dense, transposed, spread)),
    Case("asks for all strides", check(all_strides, dense, transposed, spread)),
    Case("asks for the offset in memory", check(offset, dense, shifted)),
    Case("asks a view whether it is contiguous", check(of_a_view, dense, transposed)),
    Case("asks a result whether it is contiguous", check(of_a_result, dense, transposed)),
    Case("asks requires_grad", check(wants_gradients, dense, WANTING)),
    Case("asks is_leaf", check(is_leaf, dense, WANTING)),
    Case("asks for inference mode", check(inference, dense, dense, mode=torch.inference_mode)),
    Case("asks whether a tensor is of inference mode", check(is_inference, dense, inferred, mode=torch.inference_mode)),
    Case("asks whether it is conjugated", check(conjugated, COMPLEX, CONJUGATED)),
    Case("asks for a class", check(of_a_class, dense, SCALED, shown=to_dense)),
    Case("a subclass", check(adds, dense, SCALED, shown=to_dense)),
    Case("a subclass with __torch_function__", check(adds, dense, DOUBLING, shown=to_dense)),
    Case("writes what contiguous() gives", check(writes_contiguous, dense, transposed)),
    Case("writes what contiguous() gives, a transposed example", check(writes_contiguous, transposed, dense)),
    Case("writes what reshape() gives", check(writes_flat, dense, transposed)),
    Case("as_strided", check(as_strided, dense, transposed)),
    Case("sparse, after a dense example", check(layout, dense, SPARSE, shown=to_dense)),
    Case("sparse in compressed rows", check(layout, dense, CSR, shown=to_dense)),
    Case("mkldnn", check(layout, dense, MKLDNN, shown=to_dense)),
    Case("nested", check(adds, dense, NESTED, shown=lambda v: v if not v.is_nested else torch.cat(list(v.unbind())))),
)
