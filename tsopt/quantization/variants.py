"""The int8 variants of a program: calibrated, with the layers that lose too much in float32."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Container, Mapping, Sequence

from torch import fx

from tsopt.compiler.analysis.integer_sums import scores_fit
from tsopt.compiler.calls.calibration import Calibration, called_on_data
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import module_of, origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import LARGEST, QParams, calibrated_input, largest_weight, simulated
from tsopt.compiler.graph.quantized_attention import attentions_of, operands_of
from tsopt.compiler.graph.values import flat_inputs
from tsopt.compiler.precision_names import INT8_STATIC, INT8_WEIGHTS
from tsopt.compiler.rewriting.pass_base import Limits, Pass
from tsopt.compiler.rewriting.pipeline import run
from tsopt.errors import NoGain
from tsopt.passes.quantize.dynamic import DynamicInt8
from tsopt.passes.quantize.effects import losses_with_effects
from tsopt.passes.quantize.layer_names import kept_in_float
from tsopt.passes.quantize.layers import (
    NO_LAYER,
    fits_in_sums,
    layers_of,
    multiplications,
    quantized_already,
    readers_of_integers,
)
from tsopt.passes.quantize.observe import observe, qparams_of
from tsopt.passes.quantize.scores import ScoresInInt8
from tsopt.passes.quantize.selection import ExpectedError, fewest_kept
from tsopt.passes.quantize.sensitivity import Loss, Rounding, by_group, by_qparams, by_tensor
from tsopt.passes.quantize.smooth import Smooth, factors_for
from tsopt.passes.quantize.static import StaticInt8
from tsopt.passes.quantize.unseen import float_inputs, unseen_values
from tsopt.passes.quantize.weights import WORTHWHILE, Int8Weights, linear_layers, share_of_linear
from tsopt.runtime.backends.backend import compile
from tsopt.runtime.checking.criterion import Criterion, Judgement
from tsopt.runtime.layer_table import ATTENTION, LayerRecord
from tsopt.runtime.sandbox.processes import give_back_memory

Made = tuple[Program | NoGain, tuple[LayerRecord, ...]]  # a variant, and what became of each layer in it
LOWEST_SQNR = 20.0  # dB: a layer that loses more is kept in float32
WORTH_FREEING = 1 << 24  # bytes of weights: a collection takes a tenth of a second
NOT_FINITE = "its input is not finite"
OVERFLOWS = "its sums might not fit in 32 bits"
SAFE = 0.9  # of the limit: an engine rounds a little differently from the program as torch runs it


class OutOfTime(Exception):
    """The time limit is over."""


class Quantizer:
    """Makes the variants of one program, until `end` of the monotonic clock.

    Args:
        criterion: decides how many layers stay in float32.
        quick: the same on few inputs, for trials.
        keep_float: patterns of layers that stay in float32 in any case.
        others: what these patterns may match as well.
        smooth: whether to move outlier channels into the weights.
    """

    def __init__(
        self,
        program: Program,
        data: Calibration,
        criterion: Criterion,
        quick: Criterion,
        keep_float: Sequence[str],
        progress: Callable[[str], None],
        end: float,
        *,
        others: Sequence[fx.Node] = (),
        smooth: bool,
    ) -> None:
        self._end = end
        self.program, self.data, self._criterion, self._quick = program, data, criterion, quick
        self.progress_error: Exception | None = None  # what `progress` raised: the caller's
        self._tell = progress
        self.layers = layers_of(program)
        self._keep_float, self._others = keep_float, others
        self._match_patterns()
        self.largest = largest_weight()
        self._is_to_smooth = smooth
        self._losses: dict[str, Loss] = {}
        self._scores: dict[str, QParams] = {}  # of queries and keys
        self._unseen: dict[str, str] = {}  # why the ranges of values are not known, by their names
        self._kept_before = 0

    def progress(self, text: str) -> None:
        """Called at each step: each input, each trial."""
        if time.monotonic() >= self._end:
            raise OutOfTime
        if _is_worth_freeing(self.program):
            give_back_memory()  # freed by the last step, and kept by malloc in pieces
        try:
            self._tell(text)
        except Exception as error:
            self.progress_error = error
            raise

    def variant(self, name: str) -> Made:
        """Creates a variant. Returns it with a record for each layer."""
        if refused := quantized_already(self.program):
            return refused, ()
        if not self.layers:
            return NoGain(NO_LAYER), ()
        if name == INT8_WEIGHTS:
            return self._weights()
        if self._is_to_smooth:
            self._is_to_smooth = False
            self._smooth()
        qparams = self._calibrated() if name == INT8_STATIC else None
        # NOTE: the loss with fixed scales bounds the loss with scales per call, so one order serves both variants.
        if not self._losses:
            known = self.layers if qparams is None else _with_input_in(self.layers, qparams)
            rounding = by_tensor if qparams is None else by_qparams(qparams)
            self._losses = self._measured(known, rounding, corrected=qparams is not None)
        if qparams is None and (unseen := _with_input_in(self.layers, self._unseen)):
            self._losses |= self._measured(unseen, by_tensor)  # each call finds these ranges itself
            self._unseen = {}

        reasons = self._reasons(self.layers, self._losses)
        too_long = [layer.name for layer in self.layers if not fits_in_sums(self.program, layer, self.largest)]
        reasons = dict.fromkeys(too_long, OVERFLOWS) | reasons

        def pass_for(only: frozenset[str]) -> Pass:
            if qparams is None:
                return DynamicInt8(self.largest, only)
            shifts = {key: loss.shift for key, loss in self._losses.items()}
            # A layer that stays only because too many are rounded together reads what is rounded for its neighbours:
            # ONNX Runtime would run the convolution in front in float32 too.
            return StaticInt8(qparams, shifts, only, frozenset(reasons), self.largest)

        # The second variant starts from the choice of the first, which saves most of its trials.
        made, records = self._chosen(self.layers, self._losses, reasons, pass_for, self._kept_before)
        of_layers = zip(self.layers, records, strict=True)
        kept = sum(bool(record.kept) for layer, record in of_layers if layer.name in self._losses)
        self._kept_before = 0 if isinstance(made, NoGain) else kept
        return made, records

    def _weights(self) -> Made:
        """The variant with int8 weights."""
        if self.largest < LARGEST:
            return NoGain("int8 weights need a processor with VNNI instructions (AVX-512 VNNI)"), ()
        share = share_of_linear(self.program, self.layers)
        if share < WORTHWHILE:
            return NoGain(f"linear layers account for only {share:.1%} of the work and weights"), ()
        layers = linear_layers(self.layers)
        losses = self._measured(layers, by_group)
        # Engines add up the products of a group of neighbours: their sums fit.
        return self._chosen(layers, losses, self._reasons(layers, losses), Int8Weights, 0)

    def _chosen(
        self,
        layers: Sequence[fx.Node],
        losses: Mapping[str, Loss],
        reasons: Mapping[str, str],
        pass_for: Callable[[frozenset[str]], Pass],
        at_least: int,
    ) -> Made:
        """Quantizes as many of these layers as the criterion accepts.

        Those stay in float32 that cause most of the error for each multiplication. Where the effects of some on the
        outputs are not known, these are the ones that lose most themselves.

        Args:
            reasons: why some of them stay in float32 in any case, by their names.
            pass_for: the pass that quantizes the layers with these names.
            at_least: how many to keep in float32 in any case.
        """
        effects = {name: loss.effect for name, loss in losses.items() if loss.effect is not None}

        def rank(layer: fx.Node) -> float:
            if len(effects) < len(losses):  # the two cannot be compared
                return losses[layer.name].sqnr
            return -effects[layer.name] / multiplications(self.program, layer)

        order = sorted(
            (layer for layer in layers if layer.name in losses),
            key=lambda layer: (layer.name not in reasons, rank(layer)),
        )

        def pass_with(kept: int) -> Pass:
            return pass_for(frozenset(layer.name for layer in order[kept:]))

        at_least = max(at_least, sum(layer.name in reasons for layer in order))
        kept, said = self._fewest(pass_with, at_least, [losses[layer.name].effect for layer in order])
        together = "the quantized layers together exceed the accuracy limit"
        others = [layer.name for layer in self.layers if layer not in layers]
        said_of = {
            **dict.fromkeys((layer.name for layer in order[:kept]), together),
            **reasons,
            **dict.fromkeys(others, "the fastest candidate quantizes only linear layers"),
        }
        records = tuple(
            self._record(layer, losses.get(layer.name), said_of.get(layer.name, "")) for layer in self.layers
        )
        if kept == len(order):
            return NoGain(f"no layer can run in int8: {said or 'each of them is kept in float32'}"), records
        made, _ = run(self.program, (pass_with(kept),), Limits(Numerics.LOSSY))
        _give_back(self.program)
        return made, records

    def with_scores(self, made: Program, records: tuple[LayerRecord, ...]) -> tuple[Program, tuple[LayerRecord, ...]]:
        """A static variant with the scores of attention in int8 too, if the criterion accepts them all together."""
        attentions = attentions_of(made)
        if not attentions or self.largest < LARGEST:
            return made, records
        patterns = {node.name: pattern for node, pattern in self.kept.items()}
        reasons: dict[str, str] = {}
        for attention in attentions:
            operands = operands_of(attention)
            names = [operand.name for operand in operands]
            if attention.name in patterns:
                reasons[attention.name] = f"keep_float {patterns[attention.name]!r}"
            elif any(map(calibrated_input, operands)):
                reasons[attention.name] = "its queries or keys are already rounded for a layer"
            elif not scores_fit(int(operands[0].meta["val"].shape[-1])):
                reasons[attention.name] = OVERFLOWS
            elif any(name not in self._scores for name in names):
                reasons[attention.name] = next(filter(None, map(self._unseen.get, names)), NOT_FINITE)
        chosen = frozenset(attention.name for attention in attentions) - reasons.keys()
        if chosen:
            self.progress(f"quantize: scores of {len(chosen)} calls of attention")
            rounded, _ = run(made, (ScoresInInt8(self._scores, chosen),), Limits(Numerics.LOSSY))
            judgement = self._judged(rounded, self._criterion)
            if _is_safe(judgement):
                made = rounded
            else:
                reasons |= dict.fromkeys(chosen, f"with the scores of attention in int8: {judgement.text}")
        return made, (*records, *(_record_of_scores(item, reasons.get(item.name, "")) for item in attentions))

    def _smooth(self) -> None:
        """Goes on with a program in which outlier channels are in the weights."""
        chosen = [layer for layer in self.layers if layer not in self.kept]
        calls = [flat_inputs(self.program, call) for call in self.data.measured]
        with called_on_data(IndexError):
            factors = factors_for(self.program, chosen, calls, largest=self.largest, progress=self._telling("smooth"))
        smooth = Smooth(factors, frozenset(layer.name for layer in chosen))
        self.program, _ = run(self.program, (smooth,), Limits())
        self.layers = layers_of(self.program)
        self._match_patterns()

    def _match_patterns(self) -> None:
        """Finds what `keep_float` keeps: layers, and calls of attention by their names."""
        self.kept = kept_in_float([*self.layers, *attentions_of(self.program)], self._keep_float, self._others)

    def _calibrated(self) -> dict[str, QParams]:
        """Quantization parameters of all values that layers would read and whose range the data shows.

        Those of attention go to `_scores`.
        """
        values = readers_of_integers(self.layers)
        attentions = [] if self.largest < LARGEST else attentions_of(self.program)  # sums of such products saturate
        operands = {operand for attention in attentions for operand in operands_of(attention)}
        ordered = [node for node in self.program.graph.nodes if node in values or node in operands]
        calls = [flat_inputs(self.program, call) for call in self.data.observed]
        with called_on_data(IndexError):
            watched = dict.fromkeys((*ordered, *float_inputs(self.program)))
            observed = observe(self.program, calls, watched, self._telling("observe"))
        self._unseen = unseen_values(self.program, ordered, observed)
        known = [node for node in ordered if node.name not in self._unseen]
        finite = [node.name for node in known if node in operands and observed[node.name].is_finite]
        self._scores = {name: observed[name].qparams(symmetric=True) for name in finite}
        return qparams_of([node for node in known if node in values], observed)

    def _measured(self, layers: Sequence[fx.Node], rounding: Rounding, *, corrected: bool = False) -> dict[str, Loss]:
        """The loss of each of these layers, except of those whose input is not finite.

        Args:
            corrected: whether the bias of a layer will be corrected for its mean error.
        """
        calls = [flat_inputs(self.program, call) for call in self.data.measured]
        with called_on_data(IndexError):
            found = losses_with_effects(
                *(self.program, layers, calls),
                rounding=rounding,
                largest=self.largest,
                corrected=corrected,
                progress=self._telling("measure"),
            )
        _give_back(self.program)
        return found

    def _telling(self, what: str) -> Callable[[str], None]:
        return lambda text: self.progress(f"quantize: {what} {text}")

    def _reasons(self, layers: Sequence[fx.Node], losses: Mapping[str, Loss]) -> dict[str, str]:
        """Why some layers must stay in float32 regardless of the other layers, by their names."""
        return {layer.name: reason for layer in layers if (reason := self._reason(layer, losses))}

    def _reason(self, layer: fx.Node, losses: Mapping[str, Loss]) -> str:
        """Why a layer must stay in float32 regardless of the other layers; empty if it need not."""
        if layer in self.kept:
            return f"keep_float {self.kept[layer]!r}"
        loss = losses.get(layer.name)
        if loss is None:
            return self._unseen.get(ops.bind(layer)["input"].name, NOT_FINITE)
        return f"SQNR below {LOWEST_SQNR:.0f} dB" if loss.sqnr < LOWEST_SQNR else ""

    def _fewest(
        self, pass_for: Callable[[int], Pass], at_least: int, effects: Sequence[float | None]
    ) -> tuple[int, str]:
        """How many layers to keep in float32, and why fewer were not accepted.

        Args:
            effects: of all layers, in the order in which they are kept.
        """
        said, count, expected = "", len(effects), _expected(effects, self._quick.error_limit)

        def is_accepted(kept: int, by: Criterion) -> bool:
            nonlocal said
            self.progress(f"quantize: {count - kept} of {len(self.layers)} layers")
            judgement = self._judged(run(self.program, (pass_for(kept),), Limits(Numerics.LOSSY))[0], by)
            if expected is not None and by is self._quick:
                expected.correct(kept, judgement.error)
            if _is_safe(judgement):
                return True
            said = judgement.text
            return False

        guess = None if expected is None else expected.fewest
        kept = fewest_kept(count, at_least, lambda tried: is_accepted(tried, self._quick), guess)
        # A choice that is just good enough for the few inputs may not be so for those that candidates are judged by.
        if self._quick is not self._criterion and kept < count and not is_accepted(kept, self._criterion):
            near = kept + 1  # a few more are enough, as a rule
            kept = fewest_kept(count, near, lambda tried: is_accepted(tried, self._criterion), lambda: near)
        return kept, said

    def _judged(self, made: Program, by: Criterion) -> Judgement:
        """What a criterion says of a variant, as torch computes what it stands for."""
        _give_back(self.program)
        trial = simulated(made)
        del made
        _give_back(self.program)
        judgement = by.judge(compile(trial, "eager", share_weights=True))
        del trial
        _give_back(self.program)
        return judgement

    def _record(self, layer: fx.Node, loss: Loss | None, kept: str) -> LayerRecord:
        weight = self.program.weights[str(ops.bind(layer)["weight"].target)]
        return LayerRecord(
            name=module_of(layer),
            where=origin_of(layer),
            op=ops.name_of(layer).removeprefix("aten."),
            sqnr=None if loss is None or math.isinf(loss.sqnr) else loss.sqnr,
            bytes_float=weight.nbytes,
            bytes_int8=weight.numel() + 4 * len(weight),
            kept=kept,
            output_sqnr=None if loss is None or not loss.effect else -10 * math.log10(loss.effect),
        )


def _give_back(program: Program) -> None:
    """Frees the weights of a trial, which are in reference cycles, and what the allocator has kept of other copies."""
    if _is_worth_freeing(program):
        gc.collect()
        give_back_memory()


def _is_worth_freeing(program: Program) -> bool:
    return sum(weight.nbytes for weight in program.weights.values()) >= WORTH_FREEING


def _is_safe(judgement: Judgement) -> bool:
    return judgement.ok and judgement.loss <= SAFE * judgement.limit


def _record_of_scores(attention: fx.Node, kept: str) -> LayerRecord:
    where = origin_of(attention)
    return LayerRecord(module_of(attention), where, ATTENTION, sqnr=None, bytes_float=0, bytes_int8=0, kept=kept)


def _expected(effects: Sequence[float | None], limit: float | None) -> ExpectedError | None:
    """What is expected of many layers together; None where their effects or the limit are not known."""
    known = [effect for effect in effects if effect is not None]
    return None if limit is None or len(known) < len(effects) else ExpectedError(known, SAFE * limit)


def _with_input_in(layers: Sequence[fx.Node], names: Container[str]) -> list[fx.Node]:
    return [layer for layer in layers if ops.bind(layer)["input"].name in names]
