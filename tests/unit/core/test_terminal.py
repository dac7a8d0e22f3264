"""What people read: the same table in a terminal and in a pipe, and durations without false precision."""

import io
import os
import pty
import re
import subprocess
import sys
import time

import pytest
from support.repository import REPOSITORY

from forge.core import terminal
from forge.core.errors import ForgeError
from forge.core.terminal import (
    Table,
    duration,
    gpu_and_node_hours,
    hours,
    print_plain,
    progress,
    say,
)

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


# --- narrow terminals -------------------------------------------------------------------------------

HEADS = ("run", "state", "job", "ranks", "step", "loss", "tokens/s", "now")
ROWS = (
    (
        "base",
        "training",
        "12345 on node[01-04]",
        "4x32",
        "1200/10000",
        "3.214",
        "1,203,456",
        "fine",
    ),
    ("lr-3e-4-warmup", "failed", "", "4x32", "12/10000", "9.2", "9", "step 13: loss nan on rank 0"),
)


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 200])
def test_nothing_is_lost_or_squeezed_at_any_width(capsys, monkeypatch, columns):
    table = Table(HEADS, numbers=HEADS[3:-1], wrapped=("job", "now"))
    for row in ROWS:
        table.add(row, {})
    draw_on_a_terminal(table, monkeypatch, COLUMNS=str(columns), NO_COLOR="1")
    lines = SGR.sub("", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).split()
    for word in " ".join(" ".join(row) for row in (HEADS, *ROWS)).split():
        assert any(found.startswith(word) for found in words), word  # in one piece


def test_text_column_is_as_wide_as_its_longest_word_or_has_a_line_of_its_own(capsys, monkeypatch):
    table = Table(("run", "log"), wrapped=("log",))
    table.add(("base", "see results/base/logs/train.log there"), {})
    draw_on_a_terminal(table, monkeypatch, COLUMNS="34", NO_COLOR="1")
    assert capsys.readouterr().out == (
        "run   log\nbase  see\n      results/base/logs/train.log\n      there\n"
    )
    draw_on_a_terminal(table, monkeypatch, COLUMNS="32", NO_COLOR="1")
    assert capsys.readouterr().out == (
        "run\nbase\n    log: see\n    results/base/logs/train.log\n    there\n"
    )


def test_columns_that_are_left_out_are_named_once_and_rows_keep_one_line(capsys, monkeypatch):
    table = Table(HEADS, numbers=HEADS[3:-1], left_out=True)
    for row in ROWS:
        table.add(row, {})
    draw_on_a_terminal(table, monkeypatch, COLUMNS="60", NO_COLOR="1")
    head, first, second, *rest = SGR.sub("", capsys.readouterr().out).splitlines()
    assert head.split() == ["run", "state", "job", "ranks"] and first.startswith("base")
    assert second.startswith("lr-3e-4-warmup")
    assert rest == ["not shown at this width: step, loss, tokens/s, now"]


# --- the time in log files ----------------------------------------------------------------------------

STAMPED = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"


@pytest.fixture
def time_zone(monkeypatch):
    def choose(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield choose
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def log(tmp_path):
    with open(tmp_path / "train.log", "a+") as file:
        yield file


def lines_of(log):
    log.seek(0)
    return log.read().splitlines()


def test_each_line_of_a_message_in_a_file_has_the_time(log, monkeypatch):
    monkeypatch.setattr(terminal, "_copies", [log])
    say("forge train: no space\n  fix:   free some\n\nend")
    assert [re.sub(f"^{STAMPED}", "TIME", line) for line in lines_of(log)] == [
        "TIME forge train: no space",
        "TIME   fix:   free some",
        "TIME",
        "TIME end",
    ]


def test_lines_of_another_log_keep_their_time(log):
    own = "2026-11-24T16:08:49 forge train: no space\n2026-11-24T16:08:49"
    terminal.write(f"Logfile train.log:\n{own}", log)
    first, *others = lines_of(log)
    assert re.fullmatch(f"{STAMPED} Logfile train.log:", first)
    assert others == own.splitlines()


def test_log_names_the_zone_once_and_again_when_it_changes(log, time_zone):
    time_zone("CET-1CEST,M3.5.0,M10.5.0/3")
    terminal.begin_log(log)
    assert lines_of(log) == []  # a command that says nothing leaves an empty log
    time_zone("CET-1")
    for _ in range(2):
        terminal.write("step", log)
    time_zone("CEST-2")
    terminal.write("step", log)
    assert [line[20:] for line in lines_of(log)] == [
        *("times are local, +01:00 (CET)", "step", "step"),
        *("times are local, +02:00 (CEST)", "step"),
    ]


def test_time_in_a_log_is_local_and_read_back(log, time_zone):
    time_zone("IST-5:30")
    before = time.time()
    terminal.begin_log(log)
    terminal.write("  fix:   wait", log)
    zone_line, line = lines_of(log)
    assert line.startswith(time.strftime("%Y-%m-%dT%H:", time.localtime(before)))
    then, text = terminal.unstamped(line)
    assert before - 1 < then <= time.time() and text == "  fix:   wait"
    time_zone("UTC")
    times, texts = terminal.dated([zone_line, line])
    assert texts[1] == text and times == [then, then]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 3",
        "[2026-11-24 16:08:49] train_run base: started",
        "2026-11-24T16:08:49.123 of a library",
        "2026-13-24T16:08:49 no such month",
    ],
)
def test_line_of_others_has_no_time(line):
    assert terminal.unstamped(line) == (None, line)


@pytest.mark.parametrize("zone", ["WEST+12", "EAST-12"])
def test_time_or_zone_that_cannot_be_is_no_error(zone, time_zone):
    time_zone(zone)
    for day in ("0001-01-01T00:00:00", "9999-12-31T23:59:59"):
        assert terminal.unstamped(f"{day} text")[1].endswith("text")
    assert terminal.dated(["times are local, +99:99 (X)"])[0] == [None]


SAYS = "from forge.core.terminal import say; say('no space\\n  fix: free some')"


def stderr_of_a_process(stream):
    subprocess.run([sys.executable, "-c", SAYS], check=True, stderr=stream)


def test_pipe_gets_bare_lines():
    done = subprocess.run([sys.executable, "-c", SAYS], check=True, stderr=subprocess.PIPE)
    assert done.stderr == b"no space\n  fix: free some\n"


def test_terminal_gets_bare_lines():
    reader, writer = pty.openpty()
    with open(reader, "rb", buffering=0) as shown, open(writer, "wb") as screen:
        stderr_of_a_process(screen)
        assert shown.read(1000) == b"no space\r\n  fix: free some\r\n"


def test_standard_error_in_a_file_gets_the_time(log):
    stderr_of_a_process(log)
    assert [re.sub(STAMPED, "TIME", line) for line in lines_of(log)] == [
        "TIME no space",
        "TIME   fix: free some",
    ]


@pytest.mark.parametrize(("in_workflow", "zones"), [("1", 0), ("", 1)])
def test_zone_in_what_jobs_share_is_named_by_their_workflow(log, tmp_path, in_workflow, zones):
    words = [sys.executable, "-m", "forge", "status", str(tmp_path / "nothing")]
    environment = {**os.environ, "FORGE_IN_WORKFLOW": in_workflow}
    done = subprocess.run(words, stderr=log, env=environment, cwd=REPOSITORY, check=False)
    assert done.returncode == 78
    *named, _, last = lines_of(log)
    assert re.match(rf"{STAMPED}   fix: ", last)
    assert sum("times are local" in line for line in named) == zones


# --- names and lines of strangers ---------------------------------------------------------------------

EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b31m\rb\u202e"
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\x9b31m\rb\u202e"


def test_control_characters_are_text_wherever_something_is_printed(capsys, monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(terminal, "_copies", [log])
    say(f"first\n\t{EVIL}")
    assert capsys.readouterr().err == log.getvalue() == f"first\n\t{SHOWN}\n"
    print_plain(EVIL)
    assert capsys.readouterr().out == f"{SHOWN}\n"
    table = Table(("name",))
    table.add((EVIL,), {"name": "red"})
    table.print()
    assert capsys.readouterr().out == f"name\n{SHOWN}\n"
    draw_on_a_terminal(table, monkeypatch, COLUMNS="100")
    assert f"\x1b[31m{SHOWN}\x1b[0m" in capsys.readouterr().out  # the color is Forge's own
    assert str(ForgeError(EVIL, cause=EVIL, fix=EVIL)).count(SHOWN) == 3


def test_notes_of_a_progress_bar_are_text(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    with progress(EVIL, 2, "files") as report:
        report(1, f"[red]{EVIL}")
    shown = SGR.sub("", capsys.readouterr().err)
    assert "]0;owned\x07" not in shown
    assert SHOWN.replace(r"\u202e", "") in shown and "[red]a" in shown


@pytest.mark.parametrize("subcommand", ["show", "status", "logs", "report", "validate"])
def test_no_command_prints_an_escape_sequence_of_a_name(tmp_path, subcommand):
    done = subprocess.run(
        [sys.executable, "-m", "forge", subcommand, str(tmp_path / EVIL)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode in (65, 78)
    assert r"\x1b]0;owned\x07" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0"),
        (0.004, "0"),
        (0.05, "0.05"),
        (1.236, "1.24"),
        (99.94, "99.9"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (2e6, "2,000,000"),
    ],
)
def test_hours_have_three_digits_or_all_of_the_whole_number(number, words):
    assert hours(number) == words


def test_node_hours_stand_alone_only_where_there_are_no_gpus():
    assert gpu_and_node_hours(384.0, 96.0) == "384 GPU-hours (96 node-hours)"
    assert gpu_and_node_hours(0.0, 0.0) == "0 GPU-hours (0 node-hours)"
    assert gpu_and_node_hours(None, 96.0) == "96 node-hours"
