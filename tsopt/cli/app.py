"""The commands. Each parses its options, calls the public API and prints the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tsopt._version import __version__
from tsopt.cli import cache, process
from tsopt.cli.options import (
    AsJson,
    Eval,
    Format,
    Html,
    Input,
    MaxSlowdown,
    Quiet,
    Seed,
    Subject,
    Threads,
    Timing,
    Trust,
    UseCache,
    check_beside,
    check_needs,
    grouped,
)

app = typer.Typer(
    name="tsopt",
    help="Turn a PyTorch model into the fastest verified form this machine can run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command(help="Optimize a model, race it against eager, and save the winner.")
@grouped
def export(
    subject: Subject,
    timing: Timing,
    threads: Threads = None,
    format: Annotated[
        list[Format] | None, typer.Option("--format", help="Output format; tsopt by default. Repeat for more than one.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="PATH", help="Output file or directory; the current directory by default."
        ),
    ] = None,
    opset: Annotated[
        int | None, typer.Option("--opset", min=17, help="ONNX opset; the exporter's own by default.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Also save the report as a .html, .md or .json file.")
    ] = None,
    html: Html = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the model's ops and which backends support them; time and write nothing."),
    ] = False,
    cache: UseCache = True,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    out = process.output(json, quiet)
    from tsopt.cli import export, quantize
    from tsopt.cli.outputs import check_outputs
    from tsopt.cli.saved import PAGE, check_saved

    export.check_frontend(subject)
    if dry_run:
        from tsopt.cli.dry_run import run

        run(out, subject, timing)
        return
    formats = [item.value for item in format or [Format.tsopt]]
    places = export.targets(subject.model, formats, output)
    export.check_formats(formats, opset)
    check_saved("--report", report, quantize.WRITERS)
    check_saved("--html", html, PAGE)
    check_outputs(subject, timing, places=places.values(), saved={"--report": report, "--html": html})
    made = export.run(
        out, subject, timing, places, threads=threads, cache=cache, opset=opset, saved={"report": report, "page": html}
    )
    _check_tried(out, made.stopped)


@app.command(help="Run layers in int8 where that is faster and accurate enough, save the winner, and show each layer.")
@grouped
def quantize(
    subject: Subject,
    timing: Timing,
    threads: Threads = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="PATH", help="Output bundle; in the current directory by default."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Also save the report, layers included, as a .html, .md or .json file."),
    ] = None,
    html: Html = None,
    cache: UseCache = True,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    out = process.output(json, quiet)
    from tsopt.cli import export, quantize
    from tsopt.cli.outputs import check_outputs
    from tsopt.cli.saved import PAGE, check_saved

    export.check_frontend(subject)
    quantize.check_precision(timing.precision)
    places = export.targets(subject.model, ["tsopt"], output)
    check_saved("--report", report, quantize.WRITERS)
    check_saved("--html", html, PAGE)
    check_outputs(subject, timing, places=places.values(), saved={"--report": report, "--html": html})
    timing = replace(timing, precision=timing.precision or "int8")
    saved = {"report": report, "page": html}
    made = export.run(out, subject, timing, places, threads=threads, cache=cache, saved=saved, layer_times=True)
    quantize.show(out, made)
    _check_tried(out, made.stopped)


@app.command(help="Show where the time of a call goes, layer by layer: op by op in torch, and in the fastest engine.")
@grouped
def profile(
    subject: Subject,
    timing: Timing,
    threads: Threads = None,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="How many layers to show.")] = 20,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also save all layers as a .json, .md or .html file.")
    ] = None,
    html: Html = None,
    training: Annotated[
        str | None,
        typer.Option(
            "--training", metavar="SAMPLESxEPOCHS", help="Also estimate the time of training, for example 50000x10."
        ),
    ] = None,
    cache: UseCache = True,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    out = process.output(json, quiet)
    from tsopt.cli import profile
    from tsopt.cli.outputs import check_outputs
    from tsopt.cli.saved import PAGE, check_saved
    from tsopt.runtime.profiling.training import parse_training

    profile.check_frontend(subject)
    check_saved("-o", output, profile.WRITERS)
    check_saved("--html", html, PAGE)
    check_outputs(subject, timing, saved={"-o": output, "--html": html})
    asked = None if training is None else parse_training(training)
    profile.run(out, subject, timing, threads=threads, cache=cache, top=top, training=asked, outputs=(output, html))


@app.command(help="Time eager and every candidate side by side, in each requested setting.")
@grouped
def bench(
    subject: Subject,
    timing: Timing,
    threads: Annotated[
        str | None,
        typer.Option("--threads", metavar="N,N", help="Intra-op thread counts to try; torch's own by default."),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option("--batch-sizes", metavar="N,N", help="Batch sizes to try, as sizes of the inputs' first axis."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="A,B", help="Devices to try, for example cpu,cuda; the example's by default."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also save the table as a .json, .csv, .md or .html file.")
    ] = None,
    html: Html = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    out = process.output(json, quiet)
    from tsopt.cli import bench
    from tsopt.cli.outputs import check_outputs
    from tsopt.cli.saved import PAGE, check_saved

    settings: dict[str, list[Any]] = {
        "threads": bench.numbers(threads, "--threads"),
        "batch_sizes": bench.numbers(batch_sizes, "--batch-sizes"),
        "devices": bench.words(devices, "--devices"),
    }
    check_saved("-o", output, bench.WRITERS)
    check_saved("--html", html, PAGE)
    check_outputs(subject, timing, saved={"-o": output, "--html": html})
    _check_tried(out, bench.run(out, subject, timing, settings=settings, outputs=(output, html)))


def _check_tried(out: Any, stopped: str) -> None:
    """Exits with code 1 if eager won only because this machine stopped every candidate."""
    if stopped:
        out.warn(f"no candidate could be tried, so eager is used: {stopped}")
        raise typer.Exit(1)


@app.command(help="Show the captured program, and the program after each pass that changed it.")
@grouped
def inspect(
    subject: Subject,
    diff: Annotated[bool, typer.Option("--diff", help="Show only what each pass changed.")] = False,
    passes: Annotated[
        bool,
        typer.Option(
            "--passes", help="Show the rewrites, near misses and cost of each pass and rule, not the program."
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--pass", metavar="NAME", help="Show only what this pass did. Repeat for more than one."),
    ] = None,
    why: Annotated[
        str | None,
        typer.Option("--why", metavar="RULE", help="Show where a rule or pass was applied, where it was not, and why."),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph",
            metavar="FILE",
            help="Also draw the program before and after the passes: .html, .svg, .png or .dot.",
        ),
    ] = None,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug-passes",
            help="Check every rewrite on the example and report those that change values (exit code 1).",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    out = process.output(json)
    if diff:
        check_beside("--diff", {"--passes": passes, "--why": why, "--debug-passes": debug})
    if only and not passes:
        check_beside("--pass", {"--why": why, "--debug-passes": debug})
    from tsopt.cli.export import directories

    if graph is not None:
        from tsopt.cli.graph import check_graph
        from tsopt.cli.outputs import check_outputs

        check_graph(graph)
        check_outputs(subject, None, saved={"--graph": graph})
    with directories([graph] if graph is not None else []) as new, out.progress(Path(subject.model).name) as tell:
        from tsopt.cli import inspect

        asked = inspect.Asked(diff=diff, passes=passes, only=only or (), why=why, graph=graph, debug=debug)
        found = inspect.inspected(out, subject, asked, tell)
    inspect.show(out, found, asked)
    for directory in new:
        out.say(f"created the directory {directory}")
    if graph is not None:
        out.say(f"saved: {graph}")
    if found.debugged is not None and found.debugged.findings:
        raise typer.Exit(1)


@app.command(
    help="Check that a bundle is intact and reproduces the model's outputs. Exit code 1 if the outputs differ."
)
def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A .tsopt directory.")],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Compare with this model, on its example and on fresh inputs."),
    ] = None,
    trust: Trust = False,
    input: Input = None,
    seed: Seed = 0,
    eval: Eval = False,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    out = process.output(json, quiet)
    if model is None:
        check_needs("--model", {"--input": input, "--seed": seed, "--eval": eval})
    from tsopt.cli.model_sources import load_model
    from tsopt.cli.verify import against_model, against_record

    with out.progress(bundle.name) as tell:
        tell("run")
        if model is None:
            found = against_record(bundle, trust)
        else:
            loaded = load_model(model, input or [], seed, trust=trust, note=out.note)
            found = against_model(bundle, trust, loaded, seed, eval_mode=eval)
    out.json({"bundle": str(bundle), "ok": True, "verdict": found.verdict, "load_seconds": found.load_seconds})
    out.say(f"{bundle}: {found.verdict}; loaded in {found.load_seconds:.2f} s")


@app.command(
    help="Check that a model is still as fast and as accurate as a baseline says. Exit code 1 if it is not, and 0 if "
    "noise leaves that undecided."
)
@grouped
def check(
    subject: Subject,
    timing: Timing,
    baseline: Annotated[
        Path,
        typer.Option(
            "--baseline",
            metavar="FILE",
            help="What --update wrote, a report as JSON, or a bundle of the earlier model.",
        ),
    ],
    update: Annotated[bool, typer.Option("--update", help="Measure, and write the baseline.")] = False,
    max_slowdown: MaxSlowdown = 0.05,
    compare_seconds: Annotated[
        float, typer.Option("--compare-seconds", metavar="SECONDS", help="Time limit for the comparison.")
    ] = 60.0,
    threads: Threads = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also save the comparison as a .json or .md file.")
    ] = None,
    cache: UseCache = True,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    out = process.output(json, quiet)
    from tsopt.cli import check
    from tsopt.cli.export import check_place
    from tsopt.cli.outputs import check_outputs
    from tsopt.cli.saved import check_saved

    check_saved("-o", output, check.WRITERS)
    if update:
        check_place("--baseline", baseline)
    written = {"-o": output} | ({"--baseline": baseline} if update else {})
    check_outputs(subject, timing, saved=written, read={} if update else {"the baseline": baseline})
    given = {"update": update, "max_slowdown": max_slowdown, "compare_seconds": compare_seconds, "threads": threads}
    found = check.run(out, subject, timing, baseline, output, given | {"cache": cache})
    if not found.ok:
        raise typer.Exit(1)


@app.command(help="List all passes and rules, in the order in which they run.")
def rules(json: AsJson = False) -> None:
    out = process.output(json)
    from tsopt.cli.inspect import show_rules

    show_rules(out)


@app.command(help="Show this machine, the backends it can use, and what is missing.")
def doctor(json: AsJson = False) -> None:
    out = process.output(json)
    from tsopt.cli.doctor import diagnose

    diagnose(out)


app.add_typer(cache.app, name="cache")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"tsopt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
