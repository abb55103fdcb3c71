"""Names for reading: a value keeps its own from pass to pass, so that two texts differ where programs do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program

LABEL = "label"  # key of `meta`
RETURN = "return"


class Labels:
    """The names of the values of a program, kept while passes rewrite it.

    A call is named after its module, and after its op as well where the module has several calls. What takes the place
    of a value takes its name over. Inputs and weights keep the names that they have.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}  # by the name that others have, too: the next number
        self._reads: dict[str, list[str]] = {}  # by the name of a call, the names of what it read in the last text

    def text(self, program: Program) -> str:
        """The text of a program with these names."""
        return program.text_with(self.of(program))

    def of(self, program: Program) -> dict[fx.Node, str]:
        """The names of all values of a program; calls that have none yet are given one."""
        names = program.value_names()
        ends = {node: name for node, name in names.items() if not ops.is_call(node)}
        self._taken |= {name.removeprefix("%") for name in ends.values()}
        calls = list(program.calls())
        known: dict[fx.Node, str] = {}
        kept: set[str] = set()
        for node in calls:
            label = node.meta.get(LABEL)
            if label is not None and label not in kept:
                known[node] = label
                kept.add(label)
        fresh = [node for node in calls if node not in known]
        known |= self._heirs(program, known, set(fresh), {name.removeprefix("%") for name in ends.values()})
        self._taken |= set(known.values())
        per_module = Counter(node.meta.get("module") for node in calls)
        for node in fresh:
            if node not in known:
                known[node] = self._free(node, is_only_call=per_module[node.meta.get("module")] == 1)
        for node, label in known.items():
            node.meta[LABEL] = label
            self._taken.add(label)
        found = {node: known.get(node, name.removeprefix("%")) for node, name in names.items()}
        self._reads = {label: [found[source] for source in sources] for label, sources in _readers(program, known)}
        return {node: f"%{name}" for node, name in found.items()}

    def _heirs(
        self, program: Program, known: dict[fx.Node, str], fresh: set[fx.Node], ends: set[str]
    ) -> dict[fx.Node, str]:
        """New calls, with the names of those in whose place they are read.

        Args:
            ends: names of inputs and weights, which stay theirs.
        """
        found: dict[fx.Node, str] = {}
        left = set(known.values()) | ends
        for label, sources in _readers(program, known):
            before = self._reads.get(label, [])
            if len(before) != len(sources):
                continue
            for name, source in zip(before, sources, strict=True):
                if source in fresh and source not in found and name not in left:
                    found[source] = name
                    left.add(name)
        return found

    def _free(self, node: fx.Node, *, is_only_call: bool) -> str:
        module, op = node.meta.get("module", ""), _op(node)
        if is_only_call and module and module not in self._taken:
            return str(module)
        name = first = f"{module}.{op}" if module else op
        number = self._next.get(first, 1)
        while name in self._taken or (number > 1 and name == first):
            number += 1
            name = f"{first}_{number}"
        self._next[first] = number
        self._taken.add(name)
        return name


def _op(node: fx.Node) -> str:
    """`conv2d` of aten.conv2d.default, `nms` of torchvision::nms."""
    schema = getattr(node.target, "_schema", None)
    return ops.name_of(node).partition(".")[0] if schema is None else str(schema.name).rpartition("::")[2]


def _readers(program: Program, known: dict[fx.Node, str]) -> Iterator[tuple[str, list[fx.Node]]]:
    """The calls that have names, and what is returned: what each of them reads, repeats included."""
    for node in program.graph.nodes:
        label = RETURN if node.op == "output" else known.get(node)
        if label is not None:
            sources: list[fx.Node] = []
            fx.node.map_arg((node.args, dict(node.kwargs)), sources.append)
            yield label, sources
