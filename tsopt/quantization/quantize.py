"""The options of `optimize` for int8 and int4, and what they make of a program: its variants, and a criterion."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tsopt.compiler.calls.calibration import Calibration, read_calibration
from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import largest_weight
from tsopt.compiler.precision_names import FP32, HALVES, INT4, INT8, INT8_STATIC, INT8_WEIGHTS
from tsopt.compiler.protect import protected
from tsopt.compiler.tensor_bytes import bytes_in
from tsopt.errors import NoGain, UsageError
from tsopt.passes.lower_precision import in_precision, products_of
from tsopt.quantization.drawn import drawn, like_the_example
from tsopt.quantization.measurements import OutOfTime
from tsopt.quantization.steps import Steps, steps_of
from tsopt.quantization.variants import Quantizer
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.criterion import Criterion, check_metric, criterion_of
from tsopt.runtime.layer_table import ATTENTION, LayerRecord

log = logging.getLogger("tsopt")
SHARE_OF_READING = 1 / 3  # of the time for quantization: to read its data


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Options:
    """The options of `optimize` for int8 and for accuracy."""

    calibration: Any = None
    metric: Callable[[Any], Any] | str | None = None
    max_drop: float | None = None
    keep_float: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises UsageError for invalid options."""
        check_metric(self.metric, self.max_drop)
        count = self.calibration
        if isinstance(count, bool) or (isinstance(count, int) and count < 1):
            raise UsageError(
                f"calibration must be at least 1, got {count}", fix="pass how many inputs to draw, or data"
            )

    @property
    def has_data(self) -> bool:
        """Whether there is data of the user's, and not only a number of inputs to draw."""
        return self.calibration is not None and not isinstance(self.calibration, int)

    @property
    def are_given(self) -> bool:
        """Whether any of them differs from its default."""
        return self.judges or bool(self.keep_float)

    @property
    def judges(self) -> bool:
        """Whether they replace the fixed limits of lower precisions by a criterion."""
        return self.calibration is not None or self.metric is not None or self.max_drop is not None


def patterns_in(keep_float: Any) -> tuple[str, ...]:
    """The patterns of the option. Raises UsageError for anything but a collection of texts."""
    is_some = isinstance(keep_float, Iterable) and not isinstance(keep_float, (str, bytes))
    found = tuple(keep_float) if is_some else ()
    if not is_some or not all(isinstance(pattern, str) for pattern in found):
        raise UsageError(
            f"keep_float must be a tuple of module paths or patterns, got {keep_float!r}"[:300],
            fix='pass for example keep_float=("head", "encoder.layer.3.*")',
        )
    return found


@dataclass(frozen=True, slots=True)
class Quantization:
    """The int8 variants of a program, and the criterion for candidates in lower precisions.

    Attributes:
        variants: by name; NoGain where nothing would be quantized.
        criterion: of candidates in lower precisions; None: the limits of their precision.
        layers: what became of each layer, by variant.
        calibration: what was made of the user's data; empty without any.
        data: digest of that data; empty where inputs were drawn.
    """

    variants: dict[str, Program | NoGain] = field(default_factory=dict)
    criterion: Criterion | None = None
    layers: Mapping[str, tuple[LayerRecord, ...]] = field(default_factory=dict)
    calibration: str = ""
    data: str = ""

    def with_others(
        self, program: Program, candidates: Iterable[Candidate], keep_float: Sequence[str] = ()
    ) -> dict[str, Program | NoGain]:
        """The program by variant: in full precision, in int8, and in what else these candidates run.

        Args:
            keep_float: patterns of what stays in float32 in the variants that are not in int8.

        Raises:
            UsageError: one of them matches no matrix product.
        """
        found: dict[str, Program | NoGain] = {FP32: program, **self.variants}
        for name in {candidate.variant for candidate in candidates} - found.keys():
            try:
                found[name] = in_precision(program, name, keep_float)
            except NoGain as error:
                found[name] = error
        return found

    def program_of(self, candidate: Candidate | None) -> Program | None:
        """The int8 variant that a candidate runs; None if it runs none."""
        found = None if candidate is None else self.variants.get(candidate.variant)
        return found if isinstance(found, Program) else None

    def layers_for(self, candidate: Candidate | None, executable: Executable | None = None) -> tuple[LayerRecord, ...]:
        """What became of each layer as a candidate runs it; None: nothing runs in int8.

        Args:
            executable: the candidate, compiled: its engine may have put layers back in float32.
        """
        if candidate is None:
            return self.layers_in(FP32)
        others = str(dict(candidate.options).get("other_ops", FP32))
        records = tuple(replace(item, kept_in=others) for item in self.layers_in(candidate.variant))
        if candidate.variant == INT8 and executable is not None:
            runs = iter(executable.int8)  # in the order of the records, for passes leave layers where they are
            kept = f"{candidate.info.title} is not faster with its integers"
            return tuple(item if item.kept or next(runs, True) else replace(item, kept=kept) for item in records)
        if candidate.variant != INT8_STATIC or candidate.info.int8_scores:
            return records
        kept = f"{candidate.info.title} computes attention in float32"
        return tuple(replace(item, kept=item.kept or kept) if item.op == ATTENTION else item for item in records)

    def layers_in(self, variant: str) -> tuple[LayerRecord, ...]:
        """What became of each layer in a variant; if that is not in int8, in the one that covers most layers."""
        known = (variant, INT8_STATIC, INT8, INT8_WEIGHTS, INT4)
        return next((self.layers[name] for name in known if name in self.layers), ())


def criterion_on_calls(model: Callable[..., Any], program: Program, calls: Sequence[Example]) -> Criterion:
    """The error on calls that the user has made.

    With it, generated inputs decide only about types, NaN and infinities: a shuffled cache of keys does not resemble
    one that a decoder fills, and int8 changes the result several times as much.
    """
    state = tuple(program.state.values())
    with protected(model, written=state), torch.no_grad():
        return criterion_of(model, calls, None, None, program.signature, state)


def quantize(
    model: Callable[..., Any],
    program: Program,
    example: Example,
    wanted: Collection[str],
    options: Int8Options,
    *,
    seed: int = 0,
    seconds: float = math.inf,
    cache: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Quantization:
    """Creates the requested int8 variants of a program.

    Args:
        model: what candidates are compared with; it is called on the data.
        wanted: names of variants, of which those in integers are made.
        seconds: time limit; variants that are not finished then are not made.
        cache: take what earlier runs have measured, and store what this one measures.

    Raises:
        UsageError: the calibration data or the metric cannot be used, or a pattern of `keep_float` matches no layer.
    """
    # What the patterns of `keep_float` may match besides: other candidates keep it in float32.
    others = products_of(program) if not set(HALVES).isdisjoint(wanted) else []
    # The first two do without factors for channels, which would make the weights harder to quantize.
    wanted = [name for name in (INT8_WEIGHTS, INT4, INT8_STATIC, INT8) if name in wanted]
    start = time.monotonic()
    if not wanted and not options.judges:
        return Quantization()
    data = _data(model, program, example, options, seed, progress, start + SHARE_OF_READING * seconds)
    said = "" if options.calibration is None else data.text
    made = Quantization(calibration=said, data=_digest(program, data) if options.has_data else "")
    with protected(model, written=program.state.values()), torch.no_grad():
        state = tuple(program.state.values())
        criterion = criterion_of(model, data.judging, options.metric, options.max_drop, program.signature, state)
        if options.judges:
            made = replace(made, criterion=criterion)
        if not wanted:
            return made
        quick = criterion.on(model, data.choosing)
        smooth = options.calibration is not None
        decided_by = (data.is_split, smooth, largest_weight())
        steps = steps_of(program, lambda: made.data or _digest(program, data), *decided_by) if cache else Steps()
        quantizer = Quantizer(
            *(program, data, criterion, quick, options.keep_float, progress, start + seconds),
            others=others,
            smooth=smooth,
            steps=steps,
        )
        out_of_time = f"quantization did not finish within {seconds:.3g} s, its share of the budget"
        variants, layers = _variants(quantizer, wanted, out_of_time)
    return replace(made, variants=variants, layers=layers)


def _variants(
    quantizer: Quantizer, wanted: Sequence[str], out_of_time: str
) -> tuple[dict[str, Program | NoGain], dict[str, tuple[LayerRecord, ...]]]:
    """The variants, and what became of each layer in them. What was made before an error stays."""
    variants: dict[str, Program | NoGain] = {}
    layers: dict[str, tuple[LayerRecord, ...]] = {}
    for name in wanted:
        try:
            variant, found = quantizer.variant(name)
            variants[name] = variant
            if found:
                layers[name] = found
            if name == INT8_STATIC and isinstance(variant, Program):
                variants[name], layers[name] = quantizer.with_scores(variant, found)
        except UsageError:
            raise
        except OutOfTime:
            variants.setdefault(name, NoGain(out_of_time))
        except Exception as error:  # a bug in quantization must not cost the float32 candidates
            if error is quantizer.progress_error:
                raise
            log.warning("internal error in tsopt while quantizing %s", quantizer.program.name, exc_info=error)
            why = f"internal error in tsopt while quantizing: {type(error).__name__}: {error}"
            variants.setdefault(name, NoGain(why))
    return variants, layers


def _data(
    model: Callable[..., Any],
    program: Program,
    example: Example,
    options: Int8Options,
    seed: int,
    progress: Callable[[str], None],
    end: float,
) -> Calibration:
    """The calibration data, read until `end`; without any, the example and values made up like it."""
    if options.calibration is None:
        return like_the_example(model, program, example, seed)
    if isinstance(options.calibration, int):
        return drawn(model, program, example, seed, options.calibration)
    return read_calibration(
        *(options.calibration, program.signature, example),
        progress=lambda text: progress(f"quantize: read {text}"),
        end=end,
    )


def _digest(program: Program, data: Calibration) -> str:
    digest = hashlib.sha256()
    for call in data.calls:
        for leaf in program.signature.bind(call.args, call.kwargs):
            plain = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
            digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            digest.update(bytes_in(plain).numpy().data)
    return digest.hexdigest()
