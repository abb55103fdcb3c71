"""What TorchDynamo keeps of models that are gone.

Each model in parts is compiled in a region of its own. But TorchDynamo makes 256 entries for a piece of code and no
more, in all regions together, the user's own among them (`accumulated_recompile_limit`), and it drops none.
"""

from __future__ import annotations

from typing import Any

from tsopt.compiler.other_threads import others_run
from tsopt.compiler.protect import InEvalMode

_ended: set[int] = set()


def region_of(compiled: Any) -> int | None:
    """The region of what torch.compile has returned; None where torch has no regions."""
    compiled = compiled.module if isinstance(compiled, InEvalMode) else compiled
    found = getattr(getattr(compiled, "dynamo_ctx", compiled), "_isolate_recompiles_id", None)
    return found if isinstance(found, int) and found >= 0 else None


def end(region: int | None) -> None:
    """Nobody calls what was compiled there any more."""
    if region is not None:
        _ended.add(region)


def forget_the_ended() -> None:
    """Drops the entries of code that nobody calls but models that are gone.

    Not as soon as they are gone, which may be while TorchDynamo reads these entries; and not while another thread may.
    """
    if not _ended or others_run():
        return
    from torch._C._dynamo import eval_frame
    from torch._dynamo import convert_frame

    left: set[int] = set()
    for code in filter(None, [there() for there in convert_frame.input_codes.seen]):
        regions = {entry.isolate_recompiles_id for entry in eval_frame._debug_get_cache_entry_list(code)}
        if regions and regions <= _ended:
            eval_frame.reset_code(code)
        else:
            left |= regions
    _ended.intersection_update(left)
