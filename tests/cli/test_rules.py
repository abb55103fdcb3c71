"""`tsopt rules`: every rule by name, with its pass, its class and its equation."""

from __future__ import annotations

from tsopt.passes import STANDARD
from tsopt.transforms import names_of, rules_of


def test_every_rule_and_every_pass_without_rules_has_a_row(tsopt):
    found = tsopt("rules", "--json").json
    assert {row["rule"] for row in found} >= set(rules_of(STANDARD))
    assert {row["rule"] for row in found} | {row["pass"] for row in found} == set(names_of(STANDARD))
    assert all(row["equation"] and row["numerics"] in ("EXACT", "ROUNDING") for row in found)


def test_the_table_says_how_to_leave_one_out(tsopt):
    ran = tsopt("rules")
    assert ran.code == 0
    assert "conv_batch_norm" in ran.out
    assert "--without RULE" in ran.out
