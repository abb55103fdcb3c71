"""`sweep`: one model raced in several settings of device, threads and batch size, as `tsopt bench` prints it."""

from __future__ import annotations

import copy
import csv
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

import torch
from torch import nn

from tsopt.api import optimize
from tsopt.compiler.calls.calibration_again import readable_again
from tsopt.compiler.calls.example import Example, as_example
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.devices import put
from tsopt.compiler.sizes.dims import resized as with_sizes
from tsopt.errors import CaptureError, TsoptError, UsageError
from tsopt.runtime.page.chart import Chart, Series
from tsopt.runtime.page.document import framed
from tsopt.runtime.page.table import page_of
from tsopt.runtime.racing.row import Row
from tsopt.runtime.racing.speedup import Speedup
from tsopt.runtime.rendering import markdown_blocks, markdown_table, milliseconds, ranked, text_table, three_digits
from tsopt.runtime.report import Report, data_frame
from tsopt.runtime.thread_count import check_threads
from tsopt.runtime.untrusted_text import markdown_cell, on_one_line, printable

COLUMNS = ("device", "threads", "batch", "candidate", "p50 ms", "p90 ms", "samples/s", "speed-up [95 %]", "verdict")
DEFAULTS = {"cache": False, "time_all": True}  # a sweep compares all candidates


@dataclass(frozen=True, slots=True)
class Setting:
    """Device, threads and batch size; batch is None if the inputs have no common first axis."""

    device: str
    threads: int
    batch: int | None

    def __str__(self) -> str:
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"{self.device}, {self.threads} {'thread' if self.threads == 1 else 'threads'}{batch}"


@dataclass(frozen=True, slots=True)
class Result:
    """A race in one setting, or the reason why there was none."""

    setting: Setting
    report: Report | None
    reason: str = ""

    def records(self) -> Iterator[dict[str, Any]]:
        """One flat record per candidate; without samples per second where the batch is not known."""
        report, setting = self.report, asdict(self.setting)
        rows = (Row("eager", "failed", self.reason),) if report is None else ranked(report)
        for row in rows:
            record = row.record()
            ms, batch = record["p50_ms"], setting["batch"]
            rate = None if batch is None or not ms else 1e3 / ms * batch
            wins = report is not None and row.key == report.winner_key
            yield setting | {"wins": wins, "samples_per_second": rate} | record


@dataclass(frozen=True, slots=True)
class Sweep:
    """The races of a model in several settings."""

    results: tuple[Result, ...]

    def records(self) -> list[dict[str, Any]]:
        """One flat record per candidate and setting."""
        return [record for result in self.results for record in result.records()]

    def cells(self) -> list[tuple[str, ...]]:
        """The records as rows of a table with COLUMNS; each setting is shown once."""
        return [_cells(record, i == 0) for result in self.results for i, record in enumerate(result.records())]

    @property
    def reasons(self) -> list[str]:
        """Why candidates are missing, each reason once and on one line."""
        said = (f"{row['candidate']}: {row['reason']}" for row in self.records() if row["reason"])
        return list(dict.fromkeys(map(on_one_line, said)))

    @property
    def text(self) -> str:
        lines = text_table(COLUMNS, self.cells())
        return "\n".join([*lines, *(["", *self.reasons] if self.reasons else []), *self.machine])

    @property
    def markdown(self) -> str:
        """The table as GitHub markdown."""
        reasons = [f"- {markdown_cell(reason)}" for reason in self.reasons]
        return markdown_blocks(markdown_table(COLUMNS, self.cells()), reasons, self.machine)

    @property
    def charts(self) -> list[Chart]:
        """Milliseconds of a call and samples per second, over what differs between the settings."""
        settings = [result.setting for result in self.results]
        over_batches = len({setting.batch for setting in settings}) > 1
        lines: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for record in self.records():
            if record["p50_ms"] is not None and (record["batch"] is not None or not over_batches):
                kept = [record["candidate"]]
                if over_batches and len({setting.threads for setting in settings}) > 1:
                    kept.append(f"{record['threads']} threads")
                if len({setting.device for setting in settings}) > 1:
                    kept.append(record["device"])
                x = record["batch"] if over_batches else record["threads"]
                lines.setdefault(", ".join(kept), []).append((x, record))
        axis = "batch size" if over_batches else "threads"
        made = []
        for title, unit, column in (
            ("Latency", "ms of a call", "p50_ms"),
            ("Throughput", "samples/s", "samples_per_second"),
        ):
            series = []
            for name, points in lines.items():
                known = [(x, record[column]) for x, record in points if record[column] is not None]
                told = ((x, y, f"{name}: {three_digits(y)} {unit}, {axis} {x}") for x, y in known)
                series.append(Series(name, tuple(told), True))
            made.append(Chart(f"{title} over {axis}", axis, unit, tuple(series)))
        return made

    @property
    def html(self) -> str:
        """The sweep as one HTML page with charts, which loads nothing; of a single race, the page of its report."""
        if len(self.results) == 1 and (only := self.results[0].report) is not None:
            return only.html
        wins = [
            f"{record['candidate']} ({result.setting})"
            for result in self.results
            for record in result.records()
            if record["wins"]
        ]
        rows = [_cells(record, True) for record in self.records()]
        remarks = [*self.reasons, "* winner in its setting", *self.machine]
        title = next((result.report.model for result in self.results if result.report is not None), "sweep")
        said = f"Fastest: {', '.join(wins)}." if wins else "The model ran in none of these settings."
        return page_of(title, said, self.charts, COLUMNS, rows, remarks)

    def _repr_html_(self) -> str:
        return framed(self.html, "tsopt sweep")

    @property
    def machine(self) -> list[str]:
        """A line that names the machine."""
        made = [result.report.environment for result in self.results if result.report is not None]
        return [f"on {made[0].machine}"] if made else []

    def to_json(self) -> dict[str, Any]:
        return {
            "results": [
                {
                    "setting": asdict(result.setting),
                    "reason": result.reason,
                    "report": None if result.report is None else result.report.to_json(),
                }
                for result in self.results
            ]
        }

    def to_csv(self) -> str:
        """The records as CSV with a header line; texts without control characters."""
        out, rows = io.StringIO(), self.records()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: printable(item) if isinstance(item, str) else item for name, item in row.items()})
        return out.getvalue()

    def to_frame(self) -> Any:
        """The records as a pandas DataFrame. Raises UsageError if pandas is missing."""
        return data_frame(self.records())

    def __str__(self) -> str:
        return self.text


def sweep(
    model: Callable[..., Any],
    example_input: Any,
    *,
    threads: Iterable[int | None] = (None,),
    batch_sizes: Iterable[int | None] = (None,),
    devices: Iterable[str | None] = (None,),
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Sweep:
    """Races a model in every combination of settings, each as `optimize` does.

    A setting in which the model cannot run is a result with a reason, and the sweep continues. If it can run in none,
    the error of `optimize` in the first one is raised.

    Args:
        threads: numbers of intra-op threads; None uses torch's setting.
        batch_sizes: sizes of the inputs' first axis, to which rows are repeated or dropped; None keeps the size.
        devices: for example `cpu` or `cuda`; the model is copied there. None keeps the device.
        progress: called with the setting and the name of each step.
        options: options of `optimize`, for every race; `cache` is False and `time_all` True if they do not say.

    Raises:
        UsageError: a device is not available, a number is less than 1, or batch sizes were given for inputs without a
            common first axis.
        TsoptError: as `optimize` does, if the model can run in no setting.
    """
    example = as_example(example_input)
    threads, batch_sizes = _counts("threads", threads), _counts("batch_sizes", batch_sizes)
    devices = [str(value) if isinstance(value, torch.device) else value for value in _values("devices", devices)]
    _check(example, threads, batch_sizes, devices)
    tell = progress or (lambda text: None)
    results: list[Result] = []
    errors: list[TsoptError] = []
    if "calibration" in options:
        options["calibration"] = readable_again(options["calibration"])
    for device in devices:
        moved, there = _on(model, example, device)
        for batch, count in itertools.product(batch_sizes, threads):
            place = device or next((str(leaf.device) for leaf in _leaves(there)), "cpu")
            setting = Setting(place, count or torch.get_num_threads(), batch or batch_of(there))

            def told(text: str, setting: Setting = setting) -> None:
                tell(f"{setting}: {text}")

            try:
                form = there if batch is None else _of_size(there, batch)
                # The caller wants new measurements, not cached ones.
                fast = optimize(moved, form, threads=count, progress=told, **DEFAULTS | options)
            except TsoptError as error:
                errors.append(error)
                results.append(Result(setting, None, "; ".join(filter(None, (error.what, error.why)))))
                continue
            results.append(Result(setting, fast.report))
    if len(errors) == len(results):
        raise errors[0]
    return Sweep(tuple(results))


def batch_of(example: Example) -> int | None:
    """The size of the first axis, if all inputs agree on it."""
    sizes = {leaf.shape[0] if leaf.dim() else None for leaf in _leaves(example)}
    return sizes.pop() if len(sizes) == 1 else None


def resized(example: Example, batch: int) -> Example:
    """The example with this many rows; its own rows are repeated if there are not enough."""
    return with_sizes(example, {(position, 0): batch for position in range(len(_leaves(example)))})


def _of_size(example: Example, batch: int) -> Example:
    """`resized`. Raises CaptureError where there is no memory for it."""
    try:
        return resized(example, batch)
    except (RuntimeError, MemoryError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]  # of a MemoryError there is often no text
        raise CaptureError(f"no input with batch {batch} can be made", why=why) from error


def _leaves(example: Example) -> list[torch.Tensor]:
    return flatten((example.args, example.kwargs))[0]


def _on(model: Callable[..., Any], example: Example, device: str | None) -> tuple[Callable[..., Any], Example]:
    leaves, structure = flatten((example.args, example.kwargs))
    if device is None or all(leaf.device.type == torch.device(device).type for leaf in leaves):
        return model, example
    moved = copy.deepcopy(model).to(device) if isinstance(model, nn.Module) else model
    args, kwargs = unflatten(structure, [leaf.detach().to(device) for leaf in leaves])
    return moved, Example(args, kwargs)


def _values(name: str, given: Any) -> tuple[Any, ...]:
    """The settings of one kind. Raises UsageError for one that is not in a tuple, and for none."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"{name} must be a tuple, got {given!r}", fix=f"pass {name}=({given!r},)")
    found = tuple(given)
    if not found:
        raise UsageError(f"{name} is empty", fix="pass at least one value, or leave it out")
    return found


def _counts(name: str, given: Any) -> tuple[int | None, ...]:
    """The same for numbers. Raises UsageError for what is not an integer."""
    found: list[int | None] = []
    for value in _values(name, given):
        if isinstance(value, bool) or not isinstance(value, Integral | None):
            raise UsageError(f"{name} must be integers, got {value!r}", fix=f"pass {name}=(1, 2), for example")
        found.append(None if value is None else int(value))
    return tuple(found)


def _check(
    example: Example,
    threads: Sequence[int | None],
    batch_sizes: Sequence[int | None],
    devices: Sequence[Any],
) -> None:
    for count in threads:
        check_threads(count)
    for batch in batch_sizes:
        if batch is not None and batch < 1:
            raise UsageError(f"batch size must be at least 1, got {batch}", fix="pass 1 or more")
    if any(batch is not None for batch in batch_sizes) and not batch_of(example):
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in _leaves(example))
        raise UsageError(
            "the inputs have no common batch axis to resize",
            why=f"the sizes of their first axes differ or are 0: {shapes}",
            fix="leave out the batch sizes, or pass an example with the batch as the first axis of every input",
        )
    for device in devices:
        if not isinstance(device, str | None):
            raise UsageError(f"devices must be names, got {device!r}", fix='pass devices=("cpu",), for example')
        if device is not None:
            put(torch.empty(1, device="cpu"), device)


def _cells(row: dict[str, Any], first: bool) -> tuple[str, ...]:
    setting = (row["device"], str(row["threads"]), "-" if row["batch"] is None else str(row["batch"]))
    rate, gain = row["samples_per_second"], [row[name] for name in ("speedup", "speedup_low", "speedup_high")]
    return (
        *(setting if first else ("", "", "")),
        f"{row['candidate']}{' *' if row['wins'] else ''}",
        "-" if row["p50_ms"] is None else milliseconds(row["p50_ms"]),
        "-" if row["p90_ms"] is None else milliseconds(row["p90_ms"]),
        "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}",
        "-" if None in gain else str(Speedup(*gain)),
        row["verdict"],
    )
