"""The int8 and int4 variants of a program: calibrated, with the layers that lose too much in float32 or in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from tsopt.compiler.analysis.integer_sums import scores_fit
from tsopt.compiler.calls.calibration import Calibration
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import LARGEST, QParams, calibrated_input
from tsopt.compiler.graph.quantized_attention import attentions_of, operands_of
from tsopt.compiler.precision_names import INT4, INT8_STATIC, INT8_WEIGHTS
from tsopt.compiler.rewriting.pass_base import Limits, Pass
from tsopt.compiler.rewriting.pipeline import run
from tsopt.errors import NoGain
from tsopt.passes.quantize.dynamic import DynamicInt8
from tsopt.passes.quantize.layer_names import kept_in_float
from tsopt.passes.quantize.layers import (
    NO_LAYER,
    fits_in_sums,
    layers_of,
    multiplications,
    quantized_already,
)
from tsopt.passes.quantize.scores import ScoresInInt8
from tsopt.passes.quantize.selection import ExpectedError, fewest_kept
from tsopt.passes.quantize.sensitivity import Loss, by_group, by_qparams, by_tensor
from tsopt.passes.quantize.smooth import Smooth
from tsopt.passes.quantize.static import StaticInt8
from tsopt.passes.quantize.weights import (
    INT4_GROUP,
    LARGER_GROUPS,
    WORTHWHILE,
    Int8Weights,
    is_divisible,
    linear_layers,
    share_of_linear,
)
from tsopt.quantization.measurements import Measurements
from tsopt.quantization.records import record_of, record_of_scores
from tsopt.quantization.steps import Steps
from tsopt.runtime.checking.criterion import Criterion, Judgement
from tsopt.runtime.layer_table import LayerRecord

Made = tuple[Program | NoGain, tuple[LayerRecord, ...]]  # a variant, and what became of each layer in it
LOWEST_SQNR = 20.0  # dB: a layer that loses more is kept in float32
LOWEST_SQNR_IN_INT4 = 15.0  # dB: a layer that loses more has 8 bits
NOT_FINITE = "its input is not finite"
OVERFLOWS = "its sums might not fit in 32 bits"
SAFE = 0.9  # of the limit: an engine rounds a little differently from the program as torch runs it


@dataclass(frozen=True, slots=True)
class Choice:
    """Layers of which as many are quantized as the criterion accepts.

    Attributes:
        losses: of these layers, by name; those without one are left out.
        reasons: why some of them are left out in any case, by name.
        pass_for: the pass that quantizes the layers with these names.
        variant: what is made is stored under this name.
        at_least: how many to leave out in any case.
    """

    layers: Sequence[fx.Node]
    losses: Mapping[str, Loss]
    reasons: Mapping[str, str]
    pass_for: Callable[[frozenset[str]], Pass]
    variant: str
    at_least: int = 0


class Quantizer:
    """Makes the variants of one program, until `end` of the monotonic clock.

    Args:
        criterion: decides how many layers stay in float32.
        quick: the same on few inputs, for trials.
        keep_float: patterns of layers that stay in float32 in any case.
        others: what these patterns may match as well.
        smooth: whether to move outlier channels into the weights.
        steps: what earlier runs have found.
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
        steps: Steps,
    ) -> None:
        self.program, self._criterion, self._quick = program, criterion, quick
        self._measured = Measurements(program, data, quick, progress, end, steps)
        self.layers = layers_of(program)
        self._keep_float, self._others = keep_float, others
        self._match_patterns()
        self._is_to_smooth = smooth
        self._losses: dict[str, Loss] = {}
        self._scores: dict[str, QParams] = {}  # of queries and keys
        self._unseen: dict[str, str] = {}  # why the ranges of values are not known, by their names
        self._kept_before = 0

    @property
    def progress_error(self) -> Exception | None:
        """What `progress` raised: the caller's."""
        return self._measured.error

    def variant(self, name: str) -> Made:
        """Creates a variant. Returns it with a record for each layer."""
        if refused := quantized_already(self.program):
            return refused, ()
        if not self.layers:
            return NoGain(NO_LAYER), ()
        if name in (INT8_WEIGHTS, INT4):
            return self._of_weights(name)
        if self._is_to_smooth:
            self._is_to_smooth = False
            self._smooth()
        qparams = self._calibrated() if name == INT8_STATIC else None
        # NOTE: the loss with fixed scales bounds the loss with scales per call, so one order serves both variants.
        if not self._losses:
            known = self.layers if qparams is None else _with_input_in(self.layers, qparams)
            rounding = by_tensor if qparams is None else by_qparams(qparams)
            self._losses = self._measured.losses(known, rounding, name, corrected=qparams is not None)
        if qparams is None and (unseen := _with_input_in(self.layers, self._unseen)):
            # Each call finds these ranges itself.
            self._losses |= self._measured.losses(unseen, by_tensor, "unseen ranges")
            self._unseen = {}

        largest = self._measured.largest
        reasons = self._reasons(self.layers, self._losses)
        too_long = [layer.name for layer in self.layers if not fits_in_sums(self.program, layer, largest)]
        reasons = dict.fromkeys(too_long, OVERFLOWS) | reasons

        def pass_for(only: frozenset[str]) -> Pass:
            if qparams is None:
                return DynamicInt8(largest, only)
            shifts = {key: loss.shift for key, loss in self._losses.items()}
            # A layer that stays only because too many are rounded together reads what is rounded for its neighbours:
            # ONNX Runtime would run the convolution in front in float32 too.
            return StaticInt8(qparams, shifts, only, frozenset(reasons), largest)

        # The second variant starts from the choice of the first, which saves most of its trials.
        made, records = self._in_int8(Choice(self.layers, self._losses, reasons, pass_for, name, self._kept_before))
        of_layers = zip(self.layers, records, strict=True)
        kept = sum(bool(record.kept) for layer, record in of_layers if layer.name in self._losses)
        self._kept_before = 0 if isinstance(made, NoGain) else kept
        return made, records

    def _of_weights(self, name: str) -> Made:
        """The variant with int8 weights, or with int4 weights."""
        if self._measured.largest < LARGEST:
            return NoGain("integer weights need a processor with VNNI instructions (AVX-512 VNNI)"), ()
        share = share_of_linear(self.program, self.layers)
        if share < WORTHWHILE:
            return NoGain(f"linear layers account for only {share:.1%} of the work and weights"), ()
        layers = linear_layers(self.layers)
        losses = self._measured.losses(layers, by_group, INT8_WEIGHTS)
        # Engines add up the products of a group of neighbours: their sums fit.
        reasons = self._reasons(layers, losses)
        if name == INT4:
            return self._in_int4(layers, losses, reasons)
        return self._in_int8(Choice(layers, losses, reasons, Int8Weights, name))

    def _in_int8(self, choice: Choice) -> Made:
        """A variant with as many of these layers in int8 as the criterion accepts."""
        made, kept, said = self._chosen(choice)
        others = [layer.name for layer in self.layers if layer not in choice.layers]
        together = "the quantized layers together exceed the accuracy limit"
        said_of = {
            **dict.fromkeys(kept, together),
            **choice.reasons,
            **dict.fromkeys(others, "the fastest candidate quantizes only linear layers"),
        }
        records = tuple(
            record_of(self.program, layer, choice.losses.get(layer.name), said_of.get(layer.name, ""))
            for layer in self.layers
        )
        if made is None:
            return NoGain(f"no layer can run in int8: {said or 'each of them is kept in float32'}"), records
        return made, records

    def _in_int4(self, layers: Sequence[fx.Node], in_int8: Mapping[str, Loss], reasons: Mapping[str, str]) -> Made:
        """The variant with int8 weights, and as many of these in 4 bits as the criterion accepts.

        Args:
            in_int8: the losses of these layers in 8 bits.
            reasons: why some of them stay in float32.
        """
        wide, kept_in_float = self._in_int8(Choice(layers, in_int8, reasons, Int8Weights, INT8_WEIGHTS))
        if isinstance(wide, NoGain):
            return wide, kept_in_float
        kept = {layer.name: record.kept for layer, record in zip(self.layers, kept_in_float, strict=True)}
        chosen = [layer for layer in layers if not kept[layer.name]]
        quantized = frozenset(layer.name for layer in chosen)
        group = next((size for size in LARGER_GROUPS if self._is_accepted_in_int4(quantized, size)), INT4_GROUP)
        divisible = [layer for layer in chosen if is_divisible(self.program, layer, group)]
        losses = self._measured.losses(divisible, partial(by_group, group=group), INT4, group=group)
        lost = [name for name, loss in losses.items() if loss.sqnr < LOWEST_SQNR_IN_INT4]
        wider = dict.fromkeys(lost, f"SQNR in int4 below {LOWEST_SQNR_IN_INT4:.0f} dB")
        pass_for = partial(self._measured.in_int4, quantized, group)
        in_any_case = {**{name: why for name, why in kept.items() if why}, **wider}
        made, left, _ = self._chosen(Choice(divisible, losses, in_any_case, pass_for, f"{INT4} {group}"))
        indivisible = [layer.name for layer in chosen if layer.name not in losses]
        wider = {
            **dict.fromkeys(left, "the layers in int4 together exceed the accuracy limit"),
            **wider,
            **dict.fromkeys(indivisible, f"its rows cannot be split into groups of {group}"),
        }
        records = []
        for layer in self.layers:
            why, because = kept[layer.name], wider.get(layer.name, "")
            is_narrow = not why and not because
            loss = (losses if is_narrow else in_int8).get(layer.name)
            size = group if is_narrow else None
            records.append(record_of(self.program, layer, loss, why, group=size, wider=because))
        return wide if made is None else made, tuple(records)

    def _is_accepted_in_int4(self, chosen: frozenset[str], group: int) -> bool:
        """Whether the criterion accepts these layers in groups of this size, and all of them can be split so."""
        layers = [layer for layer in self.layers if layer.name in chosen and is_divisible(self.program, layer)]
        if not layers or not all(is_divisible(self.program, layer, group) for layer in layers):
            return False
        self._measured.progress(f"int4 in groups of {group}")

        def judged(by: Criterion) -> Judgement:
            pass_ = self._measured.in_int4(chosen, group, chosen)
            return self._measured.judgement(by, lambda: self._made(pass_), INT4, group, sorted(chosen))

        return all(_is_safe(judged(by)) for by in (self._quick, self._criterion))

    def _made(self, pass_: Pass) -> Program:
        return run(self.program, (pass_,), Limits(Numerics.LOSSY))[0]

    def _chosen(self, choice: Choice) -> tuple[Program | None, list[str], str]:
        """The variant with as many of these layers quantized as the criterion accepts; None if it accepts none.

        Those are left out that cause most of the error for each multiplication. Where the effects of some on the
        outputs are not known, these are the ones that lose most themselves.

        Returns:
            The names of those that are left out, and what the criterion said of the last variant that it refused.
        """
        losses, reasons = choice.losses, choice.reasons
        effects = {name: loss.effect for name, loss in losses.items() if loss.effect is not None}

        def rank(layer: fx.Node) -> float:
            if len(effects) < len(losses):  # the two cannot be compared
                return losses[layer.name].sqnr
            return -effects[layer.name] / multiplications(self.program, layer)

        order = sorted(
            (layer for layer in choice.layers if layer.name in losses),
            key=lambda layer: (layer.name not in reasons, rank(layer)),
        )

        def made_with(kept: int) -> Program:
            return self._made(choice.pass_for(frozenset(layer.name for layer in order[kept:])))

        def judged_with(kept: int, by: Criterion) -> Judgement:
            names = sorted(layer.name for layer in order[kept:])
            return self._measured.judgement(by, lambda: made_with(kept), choice.variant, names, sorted(reasons.items()))

        at_least = max(choice.at_least, sum(layer.name in reasons for layer in order))
        kept, said = self._fewest(judged_with, at_least, [losses[layer.name].effect for layer in order])
        made = None if kept == len(order) else made_with(kept)
        self._measured.give_back()
        return made, [layer.name for layer in order[:kept]], said

    def with_scores(self, made: Program, records: tuple[LayerRecord, ...]) -> tuple[Program, tuple[LayerRecord, ...]]:
        """A static variant with the scores of attention in int8 too, if the criterion accepts them all together."""
        attentions = attentions_of(made)
        if not attentions or self._measured.largest < LARGEST:
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
            self._measured.progress(f"scores of {len(chosen)} calls of attention")
            rounded, _ = run(made, (ScoresInInt8(self._scores, chosen),), Limits(Numerics.LOSSY))
            made_of = (ScoresInInt8.name, rounded.fingerprint())
            judgement = self._measured.judgement(self._criterion, lambda: rounded, *made_of)
            if _is_safe(judgement):
                made = rounded
            else:
                reasons |= dict.fromkeys(chosen, f"with the scores of attention in int8: {judgement.text}")
        return made, (*records, *(record_of_scores(item, reasons.get(item.name, "")) for item in attentions))

    def _smooth(self) -> None:
        """Goes on with a program in which outlier channels are in the weights."""
        chosen = [layer for layer in self.layers if layer not in self.kept]
        factors = self._measured.factors(chosen)
        smooth = Smooth(factors, frozenset(layer.name for layer in chosen))
        self.program, _ = run(self.program, (smooth,), Limits())
        self._measured.smoothed(self.program, factors)
        self.layers = layers_of(self.program)
        self._match_patterns()

    def _match_patterns(self) -> None:
        """Finds what `keep_float` keeps: layers, and calls of attention by their names."""
        self.kept = kept_in_float([*self.layers, *attentions_of(self.program)], self._keep_float, self._others)

    def _calibrated(self) -> dict[str, QParams]:
        """Quantization parameters of all values that layers would read and whose range the data shows.

        Those of attention go to `_scores`.
        """
        found = self._measured.ranges(self.layers)
        self._unseen, self._scores = dict(found.unseen), dict(found.scores)
        return dict(found.qparams)

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
        self, judged_with: Callable[[int, Criterion], Judgement], at_least: int, effects: Sequence[float | None]
    ) -> tuple[int, str]:
        """How many layers to keep in float32, and why fewer were not accepted.

        Args:
            judged_with: what a criterion says of the variant with so many of them.
            effects: of all layers, in the order in which they are kept.
        """
        said, count, expected = "", len(effects), _expected(effects, self._quick.error_limit)

        def is_accepted(kept: int, by: Criterion) -> bool:
            nonlocal said
            self._measured.progress(f"{count - kept} of {len(self.layers)} layers")
            judgement = judged_with(kept, by)
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


def _is_safe(judgement: Judgement) -> bool:
    return judgement.ok and judgement.loss <= SAFE * judgement.limit


def _expected(effects: Sequence[float | None], limit: float | None) -> ExpectedError | None:
    """What is expected of many layers together; None where their effects or the limit are not known."""
    known = [effect for effect in effects if effect is not None]
    return None if limit is None or len(known) < len(effects) else ExpectedError(known, SAFE * limit)


def _with_input_in(layers: Sequence[fx.Node], names: Container[str]) -> list[fx.Node]:
    return [layer for layer in layers if ops.bind(layer)["input"].name in names]
