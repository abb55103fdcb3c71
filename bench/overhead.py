"""What does a call through tsopt cost beside its engine: over a bare `session.run`, and for ten kinds of call?

Usage: python -m bench.overhead; writes bench/results/overhead.{json,md}.

The check that a call is of the captured form is compiled to straight code for each signature; before that, each call
was walked through step by step, as it still is where the compiled check refuses. Both are timed on the same calls. A
whole call is timed with an engine that takes no time, and includes what is done with its results.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

import tsopt
from bench.models import MODELS
from tsopt.compiler.calls.example import Example
from tsopt.runtime.onnx.export import to_onnx
from tsopt.runtime.onnx.ort import open_session
from tsopt.runtime.racing.environment import Environment, environment
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results" / "overhead.json"
SECONDS = 10
CALLS, PASSES = 200, 15  # copies of a call, one after the other; the best of several passes over them counts


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor


class Add(nn.Module):
    """Next to no work, on whatever nesting of tensors."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        return sum(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


class OfBatch(nn.Module):
    def forward(self, batch: Batch) -> Batch:
        return Batch(batch.ids + 1, batch.mask * 2)


class WithOutput(nn.Module):
    def forward(self, x: torch.Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=x + 1, hidden_states=(x * 2, x * 3))


class Step(nn.Module):
    """A step of a decoder that does nothing but grow its cache."""

    def forward(self, x: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        for layer in range(len(cache.layers)):
            cache.update(x, x, layer)
        return x + 1


def small() -> torch.Tensor:
    return torch.ones(2, 3)


def cache_of(layers: int) -> tuple[torch.Tensor, DynamicCache]:
    cache, step = DynamicCache(), torch.ones(1, 2, 1, 4)
    for layer in range(layers):
        cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), layer)
    return step, cache


def named(*names: str) -> Example:
    return tsopt.example(**{name: small() for name in names})


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Example], bool]] = {
    "one tensor": (Add, lambda: tsopt.example(small()), False),
    "one tensor, any batch": (nn.ReLU, lambda: tsopt.example(small()), True),
    "three tensors": (Add, lambda: tsopt.example(small(), small(), small()), False),
    "five keyword arguments": (
        Add,
        lambda: named("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs"),
        False,
    ),
    "a tensor and flags": (Add, lambda: tsopt.example(small(), use_cache=False, scale=2.0, mode="mean"), False),
    "a dict of lists": (Add, lambda: tsopt.example({"a": [small(), small()], "b": [small(), small()]}), False),
    "a dataclass, and one returned": (OfBatch, lambda: tsopt.example(Batch(small(), small())), False),
    "a ModelOutput returned": (WithOutput, lambda: tsopt.example(small()), False),
    "a cache of 12 layers that grows": (Step, lambda: tsopt.example(*cache_of(12)), False),
    "a cache of 32 layers that grows": (Step, lambda: tsopt.example(*cache_of(32)), False),
}


def main() -> None:
    kinds = {name: kind(*case) for name, case in KINDS.items()}
    found, env = {"kinds": kinds, "mlp": over_a_session()}, environment()
    RESULTS.write_text(json.dumps({"environment": env.to_json(), **found}, indent=1) + "\n")
    lines = page(env, kinds, found["mlp"])
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def kind(model_of: Callable[[], nn.Module], example_of: Callable[[], Example], any_batch: bool) -> dict[str, float]:
    """Microseconds of one kind of call: the walk, the compiled check, and a whole call but for the engine."""
    model, example = model_of().eval(), example_of()
    dynamic = {"input": {0: "batch[1..32]"}} if any_batch else None  # of ReLU
    signature = tsopt.capture(model, copy.deepcopy(example), dynamic=dynamic).signature
    answers = tuple(torch.empty(o.type.shape, dtype=getattr(torch, o.type.dtype)) for o in signature.outputs)
    stub = tsopt.Executable("stub", signature, lambda inputs: answers)

    def best(call: Callable[[Example], Any]) -> float:
        return min(one_pass(call) for _ in range(PASSES)) * 1e6

    def one_pass(call: Callable[[Example], Any]) -> float:
        copies = [copy.deepcopy(example) for _ in range(CALLS)]  # a call may change what it is given
        start = time.perf_counter()
        for item in copies:
            call(item)
        return (time.perf_counter() - start) / CALLS

    with torch.inference_mode():
        if stub.accepts(example.args, example.kwargs) is None:
            raise SystemExit(f"the compiled check refuses {example}")
        return {
            "walk": best(lambda item: stub.bind(item.args, item.kwargs)),
            "check": best(lambda item: stub.accepts(item.args, item.kwargs)),
            "call": best(lambda item: stub(*item.args, **item.kwargs)),
        }


def over_a_session() -> dict[str, Any]:
    """Microseconds of a call of the MLP through tsopt and by a bare session, for one batch size and for any."""
    model, example = MODELS["mlp"].load()
    name = tsopt.capture(model, example).signature.inputs[0].name
    given: dict[str, Any] = {"one size": None, "any batch": {name: {0: "batch[1..32]"}}}
    options: dict[str, Any] = {"backends": ("onnxruntime",), "seconds": 2, "cache": False}
    fast = {kind: tsopt.optimize(model, example, dynamic=dynamic, **options) for kind, dynamic in given.items()}
    calls: dict[str, Callable[..., Any]] = {}
    for kind, made in fast.items():
        calls |= {f"bare session.run, {kind}": bare(made, example), f"tsopt, {kind}": made}
    timings = measure(calls, [Example((example.args[0].clone(),)) for _ in range(3)], seconds=SECONDS)
    over = {
        kind: np.array(timings[f"tsopt, {kind}"].samples) - np.array(timings[f"bare session.run, {kind}"].samples)
        for kind in fast
    }
    return {
        "runs": {kind: made.report.winner for kind, made in fast.items()},
        "microseconds": {kind: timing.p50 * 1e3 for kind, timing in timings.items()},
        "overhead_microseconds": {kind: float(np.median(paired) * 1e3) for kind, paired in over.items()},
    }


def bare(made: tsopt.Optimized, example: Example) -> Callable[..., Any]:
    """The same model in a session of its own, called with an array that is there already."""
    proto, weights = to_onnx(made.program).detached()
    session = open_session(proto, {"threads": torch.get_num_threads()}, weights).session
    array = {session.get_inputs()[0].name: example.args[0].numpy()}
    return lambda x: session.run(None, array)


def page(env: Environment, kinds: dict[str, dict[str, float]], mlp: dict[str, Any]) -> list[str]:
    lines = [
        f"On {env}.",
        "",
        "Microseconds of a call beside its engine. Before: the check that walked through the call. Check: the same as",
        f"compiled code. Whole call: with an engine that takes no time. Best of {PASSES} passes over {CALLS} calls.",
        "",
        "| call | before | check | whole call |",
        "|---|--:|--:|--:|",
    ]
    lines += [f"| {name} | {row['walk']:.1f} | {row['check']:.1f} | {row['call']:.1f} |" for name, row in kinds.items()]
    lines += ["", "A call of the MLP over a bare `session.run`:", ""]
    lines += [f"- {kind}: {value:.1f} us" for kind, value in mlp["overhead_microseconds"].items()]
    return lines


if __name__ == "__main__":
    main()
