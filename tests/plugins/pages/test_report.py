"""Threats: a page that calls home, sampled text that runs in the reader's browser, and a failed run that
leaves no report just when people need one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support import happenings
from support.manifests import IDS
from support.recorded_run import RecordedRun, interrupted_run

from forge import cli
from forge.core import hooks
from forge.core.errors import Exit
from forge.core.files import read_json, write_json
from forge.core.paths import STATISTICS, tokens_folder
from forge.core.records import Check
from forge.data.statistics import Statistics, TextCounts
from forge.plugins.pages.charts import time_blocks, time_ticks
from forge.plugins.pages.report import render, write_report
from forge.reporting.history import Phase, read_history
from forge.reporting.show import show
from forge.reporting.summary import summarize
from forge.trainer.metrics import EvalLine, write


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        self.text += " "  # cells of a table are words of their own

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.tags if attribute in attrs]


@pytest.fixture
def finished(tmp_path: Path) -> RecordedRun:
    return interrupted_run(tmp_path / "base")


# --- which run -----------------------------------------------------------------------------------


def test_report_of_a_checkpoint_is_that_of_its_run_and_nothing_is_written_into_it(
    finished: RecordedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = finished.paths.latest.resolve()
    before = sorted(checkpoint.iterdir())
    assert cli.main(["report", str(checkpoint)]) == 0
    assert sorted(checkpoint.iterdir()) == before
    assert finished.paths.report.exists()

    alone = tmp_path / "copied" / checkpoint.name
    shutil.copytree(checkpoint, alone)
    assert cli.main(["report", str(alone)]) == Exit.CONFIG
    assert f"{alone} is a checkpoint outside of a run's directory" in capfd.readouterr().err
    assert len([*alone.iterdir()]) == len(before)


# --- the page -----------------------------------------------------------------------------------


def test_page_refers_to_nothing_outside_itself(finished: RecordedRun) -> None:
    html = write_report(finished.paths).read_text()
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "img", "object", "base"}
    references = [v for name in ("src", "href", "xlink:href", "srcset") for v in page.values(name)]
    assert references, "the curves use marks by reference"
    assert all(reference.startswith("#") for reference in references)
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?(.)", html))
    assert "@import" not in html
    assert "://" not in html


def test_ids_in_the_page_are_unique_and_each_reference_has_its_target(
    finished: RecordedRun,
) -> None:
    html = render(finished.paths)
    page = Page(html)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    used = [v.removeprefix("#") for v in page.values("xlink:href")] + re.findall(
        r"url\(#(.*?)\)", html
    )
    assert used
    assert set(used) <= set(ids)


def test_headline_tells_status_loss_speed_and_goodput(finished: RecordedRun) -> None:
    text = " ".join(Page(render(finished.paths)).text.split())
    assert "✓ validated at step 200 of 200: validation loss 3.827" in text
    assert "8.50 → 3.83" in text
    assert "200 of 200" in text
    assert "2 min 58 s" in text
    assert "56 %" in text


def test_expected_goodput_is_beside_that_which_came_out(
    finished: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    finished.event(happenings.forecast(45.0, ettr=0.91, basis="3 interruptions in 2 h"))
    text = " ".join(Page(render(finished.paths)).text.split())
    assert "of wall time in steps kept; expected 91 %" in text
    expected = "91.0% with a checkpoint every 45 s that stalls training for 0.5 s; 3 interruptions"
    assert f"Expected goodput (ETTR): {expected} in 2 h." in text
    show([finished.paths])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"goodput 56.2% of 2 min 58 s in steps kept expected {expected} in 2 h" in shown


def test_restarts_lineage_config_and_samples_are_on_the_page(finished: RecordedRun) -> None:
    text = Page(render(finished.paths)).text
    assert "Dashed: training resumed from a checkpoint" in text
    assert "cut off" in text
    assert "0123abc with uncommitted changes" in text
    assert "a1b2c3d4e5f6" in text
    assert "max_steps: 200" in text
    assert "def __init__(self):⏎" in text


def test_launch_in_slurm_is_on_the_page_with_its_job_and_nodes(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "base")
    run.launch(0, job="17")
    run.steps(1, 10)
    assert "job 17 on node01, node02" in Page(render(run.paths)).text
    run.launch(0)
    assert "laptop" in Page(render(run.paths)).text


def test_each_change_of_the_number_of_ranks_is_in_the_lineage(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "base")
    for step, world_size in ((0, 4), (20, 4), (40, 2)):
        run.launch(step, world_size=world_size)
        run.save(step + 10)
        assert ("ranks" in dict(summarize(run.paths).lineage)) == (step == 40)
    assert dict(summarize(run.paths).lineage)["ranks"] == "4 from step 0, 2 from step 40"
    assert "4 from step 0, 2 from step 40" in Page(render(run.paths)).text


def test_pictures_have_texts_for_those_who_do_not_see_them(finished: RecordedRun) -> None:
    labels = Page(render(finished.paths)).values("aria-label")
    assert any("validation loss from 8.50 to 3.83 over steps 0 to 200" in label for label in labels)
    assert any(label.startswith("Throughput: tokens per second: median") for label in labels)
    assert any("Time bar: train 56 %" in label for label in labels)


def test_equal_files_give_equal_bytes_in_another_process(finished: RecordedRun) -> None:
    here = write_report(finished.paths).read_bytes()
    code = (
        "import sys; from pathlib import Path; from forge.core.paths import RunPaths\n"
        "from forge.plugins.pages.report import write_report; write_report(RunPaths(Path(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Kolkata"}
    subprocess.run([sys.executable, "-c", code, finished.root], check=True, env=environment)
    assert finished.paths.report.read_bytes() == here


def test_lines_of_plugins_are_on_the_page_below_their_label(
    finished: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "run_lines", lambda paths: {"counted twice": ["3 of <4> parts"]})
    page = render(finished.paths)
    assert "<h2>Counted twice</h2>" in page and "<li>3 of &lt;4&gt; parts</li>" in page


def test_text_of_model_and_errors_is_escaped(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "hostile")
    run.launch(0)
    run.steps(1, 5)
    run.event(happenings.failed("<script>alert(1)</script>", rank=0))
    html = render(run.paths)
    assert "<script>" not in html
    assert "<script>alert(1)</script>" in Page(html).text


# --- runs that did not go well ------------------------------------------------------------------


def test_failed_preflight_has_a_report_with_the_fix_first(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "unfit")
    run.freeze_config()
    trouble = [
        Check("memory", "warn", "2 GiB free", "close programs"),
        Check("disk", "fail", "0.1 GiB free", "free space"),
    ]
    run.preflight(status="failed", trouble=trouble)
    text = " ".join(Page(render(run.paths)).text.split())
    assert "✗ failed: preflight: disk" in text
    assert "node02, disk: 0.1 GiB free. Fix: free space" in text
    assert text.index("fail node02 disk") < text.index("warn node02 memory")
    assert "2 of 4 checks passed" in text


def test_run_with_one_point_says_what_is_missing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "diverged")
    run.launch(0)
    run.steps(1, 5)
    run.event(happenings.failed("loss is inf\n  fix:   lower train.lr"))
    text = Page(render(run.paths)).text
    assert "✗ failed at step 5: rank 1: loss is inf" in text
    assert "fix: lower train.lr" in text
    missing = ("config.json", "preflight:", "validation loss:", "checkpoint: none", "validation:")
    assert all(item in text for item in missing)
    assert "training curve:" not in text


def test_folder_with_nothing_in_it_has_a_report(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "new")
    text = Page(render(run.paths)).text
    assert "○ not started: nothing has trained yet" in text
    assert "No config.json in this run." in text


def test_losses_that_never_were_finite_still_give_a_report(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "nan")
    run.launch(0)
    run.metric("train", 5, loss=None, tokens_per_sec=None)
    assert "Throughput" not in render(run.paths)


def test_invalid_checkpoint_is_bad_news_with_reasons(finished: RecordedRun) -> None:
    finished.validate(200, "probe of rank 1 is 9.1, was 3.8")
    text = Page(render(finished.paths)).text
    assert "✗ invalid at step 200" in text
    assert "probe of rank 1 is 9.1, was 3.8" in text


# --- time bar and words -------------------------------------------------------------------------


def test_time_bar_is_filled_and_true_to_the_seconds(finished: RecordedRun) -> None:
    history = read_history(finished.paths)
    blocks = time_blocks(history.phases, columns=50)
    assert sum(b.width * b.height for b in blocks) == pytest.approx(1)
    recomputed = sum(b.width * b.height for b in blocks if b.phase == "recomputed")
    assert recomputed == pytest.approx(history.seconds["recomputed"] / history.wall_sec)


def test_time_bar_of_a_long_run_stays_small_and_shows_short_stalls() -> None:
    phases = []
    for hour in range(5000):
        start = hour * 3600.0
        phases += [Phase("train", start, start + 3590), Phase("save", start + 3590, start + 3600)]
    blocks = time_blocks(phases)
    assert len(blocks) < 20_000
    assert {block.phase for block in blocks} == {"train", "save"}


@pytest.mark.parametrize(
    ("seconds", "last"), [(9.5, "8 s"), (178, "150 s"), (900, "15 min"), (400_000, "4 d")]
)
def test_time_ticks_are_round_and_inside(seconds: float, last: str) -> None:
    ticks = time_ticks(seconds)
    assert 3 <= len(ticks) <= 8
    assert all(0 <= share <= 1 for share, _ in ticks)
    assert ticks[-1][1] == last


# --- what `forge show` says, too -----------------------------------------------------------------


def test_lost_characters_and_equal_files_are_in_show_and_on_the_page(
    finished: RecordedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    finished.freeze_config()
    config = read_json(finished.paths.config) | {"results": str(finished.root.parent)}
    write_json(finished.paths.config, config)
    counts = TextCounts(bytes=9000, characters=5000, lost=40, changed=7, most_lost={"<b>": 40})
    statistics = Statistics(text=counts, equal_files=[["a.txt", "b.txt", "c.txt"]])
    statistics.write(tokens_folder("data", IDS.tokens) / STATISTICS)
    show([finished.paths])
    shown = " ".join(capsys.readouterr().out.split())
    page = Page(render(finished.paths)).text
    for line in (
        "40 of 5,000 characters are lost (0.8 %), most often '<b>'",
        "7 characters change (case, accents, compatibility forms)",
        "2 input files have the content of another one",
    ):
        assert line in shown and line in page
    (tokens_folder("data", IDS.tokens) / STATISTICS).write_text("{")
    show([finished.paths])
    assert "statistics.json" in capsys.readouterr().out, "a page must not fail because of it"


def test_records_that_cannot_be_read_are_reported_and_the_rest_is_shown(
    finished: RecordedRun,
) -> None:
    finished.paths.validation.write_text('{"format": 9, "status": "valid"}')
    finished.paths.preflight.write_text('{"format": 1, "status":')
    text = Page(render(finished.paths)).text
    assert "validation.json has format 9, this version of Forge reads 1" in text
    assert "preflight.json is not JSON" in text
    assert "○ unknown at step 200" in text


def test_each_source_has_a_line_in_the_figure(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "mix")
    run.launch(0)
    for step, code in ((0, 8.0), (10, 4.0)):
        facts = {"time": run.time, "launch": run.id, "step": step, "loss": 5.0}
        write(run.paths.metrics, EvalLine(**facts, sources={"code": code, "docs": 6.0}))
    (alt,) = [t for t in Page(render(run.paths)).values("aria-label") if "by source" in t]
    assert alt == "Validation loss by source: code from 8.00 to 4.00, docs from 6.00 to 6.00"


def test_losses_of_sources_that_are_all_lost_work_are_left_out(tmp_path: Path) -> None:
    """A run with a parent, killed after its first evaluation and before its first save."""
    run = RecordedRun(tmp_path / "mix")
    run.launch(10)
    facts = {"time": run.time, "launch": run.id, "step": 15, "loss": 5.0}
    write(run.paths.metrics, EvalLine(**facts, sources={"code": 4.0, "docs": 6.0}))
    run.launch(10)
    assert "by source" not in render(run.paths)
