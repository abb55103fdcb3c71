"""`optimize` and `compile`. Checks the options; a Request does the work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any, Literal

from tsopt.compiler.calls.example import Example, as_examples
from tsopt.compiler.capture import frontends
from tsopt.compiler.capture.names import name_of
from tsopt.compiler.devices import check_not_recording, check_usable, is_on_gpu
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.outside import kept_outside
from tsopt.compiler.precision_names import FP32
from tsopt.compiler.rewriting.pass_base import Pass, Repeat, passes_of
from tsopt.errors import GraphBreakError, UsageError
from tsopt.originals import original_of
from tsopt.passes import STANDARD
from tsopt.passes.lower_precision import in_precision
from tsopt.pipelines import model_in
from tsopt.quantization.quantize import Int8Options, patterns_in
from tsopt.request import Request
from tsopt.runtime.backends.backend import Backend, get_backend
from tsopt.runtime.backends.backend import compile as compile_by
from tsopt.runtime.backends.candidate import AUTO, Candidate, candidates_for
from tsopt.runtime.calling.ambient import POLICIES as ON_GRADIENTS
from tsopt.runtime.calling.audit import SHARE, check_share
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.fallback import InEager
from tsopt.runtime.calling.optimized import POLICIES, Optimized
from tsopt.runtime.calling.partitioned import Partitioned
from tsopt.runtime.racing.contenders import RaceSettings
from tsopt.runtime.stages import ReportedProgress
from tsopt.runtime.thread_count import check_threads
from tsopt.transforms import LEVELS, check_level, check_passes, names_in

FRONTENDS = ("auto", "one-graph", *frontends.READERS, "parts")
NEVER_IN_PARTS = ("one-graph", "export", "strict", "fx")


def optimize(
    model: Callable[..., Any],
    example_input: Any,
    *,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    level: int = 2,
    backends: Sequence[str] | Literal["all"] | None = None,
    precision: str | None = None,
    calibration: Any = None,
    metric: Callable[[Any], Any] | str | None = None,
    max_drop: float | None = None,
    keep_float: Iterable[str] = (),
    frontend: str = "auto",
    passes: Iterable[Pass | Repeat] = STANDARD,
    without: Iterable[str] = (),
    threads: int | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    eval_mode: bool = False,
    allow_nan: bool = False,
    on_new_signature: str = "capture",
    on_gradients: str = "eager",
    warmup: int = 0,
    isolate: bool = True,
    budget: float | None = None,
    memory: int | None = None,
    cache: bool = True,
    check_indices: bool = False,
    strict_specials: bool = False,
    time_all: bool = False,
    best_so_far: bool = False,
    share_weights: bool = False,
    audit: float = SHARE,
    progress: Callable[[str], None] | bool | None = None,
) -> Optimized | Partitioned | InEager:
    """Turns a model into the fastest verified form that this machine can run.

    The model is captured as a `Program`, which passes rewrite and backends compile. Each candidate is compared with
    eager, and those that are correct are timed side by side with it. What is returned runs the winner and is called
    like the model.

    Args:
        model: an nn.Module, a function of tensors, or an ExportedProgram. It is not modified. Of a hybrid, the original
            model is optimized. What is already optimized is returned unchanged, with a warning if other options ask for
            another result.
        example_input: a tensor; a tuple of positional arguments; a dict of keyword arguments; or
            `tsopt.example(*args, **kwargs)`. With a list of several examples, the sizes in which they differ become
            dynamic, from 1 to twice the largest, and the first example is the one that is timed.
        dynamic: dimensions whose size differs from call to call, by input and axis: `{"x": {0: "batch"}}`, or with a
            range, `{"x": {0: "batch[1..32]"}}`. The program is checked at both ends of each range and in between; the
            report lists the sizes. A call with a size outside its range has a new signature; see `on_new_signature`.
        level: 0: no passes; 1: bit-exact rewrites only; 2: also rewrites that change rounding; 3: also lossy ones,
            which is level 2 with `precision="auto"`.
        backends: the backends to race, for example `("onnxruntime?threads=1", "onednn")`; eager always takes part.
            None: the installed engines that compile in seconds. `"all"`: every engine, including Inductor, which takes
            minutes. With `"all"`, an engine that is not installed is a row in the table; one requested by name is an
            error.
        precision: a lower precision in which products of float32 matrices may be computed: `"bf16"`, `"fp16"`,
            `"tf32"` (on a GPU), or `"auto"` for all of these; or `"int8"` for linear layers and convolutions on
            8-bit integers (on the CPU): with scales that each call computes from its input, for the whole of it or for
            groups in each row (linear layers only), or that `calibration` finds; or `"int4"` for linear layers with
            weights in 4 bits where that is accurate enough and in 8 bits elsewhere, which `"auto"` does not include.
            These candidates race alongside those in `"fp32"`. Their outputs are compared by the relative error of a
            whole tensor: at most 4.4 % for `int8` and `int4`, which is a cosine of 0.999, 3 % for `bf16`, 1 % for the
            others.
        calibration: real inputs for int8 and int4; with them, static int8 quantization in ONNX Runtime and OpenVINO is
            tried as well. Half of them are held out to judge candidates in lower precisions.

            - A DataLoader, a Dataset or another iterable, of inputs like `example_input` or of (input, target). At most
              128 inputs are read: from all of what has a length and an order, otherwise from the first on. Batches of
              other sizes, and rows without a batch axis, are split or concatenated to that of the example.
            - The path of an .npz file, whose arrays have the names of the inputs and a first axis that counts them; or
              of a directory of such files, or of .npy files for a model with one input.
            - A number of inputs to draw like the example, which say little about real data.

            With it, `"auto"` tries int8 as well.
        metric: the accuracy metric for candidates in lower precisions: a function that takes a model and returns a
            number, higher is better; `"top1"` (of the first output, along the last axis; all others may have a
            relative error of 4.4 %) or `"cosine"`, the agreement with eager; or
            `"sqnr"`, the default: a relative error of at most 4.4 % over all held-out inputs. As many layers run in
            int8 or int4 as this allows; those whose error counts most at the outputs keep more bits. A function can
            call a candidate, with batches of any size, and read parameters and attributes of the model from it; a
            candidate for which it is NaN is refused.
        max_drop: how far the metric may be below that of the model, 0.01 by default. Without `metric` it applies to
            `"cosine"`, and to `"top1"` as well if the first output has rows, which may be scores.
        keep_float: layers and attention that stay in float32, by module path, such as `"encoder.layer.3.*"`. Engines
            that lower the precision of all layers together do not race then.
        frontend: how the model is captured.

            - `"auto"`: by torch.export; by TorchScript where control flow is data-dependent; else partitioned; else
              eager. The report says which it was, and why not the ones before it.
            - `"one-graph"`: like `"auto"`, but neither partitioned nor eager.
            - `"export"`, `"strict"`, `"fx"`, `"torchscript"`: by this frontend; see `capture`. With `"torchscript"`, a
              model that is not one graph runs as a script with TorchScript's own optimizations.
            - `"parts"`: partitioned by TorchDynamo. Each graph between graph breaks is optimized, and the Python code
              between them is kept. The result can be run but not saved.
        passes: the pass pipeline. To add passes, extend the tuple `tsopt.STANDARD`.
        without: names of rules and passes to skip.
        threads: intra-op threads for the candidates; None uses torch's setting.
        seconds: limit for the time to spend on timing, which ends as soon as the race is decided.
        seed: seed of the inputs that candidates are checked on.
        eval_mode: capture a model that is in training mode as if it were in eval mode.
        allow_nan: accept weights that contain NaN.
        on_new_signature: what to do for a call with a new signature: `"capture"` it once, run `"eager"`, or raise an
            `"error"`. If it differs from an earlier call only in its sizes, those sizes become dynamic: one program
            then serves both calls, sizes between them, and sizes up to twice as large. A call outside that range
            extends it once the program has been compared with the model at the new sizes. Python integers that differ
            by as much as one of these sizes become dynamic with it. If the winner is wrong or too slow for the new
            signature, the other backends that beat eager are tried.
        warmup: how many calls with a new signature, whatever their sizes, the model itself serves before the signature
            is captured. Capturing takes seconds, which a signature that is used once does not repay. With 1 or more,
            after four captures for a single size, further ones take at most 2 % of the time, unless a signature is
            called often.
        on_gradients: what to do for a call that only the model itself can serve, because gradients are required for an
            input, a torch.func transform or torch.jit.trace is active, or autocast is enabled: run `"eager"` and warn
            once, or raise an `"error"`.
        isolate: give each candidate its own process, so that a crash or a hang costs only a row in the table. False
            runs all candidates in this process, which saves a few seconds.
        budget: time limit in seconds for compiling, checking and timing all candidates together; None for no limit.
            Quantization may take half of it, and what it takes is missing for the candidates.
        memory: bytes that the candidates' processes may take together; None for 80 % of what is free. If that is not
            enough for all of them, they are compiled one after the other, and of the fastest as many are kept as fit.
        cache: reuse the result of an earlier race of the same program on this machine, once its winner has been
            verified and timed against eager again, and store the result of a new race. What quantization measures is
            stored and reused too, except the values of your own `metric`. `tsopt cache show` says where.
        check_indices: engines that accept out-of-range indices get every call's indices checked, whatever the cost,
            and raise what eager raises. False checks only those that take less than 1 % of a call to check; the report
            lists the rest.
        strict_specials: reject a candidate that differs from eager on NaN, infinities or denormals. False notes the
            difference in the report.
        time_all: time every correct candidate for as long as `seconds` says, also those that cannot win, for a complete
            table. False ends the race as soon as it is decided.
        best_so_far: Ctrl-C during the timing ends only the timing: the best candidate so far is verified and returned,
            and the result is not cached. A second Ctrl-C, or one at another time, raises KeyboardInterrupt as usual.
        share_weights: let the winner read the model's weights in place, which saves a copy. Calls then raise
            WeightsChangedError once torch or an optimizer's step has written to one of them. False: the winner keeps
            the current weights.
        audit: the fraction of serving time that audits may take. An audit repeats a real call in eager, on copies of
            the inputs, and compares the results; the first comes within 100 calls. If they differ, a warning is issued
            and the model runs in eager from then on. 0 turns audits off.
        progress: True shows the stages and their times, as a table on a terminal and in a notebook with ipywidgets,
            otherwise as lines on stderr; a function is called with the name of each step.

    Returns:
        An `Optimized`, or a `Partitioned` if the model was split at graph breaks. A model that cannot be captured in
        any of these ways, or that gives nothing to verify, is returned as an `InEager`; its report gives the reason for
        each way that was tried. A frontend requested by name raises instead.

    Raises:
        CaptureError: the model itself fails on its example. Its subclass NotReady: the model has no weights, its
            weights contain NaN, or it is in training mode and its output depends on that.
        UsageError: an option is invalid, or a CUDA graph is being recorded.
        BackendError: a kernel has failed on the GPU, which this process can no longer use.
    """
    options = locals()
    if model_in(model) is not None:
        raise UsageError(
            f"a {type(model).__name__} is a pipeline, which does more than its model",
            fix="use tsopt.hybridize(pipeline), which optimizes the model in it at the first call",
        )
    if isinstance(model, Optimized | Partitioned | InEager):
        model.warn_of_ignored(options, inspect.signature(optimize).parameters)
        return model
    model = original_of(model)
    examples = as_examples(example_input)
    check_not_recording(examples[0])
    candidates, int8 = _checked(options, on_gpu=is_on_gpu(examples[0]))
    passes, without = passes_of(passes), names_in(without)
    settings = RaceSettings(
        candidates=candidates,
        threads=threads,
        seconds=seconds,
        seed=seed,
        budget=budget,
        memory=memory,
        check_indices=check_indices,
        strict_specials=strict_specials,
        time_all=time_all,
        best_so_far=best_so_far,
        share_weights=share_weights,
    )
    with _told(progress, model) as tell:
        request = Request(
            model=model,
            level=level,
            race=settings,
            passes=passes,
            without=without,
            eval_mode=eval_mode,
            allow_nan=allow_nan,
            on_new_signature=on_new_signature,
            on_gradients=on_gradients,
            warmup=warmup,
            isolate=isolate,
            cache=cache,
            progress=ReportedProgress(tell),
            frontend=frontend,
            audit=audit,
            dynamic=dynamic,
            int8=int8,
        )
        with kept_outside(model):
            return _optimized(request, *examples)


def _optimized(request: Request, *examples: Example) -> Optimized | Partitioned | InEager:
    """The model as one graph; otherwise partitioned; otherwise in eager."""
    frontend = request.frontend
    because: GraphBreakError | None = None
    if frontend != "parts":
        try:
            return request.as_one_graph(*examples)
        except GraphBreakError as error:
            if frontend in NEVER_IN_PARTS:
                raise
            because = error
        except Exception as error:
            check_usable(examples[0])
            return request.for_one_size(error, *examples) or request.in_eager(examples[0], error)
    try:
        return request.in_parts(because, *examples)
    except Exception as error:
        check_usable(examples[0])
        return request.in_eager(examples[0], *filter(None, (because, error)))


def _told(
    progress: Callable[[str], None] | bool | None, model: object
) -> AbstractContextManager[Callable[[str], None]]:
    """What the steps are told to."""
    if progress is True:
        from tsopt.runtime.progress import shown

        return shown(name_of(model))
    return nullcontext(progress or (lambda text: None))


def who_races(
    example: Example,
    backends: Sequence[str] | Literal["all"] | None,
    precision: str | None,
    level: int,
    *,
    calibrated: bool = False,
    keep_float: bool = False,
) -> tuple[Candidate, ...]:
    """The candidates that the options of `optimize` select. Raises UsageError."""
    on_gpu = is_on_gpu(example)
    return _candidates(backends, precision, level, on_gpu=on_gpu, calibrated=calibrated, keep_float=keep_float)


def _candidates(
    backends: Sequence[str] | Literal["all"] | None,
    precision: str | None,
    level: int,
    *,
    on_gpu: bool,
    calibrated: bool,
    keep_float: bool,
) -> tuple[Candidate, ...]:
    asked = precision or (AUTO if LEVELS.get(level) == Numerics.LOSSY else FP32)
    return candidates_for(backends, asked, on_gpu=on_gpu, calibrated=calibrated, keep_float=keep_float)


def compile(
    program: Program, backend: str | Backend = "onnxruntime", *, share_weights: bool = False, **options: Any
) -> Executable:
    """Compiles a program with one backend.

    Args:
        backend: a name (`eager`, `torchscript`, `onnxruntime?threads=1`, `eager?precision=bf16`, ...),
            `package.module:Class` for a custom backend, or a Backend.
        share_weights: let the engine read the program's weights in place, which saves a copy. Writing to them later,
            for example by training the model they belong to, then changes some of what the engine computes.
        options: options of the backend, for example `threads=2`.

    Raises:
        BackendError: the backend does not support the program; the message names the op and its location.
        NoGain: the program has no matrix product that a lower precision would make faster. A BackendError.
    """
    if not isinstance(backend, str):
        return compile_by(program, backend, share_weights=share_weights, **options)
    candidate = Candidate.parse(backend)
    lowered = in_precision(program, candidate.variant)
    return compile_by(lowered, candidate, share_weights=share_weights, **options)


def _checked(options: Mapping[str, Any], *, on_gpu: bool) -> tuple[tuple[Candidate, ...], Int8Options]:
    """The candidates and the options for int8 that all options of `optimize` select. Raises UsageError."""
    check_level(options["level"])
    for name, known in (("on_new_signature", POLICIES), ("on_gradients", ON_GRADIENTS)):
        if options[name] not in known:
            raise UsageError(f"invalid {name}={options[name]!r}", fix=f"use one of: {', '.join(known)}")
    if options["frontend"] not in FRONTENDS:
        raise UsageError(f"unknown frontend {options['frontend']!r}", fix=f"use one of: {', '.join(FRONTENDS)}")
    backends, warmup = options["backends"], options["warmup"]
    if isinstance(backends, str) and backends != "all":
        raise UsageError(
            "backends must be a tuple of names, got a string", fix=f"pass a tuple: backends=({backends!r},)"
        )
    if type(warmup) is not int or warmup < 0:
        raise UsageError(f"warmup must be a number of calls, got {warmup!r}", fix="pass 0 or more")
    check_threads(options["threads"])
    _check_positive("seconds", options["seconds"], "pass a number of seconds")
    if options["budget"] is not None:
        _check_positive("budget", options["budget"], "pass a number of seconds, or None for no limit")
    if options["memory"] is not None:
        _check_positive("memory", options["memory"], "pass a number of bytes, or None for a share of what is free")
    for name in () if backends is None or backends == "all" else backends:
        get_backend(name)
    check_share(options["audit"])
    given = {name: options[name] for name in ("calibration", "metric", "max_drop")}
    int8 = Int8Options(**given, keep_float=patterns_in(options["keep_float"]))
    int8.check()
    candidates = _candidates(
        *(backends, options["precision"], options["level"]),
        on_gpu=on_gpu,
        calibrated=int8.calibration is not None,
        keep_float=bool(int8.keep_float),
    )
    if int8.are_given and all(candidate.precision == FP32 for candidate in candidates):
        raise UsageError(
            "calibration, metric, max_drop and keep_float have no effect without a lower precision",
            fix='pass precision="int8", or "auto" for all of them',
        )
    return candidates, int8


def _check_positive(name: str, value: Any, fix: str) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise UsageError(f"{name} must be a number greater than 0, got {value!r}", fix=fix)


def names_of_options() -> frozenset[str]:
    """What `optimize` takes besides a model and an example."""
    return frozenset(name for name, item in _parameters() if item.kind is item.KEYWORD_ONLY)


def check_options(given: Mapping[str, Any]) -> None:
    """Raises UsageError for options of `optimize` that are invalid whatever the model is, before there is one."""
    # What can be read only once is left to `optimize`.
    known = {name: value for name, value in given.items() if not isinstance(value, Iterator)}
    options = {name: item.default for name, item in _parameters()} | known
    _checked(options, on_gpu=True)  # where all may race
    check_passes(options["passes"], options["level"], options["without"])


def _parameters() -> Iterable[tuple[str, inspect.Parameter]]:
    return inspect.signature(optimize).parameters.items()
