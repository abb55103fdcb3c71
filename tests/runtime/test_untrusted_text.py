from __future__ import annotations

from tsopt.runtime.untrusted_text import markdown_cell, on_one_line, printable


def test_what_would_drive_a_terminal_is_a_question_mark():
    assert printable("a\x1b[31mb\x9bc\u202ed\x07\r\x00\ud800") == "a?[31mb?c?d????"
    assert printable("größe\n\tπ → 1") == "größe\n\tπ → 1"


def test_a_cell_stays_one_cell():
    assert markdown_cell("a|b\nc\t\x1b") == "a\\|b c ?"


def test_a_message_of_several_lines_is_one_line():
    assert on_one_line("    failed\n* eager\t1.00x\x1b") == "    failed * eager 1.00x?"
