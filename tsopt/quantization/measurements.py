"""Runs a program on calibration data: factors, ranges of values, losses of layers, judgements on variants."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from tsopt.compiler.calls.calibration import Calibration, called_on_data
from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.fake_quantized import simulated
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import LARGEST, largest_weight
from tsopt.compiler.graph.quantized_attention import attentions_of, operands_of
from tsopt.compiler.graph.values import flat_inputs
from tsopt.compiler.graph.weight_groups import Rounded
from tsopt.passes.quantize.effects import losses_with_effects
from tsopt.passes.quantize.layers import readers_of_integers
from tsopt.passes.quantize.observe import Call, observe, qparams_of
from tsopt.passes.quantize.sensitivity import Loss, Rounding
from tsopt.passes.quantize.smooth import factors_for, readers
from tsopt.passes.quantize.unseen import float_inputs, unseen_values
from tsopt.passes.quantize.weights import Int4Weights
from tsopt.quantization.steps import FACTORS, JUDGEMENT, LOSSES, RANGES, Ranges, Steps
from tsopt.runtime.backends.backend import compile
from tsopt.runtime.checking.criterion import Criterion, Judgement
from tsopt.runtime.sandbox.processes import give_back_memory

WORTH_FREEING = 1 << 24  # bytes of weights: a collection takes a tenth of a second


class OutOfTime(Exception):
    """The time limit is over."""


class Measurements:
    """Runs one program on calibration data, until `end` of the monotonic clock. What earlier runs have found is reused.

    Args:
        quick: a criterion on few inputs, for trials.
        progress: called at each step: each input, each trial.

    Attributes:
        program: `smoothed` replaces it.
        largest: the largest magnitude of a weight.
        error: what `progress` raised: the caller's.
    """

    def __init__(
        self,
        program: Program,
        data: Calibration,
        quick: Criterion,
        progress: Callable[[str], None],
        end: float,
        steps: Steps,
    ) -> None:
        self.program, self.largest = program, largest_weight()
        self.error: Exception | None = None
        self._rounded = Rounded()
        self._changed = ""  # digest of the smoothed program, whose steps differ from those of the original
        self._data, self._quick, self._tell, self._end, self._steps = data, quick, progress, end, steps

    def progress(self, text: str) -> None:
        """Reports a step. Raises OutOfTime if the time limit is over."""
        if time.monotonic() >= self._end:
            raise OutOfTime
        if _is_worth_freeing(self.program):
            give_back_memory()  # freed by the last step, and kept by malloc in pieces
        try:
            self._tell(f"quantize: {text}")
        except Exception as error:
            self.error = error
            raise

    def factors(self, layers: Sequence[fx.Node]) -> dict[str, torch.Tensor]:
        """Factors for outlier channels of what these layers read, by the name of the value."""

        def measured() -> dict[str, torch.Tensor]:
            calls, tell = self._calls(self._data.measured), self._telling("smooth")
            with called_on_data(IndexError):
                return factors_for(self.program, layers, calls, largest=self.largest, progress=tell)

        def fits(factors: dict[str, torch.Tensor]) -> bool:
            sizes = {value.name: value.meta["val"].shape[-1] for value in readers(layers)}
            return all(sizes.get(name) == len(held) for name, held in factors.items())

        return self._steps.take(FACTORS, measured, _names(layers), is_sound=fits)

    def smoothed(self, program: Program, factors: Mapping[str, torch.Tensor]) -> None:
        """Goes on with a program in which outlier channels are in the weights."""
        digest = hashlib.sha256(program.fingerprint().encode())
        for name, held in factors.items():
            digest.update(name.encode() + held.numpy().tobytes())
        self.program, self._changed = program, digest.hexdigest()

    def ranges(self, layers: Sequence[fx.Node]) -> Ranges:
        """Quantization parameters of all values that these layers and attention would read."""
        return self._steps.take(RANGES, lambda: self._observed(layers), _names(layers), self._changed)

    def _observed(self, layers: Sequence[fx.Node]) -> Ranges:
        values = readers_of_integers(layers)
        attentions = [] if self.largest < LARGEST else attentions_of(self.program)  # sums of such products saturate
        operands = {operand for attention in attentions for operand in operands_of(attention)}
        ordered = [node for node in self.program.graph.nodes if node in values or node in operands]
        with called_on_data(IndexError):
            watched = dict.fromkeys((*ordered, *float_inputs(self.program)))
            observed = observe(self.program, self._calls(self._data.observed), watched, self._telling("observe"))
        unseen = unseen_values(self.program, ordered, observed)
        known = [node for node in ordered if node.name not in unseen]
        finite = [node.name for node in known if node in operands and observed[node.name].is_finite]
        scores = {name: observed[name].qparams(symmetric=True) for name in finite}
        return Ranges(qparams_of([node for node in known if node in values], observed), scores, unseen)

    def losses(
        self,
        layers: Sequence[fx.Node],
        rounding: Rounding,
        kind: str,
        *,
        corrected: bool = False,
        group: int | None = None,
    ) -> dict[str, Loss]:
        """The loss of each of these layers, except of those whose input is not finite.

        Args:
            kind: what the rounding is stored under.
            corrected: whether the bias of a layer will be corrected for its mean error.
            group: how many neighbours in a row of a weight in 4 bits share a scale; None in 8 bits.
        """
        held = {layer.name: str(ops.bind(layer)["weight"].target) for layer in layers}
        rounded = {name: self._rounded.parts(self.program, name, group) for name in held.values()} if group else None

        def measured() -> dict[str, Loss]:
            with called_on_data(IndexError):
                return losses_with_effects(
                    *(self.program, layers, self._calls(self._data.measured)),
                    rounding=rounding,
                    largest=self.largest,
                    corrected=corrected,
                    progress=self._telling("measure"),
                    weights=rounded,
                )

        def fits(losses: dict[str, Loss]) -> bool:
            # Without any effect, the outputs cannot be differentiated, or there was no memory for it this time.
            sizes = {name: len(self.program.weights[weight]) for name, weight in held.items()}
            is_known = not losses or any(loss.effect is not None for loss in losses.values())
            return is_known and all(sizes.get(name) == len(loss.errors) for name, loss in losses.items())

        what = (kind, corrected, group, _names(layers), self._changed)
        found = self._steps.take(LOSSES, measured, *what, is_sound=fits)
        self.give_back()
        return found

    def in_int4(self, chosen: frozenset[str], group: int, narrow: frozenset[str]) -> Int4Weights:
        """The pass for these layers, of which the narrow ones get 4 bits. It rounds no weight a second time."""
        return Int4Weights(chosen, chosen - narrow, group, self._rounded)

    def judgement(self, by: Criterion, make: Callable[[], Program], *what: object) -> Judgement:
        """What a criterion says of a variant. The user's own function is always asked.

        Args:
            make: makes the variant.
            what: what decides it, beside the program and the data.
        """
        steps = self._steps if by.key else Steps()
        decided_by = (by.key, by.count, by is self._quick, self._changed, *what)
        return steps.take(JUDGEMENT, lambda: self._judged(make(), by), *decided_by)

    def _judged(self, made: Program, by: Criterion) -> Judgement:
        """What a criterion says of a variant, as torch computes what it stands for."""
        self.give_back()
        trial = simulated(made)
        del made
        self.give_back()
        judgement = by.judge(compile(trial, "eager", share_weights=True))
        del trial
        self.give_back()
        return judgement

    def give_back(self) -> None:
        """Frees the weights of a trial, which are in reference cycles, and what malloc has kept of other copies."""
        if _is_worth_freeing(self.program):
            gc.collect()
            give_back_memory()

    def _calls(self, examples: Sequence[Example]) -> list[Call]:
        return [flat_inputs(self.program, call) for call in examples]

    def _telling(self, what: str) -> Callable[[str], None]:
        return lambda text: self.progress(f"{what} {text}")


def _is_worth_freeing(program: Program) -> bool:
    return sum(weight.nbytes for weight in program.weights.values()) >= WORTH_FREEING


def _names(layers: Sequence[fx.Node]) -> list[str]:
    return [layer.name for layer in layers]
