"""`tsopt cache`: what is kept of races."""

from __future__ import annotations

import typer

from tsopt.cli import process
from tsopt.cli.options import AsJson
from tsopt.errors import UsageError

app = typer.Typer(
    help="Show or clear the cached results of races and of quantization.", no_args_is_help=True, rich_markup_mode=None
)


@app.command(help="Show where the cache is and how much it holds.")
def show(json: AsJson = False) -> None:
    out = process.output(json)
    from tsopt.runtime.racing import cache_files as cache
    from tsopt.runtime.racing.cache_directory import NoPlaceError, directory, objection

    found, steps, size, reason = cache.entries(), cache.steps(), cache.size(), objection()
    try:
        place: str | None = str(directory())
    except NoPlaceError:
        place = None
    out.json({"directory": place, "entries": len(found), "steps": len(steps), "bytes": size, "objection": reason})
    if place is not None:
        measured = f" and {_counted(len(steps), 'step')} of quantization" if steps else ""
        out.say(f"{place}: {_counted(len(found), 'race')}{measured}, {size / 1e3:.1f} kB")
    if reason:
        out.say(f"the cache is not used: {reason}")


@app.command(help="Delete all cached results.")
def clear(json: AsJson = False) -> None:
    out = process.output(json)
    from tsopt.runtime.racing import cache_files as cache
    from tsopt.runtime.racing.cache_directory import directory, objection

    reason = objection()
    if reason:
        raise UsageError("the cache was not cleared", why=reason)
    try:
        steps, count = len(cache.steps()), cache.clear()
    except OSError as error:
        raise UsageError("the cache cannot be cleared", why=str(error)) from error
    out.json({"removed": count, "steps": steps})
    measured = f" and {_counted(steps, 'step')} of quantization" if steps else ""
    out.say(f"removed {_counted(count, 'race')}{measured} from {directory()}")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
