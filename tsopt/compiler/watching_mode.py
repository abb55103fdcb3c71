"""A mode in which every op of a call is seen, and which the model's own use of torch.compile survives."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):
    """To be derived from, as TorchDispatchMode is.

    TorchDynamo does not compile what is called under any other mode, and does not try again later: a function that the
    model has compiled, such as flex_attention, would be uncompiled for good, or fail.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True
