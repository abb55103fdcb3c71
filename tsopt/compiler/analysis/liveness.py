"""Peak bytes of live activations when a program runs in its order. Never changes a program.

Only what calls allocate is counted, not inputs or weights. A view adds nothing and keeps its base alive. Backends that
reuse buffers or fuse stay below this estimate; it compares different orders of the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program

Memory = tuple[fx.Node, object]  # what a call allocates: the call, and which of its results


@dataclass
class Lives:
    """Who allocates and who uses which memory; what does not change with the order of calls.

    Attributes:
        size: bytes of each memory.
        made: the memories that a call allocates.
        used: the memories that a call reads, through whatever views.
        users: the calls that read a memory.
        kept: what is returned, and lives to the end.
    """

    size: dict[Memory, int] = field(default_factory=dict)
    made: dict[fx.Node, list[Memory]] = field(default_factory=dict)
    used: dict[fx.Node, list[Memory]] = field(default_factory=dict)
    users: dict[Memory, list[fx.Node]] = field(default_factory=dict)
    kept: set[Memory] = field(default_factory=set)

    @classmethod
    def of(cls, program: Program) -> Lives:
        lives = cls()
        roots = ops.storage_roots(program.graph.nodes)
        memories: dict[fx.Node, list[Memory]] = {}
        for node in program.graph.nodes:
            memories[node] = [memory for root in roots.get(node, ()) for memory in lives._memories(root)]
            if not ops.is_call(node):
                continue
            lives.made[node] = lives._allocated(node) if (node, None) in roots[node] else []
            if lives.made[node]:
                memories[node] = lives.made[node]
            read = dict.fromkeys(memory for source in node.all_input_nodes for memory in memories[source])
            lives.used[node] = list(read)
            for memory in read:
                lives.users[memory].append(node)
        lives.kept = {memory for value in program.outputs for memory in memories[value]}
        return lives

    def _allocated(self, node: fx.Node) -> list[Memory]:
        value = node.meta.get("val")
        tensors = ops.tensors_of(value)
        several = isinstance(value, (list, tuple))
        made: list[Memory] = [(node, index if several else None) for index in range(len(tensors))]
        for memory, tensor in zip(made, tensors, strict=True):
            self.size[memory] = tensor.untyped_storage().nbytes()
            self.users[memory] = []
        return made

    def _memories(self, root: Memory) -> list[Memory]:
        if root in self.size:
            return [root]
        return [memory for memory in self.made.get(root[0], ()) if root[1] is None]

    def peak(self, order: Sequence[fx.Node]) -> int:
        """The largest number of bytes that live at once when calls are made in this order."""
        left = {memory: len(users) for memory, users in self.users.items()}
        live = most = 0
        for node in order:
            live += sum(self.size[memory] for memory in self.made[node])
            most = max(most, live)
            for memory in self.used[node]:
                left[memory] -= 1
            freed = [m for m in (*self.used[node], *self.made[node]) if not left[m] and m not in self.kept]
            live -= sum(self.size[memory] for memory in freed)
        return most


def peak_bytes(program: Program) -> int:
    """The largest number of bytes of activations that live at once."""
    return Lives.of(program).peak(list(program.calls()))
