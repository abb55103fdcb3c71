"""Programs under construction, with their values on fake and on real tensors; choices are drawn with Hypothesis.

Calls that an op rejects, on fake or on real tensors, are left out of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.passes.helpers import specials
from tsopt.compiler.calls.signature import Input, Output, Signature
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.infer import infer, infer_weight
from tsopt.compiler.graph.program import Program, type_of

LARGEST = 512  # elements of a value
MOST_INPUTS = 4
SHAPES = ((2, 3), (4,), (2, 4, 3), (1, 3), (2, 3, 4, 4), (3, 3), (), (7,), (2, 1), (0, 3), (2, 2, 4, 3), (1, 1))


@dataclass(frozen=True)
class Drawn:
    """A program and the inputs that it was drawn with; printed as the program."""

    program: Program
    inputs: tuple[torch.Tensor, ...]

    def __repr__(self) -> str:
        weights = {name: (str(w.dtype), w.tolist()) for name, w in self.program.weights.items() if w.numel() <= 4}
        return f"{self.program.text}\nsmall weights: {weights}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"\n{self!r}\n")

    def special_inputs(self) -> tuple[torch.Tensor, ...]:
        """NaN, infinities, signed zeros and denormals in place of ordinary numbers."""
        return tuple(
            specials(*x.shape, dtype=x.dtype).roll(i) if x.is_floating_point() else x for i, x in enumerate(self.inputs)
        )


class Builder:
    """A program under construction: its values so far, fake and real."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.mode = FakeTensorMode()
        self.program = Program(fx.Graph(), {}, Signature((), (), *[flatten(((), {}))[1]] * 2), name="Random")
        self.values: list[fx.Node] = []  # what an argument may be
        self.real: dict[fx.Node, Any] = {}
        self.inputs: list[fx.Node] = []

    # ---- choices ----

    def pick(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(items))

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def often(self, of: int = 4) -> bool:
        """True but for one time in `of`; shrinks to True."""
        return self.integer(0, of - 1) < of - 1

    def value(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> fx.Node | None:
        """A value that fits, the latest ones first."""
        found = [node for node in reversed(self.values) if fits(self.fake(node))][:6]
        return self.pick(found) if found else None

    def wanted(self, fits: Callable[[torch.Tensor], bool]) -> fx.Node | None:
        """A value that fits, a new input where there is none."""
        found = self.value(fits)
        if found is not None or len(self.inputs) >= MOST_INPUTS:
            return found
        kinds = [(dtype, shape) for dtype in (torch.float32, torch.int64, torch.bool) for shape in SHAPES]
        kinds = [(d, s) for d, s in kinds if fits(torch.empty(s, dtype=d, device="meta"))]
        if not kinds:
            return None
        dtype, shape = self.pick(kinds)
        return self.input(numbers(shape, dtype, 100 + len(self.inputs)))

    def near(self, wanted: float) -> float:
        """The number that a formula needs, or one beside it."""
        return wanted if self.often(24) else self.pick([wanted * 1.01, -wanted, wanted + 1, 2.0])

    def fake(self, node: fx.Node) -> torch.Tensor:
        return cast(torch.Tensor, node.meta["val"])

    # ---- nodes ----

    def input(self, tensor: torch.Tensor) -> fx.Node:
        first = next(iter(self.program.graph.nodes), None)
        with self.program.graph.inserting_before(first):
            node = self.program.graph.placeholder(f"x{len(self.inputs)}")
        node.meta = {"val": self.mode.from_tensor(tensor, static_shapes=True)}
        self.inputs.insert(0, node)
        return self._keep(node, tensor)

    def weight(self, tensor: torch.Tensor) -> fx.Node:
        name = f"w{len(self.program.weights)}"
        self.program.weights[name] = tensor
        node = self.program.graph.create_node("get_attr", name)
        node.meta = {"val": infer_weight(self.program, tensor)}
        self.real[node] = tensor
        return node

    def random(self, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """A weight of ordinary numbers, or now and then of one number or an earlier weight."""
        same = [n for n in self.real if n.op == "get_attr" and self.real[n].shape == torch.Size(shape)]
        same = [n for n in same if self.real[n].dtype == dtype]
        kind = self.integer(0, 7)
        if same and kind == 7:
            return self.pick(same)
        if kind == 6:
            return self.weight(torch.full(tuple(shape), self.pick((1, 0, 2, -1))).to(dtype))
        return self.weight(numbers(shape, dtype, len(self.program.weights)))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
        """A call, or None where the op refuses the arguments, here or on fake tensors, or makes too much."""
        if args[:1] == (None,):
            return None
        node = self.program.graph.call_function(target, args, kwargs)
        try:
            node.meta["val"] = infer(self.program, target, node.args, dict(node.kwargs))
            if any(t.numel() > LARGEST for t in ops.tensors_of(node.meta["val"])):
                raise ValueError("too large")
            known = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self.real[n])
            with torch.no_grad():
                real = target(*known[0], **known[1])
            if [TensorType.of(t) for t in ops.tensors_of(real)] != [
                TensorType.of(t) for t in ops.tensors_of(node.meta["val"])
            ]:
                raise ValueError("torch's own inference is wrong")
        except Exception:  # whatever an op raises means that the call is not possible
            self.program.graph.erase_node(node)
            return None
        return self._keep(node, real)

    def _keep(self, node: fx.Node, real: Any) -> fx.Node:
        self.real[node] = real
        if isinstance(real, torch.Tensor):
            self.values.append(node)
        return node

    def finish(self, outputs: Sequence[fx.Node]) -> Drawn:
        program = self.program
        program.graph.output(tuple(outputs))
        inputs = tuple(self.real[node] for node in self.inputs)
        takes = tuple(Input(str(n.target), cast(TensorType, type_of(n))) for n in self.inputs)
        gives = tuple(Output(f"out{i}", cast(TensorType, type_of(n))) for i, n in enumerate(outputs))
        outer = flatten((inputs, {}))[1]
        result = flatten(tuple(self.real[n] for n in outputs))[1]
        program.signature = Signature(takes, gives, outer, result)
        return Drawn(program, inputs)


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Ordinary numbers: floats around 1 of both signs, small integers, bools."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    high = 2 if dtype == torch.bool else 7
    return torch.randint(0, high, tuple(shape), generator=generator).to(dtype)
