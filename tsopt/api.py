"""The one call. Checks what it is asked for; the work is that of a Request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from tsopt.compiler.calls.example import Example, as_examples
from tsopt.compiler.capture import frontends
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.precisions import FP32
from tsopt.compiler.rewriting.pipeline import Pass, Repeat
from tsopt.errors import GraphBreakError, UsageError
from tsopt.passes import STANDARD
from tsopt.passes.precision import in_precision
from tsopt.request import ReportedProgress, Request
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
from tsopt.transforms import LEVELS

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
    isolate: bool = True,
    budget: float | None = None,
    cache: bool = True,
    check_indices: bool = False,
    strict_specials: bool = False,
    share_weights: bool = False,
    audit: float = SHARE,
    progress: Callable[[str], None] | None = None,
) -> Optimized | Partitioned | InEager:
    """Makes the fastest verified form of a model that this machine can run.

    Args:
        model: an nn.Module, a function of tensors or an ExportedProgram. Left as it was.
        example_input: a tensor; a tuple = positional arguments; a dict = keyword arguments; or
            `tsopt.example(*args, **kwargs)`. A list of several: the sizes in which they differ are dynamic, from 1 to
            twice the largest, and the first is the one that is timed.
        dynamic: sizes that differ from call to call: `{"x": {0: "batch"}}`, `{"x": {0: "batch[1..32]"}}`. What was made
            is run at the ends of the ranges and between them; the report says at which sizes. Calls of sizes beyond
            are calls of another form.
        level: 0 no passes, 1 those that keep every bit, 2 also those that round elsewhere, 3 also lossy ones: as 2 with
            `precision="auto"`.
        backends: who races; eager itself always does. None: the engines that are installed and compile in seconds.
            `all`: every engine, also Inductor, which takes minutes; one that is not installed is a row in the table,
            where one that was asked for by name is an error.
        precision: what products of float32 matrices may be computed in beside `fp32`: `bf16`, `fp16`, on a GPU `tf32`,
            or `auto` for all of them. Candidates in that precision race beside those in `fp32`; their outputs are
            compared by how far they are away as a whole, 3 % for `bf16` and 1 % for the others.
        frontend: who reads the model. `export`, `strict`, `fx`, `torchscript`: see `capture`; what is not a single
            graph for TorchScript either runs as a script, with TorchScript's own optimizations. `parts`: dynamo, in
            graphs with the Python between them; the result runs and cannot be saved. `auto`: torch.export; TorchScript,
            where values decide; parts; eager. The report says which, and why not one before it. `one-graph`: the same
            without parts and eager.
        passes: the pipeline; extend `tsopt.STANDARD` with a longer tuple.
        without: names of rules and passes to leave out.
        threads: intra-op threads for the candidates; None takes torch's own number.
        seconds: about how long to time.
        seed: for the inputs that the verdicts are made on.
        eval_mode: capture a model that is in training mode as if it were in eval mode.
        allow_nan: take weights that hold NaN.
        on_new_signature: what a call of another form does: `capture` it once, go `eager`, or `error`.
        on_gradients: what a call does that only the model itself can serve, because gradients are wanted for an input,
            a transform of torch.func or torch.jit.trace goes through it, or autocast is on: run `eager` and say so
            once, or `error`.
        isolate: give each candidate a process of its own, so that one that crashes or hangs is only a row in the table;
            without, all of them run in this process, which saves a few seconds.
        budget: seconds for all candidates together, to compile, to check and to time; None for no limit.
        cache: take over what an earlier race of the same program on this machine has found, after its winner has been
            verified and timed against eager again; and keep what this one finds. Where: `tsopt cache show`.
        check_indices: engines that accept indices which do not exist have each call's indices checked, whatever that
            costs, and raise what eager raises. Otherwise those are checked where it costs less than 1 % of a call, and
            the report names the others.
        strict_specials: a candidate that differs from eager on NaN, infinities or denormals is out. Otherwise the
            report says where it differs.
        share_weights: let the winner read the model's weights where they are, which saves a copy of them. Calls then
            raise WeightsChangedError once torch has written to one of them; without, the winner keeps those of now.
        audit: the share of the time served that audits may take: real calls that eager makes as well, on copies of
            the inputs. The first is within 100 calls. A difference is a warning, and eager from then on. 0: none.
        progress: told the name of each step.

    A model that cannot be captured, in parts neither, or of which nothing can be verified, comes back as it is: an
    `InEager`, whose report says why for each way that was tried. By name, a front end raises.

    Raises:
        CaptureError: the model itself fails on its example. NotReady, one of them: it has no weights, weights that are
            NaN, or is in training mode and its answer depends on it.
        UsageError: an option is not what it must be.
    """
    examples = as_examples(example_input)
    _check_options(on_new_signature, on_gradients, backends, threads, seconds, budget, frontend)
    check_share(audit)
    settings = RaceSettings(
        candidates=who_races(examples[0], backends, precision, level),
        threads=threads,
        seconds=seconds,
        seed=seed,
        budget=budget,
        check_indices=check_indices,
        strict_specials=strict_specials,
        share_weights=share_weights,
    )
    request = Request(
        model=model,
        level=level,
        race=settings,
        passes=tuple(passes),
        without=tuple(without),
        eval_mode=eval_mode,
        allow_nan=allow_nan,
        on_new_signature=on_new_signature,
        on_gradients=on_gradients,
        isolate=isolate,
        cache=cache,
        progress=ReportedProgress(progress or (lambda text: None)),
        frontend=frontend,
        audit=audit,
        dynamic=dynamic,
    )
    because: GraphBreakError | None = None
    if frontend != "parts":
        try:
            return request.as_one_graph(*examples)
        except GraphBreakError as error:
            if frontend in NEVER_IN_PARTS:
                raise
            because = error
        except Exception as error:
            return request.for_one_size(error, *examples) or request.in_eager(examples[0], error)
    try:
        return request.in_parts(because, *examples)
    except Exception as error:
        return request.in_eager(examples[0], *filter(None, (because, error)))


def who_races(
    example: Example, backends: Sequence[str] | Literal["all"] | None, precision: str | None, level: int
) -> tuple[Candidate, ...]:
    """The candidates that `optimize` is asked for; see there. Raises UsageError."""
    asked = precision or (AUTO if LEVELS.get(level) == Numerics.LOSSY else FP32)
    return candidates_for(backends, asked, on_gpu=is_on_gpu(example))


def compile(
    program: Program, backend: str | Backend = "onnxruntime", *, share_weights: bool = False, **options: Any
) -> Executable:
    """Compiles a program with one backend.

    Args:
        backend: a name (`eager`, `torchscript`, `onnxruntime?threads=1`, `eager?precision=bf16`, ...), or
            `package.module:Class` for one of your own, or a Backend.
        share_weights: let the engine read the program's weights where they are, which saves a copy. What writes to
            them later, such as training the model that they belong to, then changes some of what it computes.
        options: the backend's own, such as `threads=2`.

    Raises:
        BackendError: the backend cannot take the program; the message names the op and its place.
        NoGain, a BackendError: the program has no product that a lower precision would make faster.
    """
    if not isinstance(backend, str):
        return compile_by(program, backend, share_weights=share_weights, **options)
    candidate = Candidate.parse(backend)
    lowered = in_precision(program, candidate.variant)
    return compile_by(lowered, candidate, share_weights=share_weights, **options)


def _check_options(
    policy: str,
    on_gradients: str,
    backends: Sequence[str] | None,
    threads: int | None,
    seconds: float,
    budget: float | None,
    frontend: str,
) -> None:
    if policy not in POLICIES:
        raise UsageError(f"on_new_signature={policy!r}", fix=f"one of: {', '.join(POLICIES)}")
    if on_gradients not in ON_GRADIENTS:
        raise UsageError(f"on_gradients={on_gradients!r}", fix=f"one of: {', '.join(ON_GRADIENTS)}")
    if frontend not in FRONTENDS:
        raise UsageError(f"frontend={frontend!r}", fix=f"one of: {', '.join(FRONTENDS)}")
    if isinstance(backends, str) and backends != "all":
        raise UsageError("backends is a string", fix=f"pass a tuple: backends=({backends!r},)")
    if threads is not None and threads < 1:
        raise UsageError(f"threads={threads}", fix="a number of at least 1")
    if seconds <= 0:
        raise UsageError(f"seconds={seconds}", fix="a time above 0")
    if budget is not None and not budget > 0:
        raise UsageError(f"budget={budget}", fix="a number of seconds above 0, or None for no limit")
    for name in () if backends is None or backends == "all" else backends:
        get_backend(name)
