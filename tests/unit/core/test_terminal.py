"""What people read: the same table in a terminal and in a pipe, and durations without false precision."""

import re
import subprocess
import sys

import pytest

from forge.core.terminal import Table, duration

SGR = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture
def table():
    table = Table(("run", "step", "now"), numbers=("step",), wrapped=("now",))
    table.add(("a", "7", "[red] is no markup"), {"run": "bold", "now": "green"})
    table.add(("longer", "1234", ""), {})
    return table


def draw_on_a_terminal(table, monkeypatch, **environ):
    """In the test itself: pytest gives fixtures another sys.stdout."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "60", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table.print()


PLAIN = """\
run     step  now
a          7  [red] is no markup
longer  1234
"""


def test_columns_are_padded_with_blanks_where_nobody_looks(table, capsys):
    table.print()
    assert capsys.readouterr().out == PLAIN


def test_a_terminal_gets_the_same_cells_in_colors(table, capsys, monkeypatch):
    draw_on_a_terminal(table, monkeypatch)
    out = capsys.readouterr().out
    assert "\x1b[32m" in out
    assert [line.split() for line in SGR.sub("", out).splitlines()] == [
        line.split() for line in PLAIN.splitlines()
    ]


def test_no_color_is_honored(table, capsys, monkeypatch):
    draw_on_a_terminal(table, monkeypatch, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*3[0-7]m", capsys.readouterr().out)


def test_a_dumb_terminal_gets_plain_columns(table, capsys, monkeypatch):
    draw_on_a_terminal(table, monkeypatch, TERM="dumb")
    assert capsys.readouterr().out == PLAIN


def test_a_narrow_terminal_wraps_only_the_columns_that_may(table, capsys, monkeypatch):
    draw_on_a_terminal(table, monkeypatch, COLUMNS="24")
    out = SGR.sub("", capsys.readouterr().out)
    assert len(out.splitlines()) > 3
    assert "[red]isnomarkup" in "".join(out.split())
    assert "\nlonger" in out and "1234" in out


def test_plain_columns_come_without_rich():
    code = (
        "import sys; from forge.core.terminal import Table\n"
        "table = Table(['a']); table.add(['b'], {}); table.print()\n"
        "assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h 0 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_of_what_still_changes(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.42, "0.42 s"),
        (9.5, "9.5 s"),
        (59.7, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_that_were_measured_are_precise(seconds, words):
    assert duration(seconds, precise=True) == words
