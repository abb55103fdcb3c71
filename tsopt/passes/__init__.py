"""The standard passes and their order. One idea per file; rules read like a table."""

from __future__ import annotations

from tsopt.compiler.rewriting.pass_base import Pass, Repeat
from tsopt.compiler.rewriting.rewrite import RulePass
from tsopt.passes import algebra, canonicalize, data_movement, fuse, recompose
from tsopt.passes.cse import CommonSubexpressions
from tsopt.passes.dce import DeadCode
from tsopt.passes.fold import FoldConstants
from tsopt.passes.merge import MergeBranches
from tsopt.passes.order import MemoryOrder

CANONICALIZE = RulePass("canonicalize", canonicalize.RULES)
RECOMPOSE = Repeat(  # a norm or product that is found late is seen again by what comes after it
    (RulePass("recompose", recompose.RULES),)
)
ALGEBRA = RulePass("algebra", algebra.RULES)
DATA_MOVEMENT = RulePass("data-movement", data_movement.RULES)
FUSE = RulePass("fuse", fuse.RULES)
SIMPLIFY = Repeat(  # signs and constants that algebra puts right show further formulas
    (
        RECOMPOSE,  # before algebra takes the powers apart that a formula is known by
        Repeat((ALGEBRA, DATA_MOVEMENT, FUSE)),  # a folded batch norm brings two chains together, and the reverse
    )
)

STANDARD: tuple[Pass | Repeat, ...] = (
    DeadCode(),  # what export left unused would count as a second use and stop rules
    CANONICALIZE,  # one form for each thing: the rules after it are written for that form
    FoldConstants(),  # masks, position ids and tables become weights, which other rules look for
    CommonSubexpressions(),  # before the chains: a value computed twice would look used elsewhere
    Repeat((SIMPLIFY, MergeBranches())),  # merged last: the rules read the weights of single layers
    FoldConstants("fold-again"),  # what algebra made constant
    CommonSubexpressions("cse-again"),  # what algebra made equal
    DeadCode("dce-again"),  # what all of them left behind
    MemoryOrder(),  # last: it must see the calls that are left
)
