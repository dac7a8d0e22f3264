"""Comparison of a sweep. Threats: a run that is hidden or in the wrong place, a mean over runs that
differ in more than the seed, losses of other tokens side by side, one run that flattens all curves."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from support import shards
from support.manifests import IDS
from support.recorded_run import RecordedRun, score_words

from forge.core.config import ResolvedConfig
from forge.core.files import read_json, write_json
from forge.core.paths import MANIFEST, RunPaths, tokens_folder
from forge.data.shards import ShardManifest
from forge.plugins.pages.compare import MOST_COLUMNS, compare
from forge.plugins.pages.comparison import comparison
from forge.plugins.pages.sweep import Sweep, sweep_of
from forge.plugins.pages.sweep_charts import sweep_charts

RATES = {1e-3: 3.30, 3e-3: 3.20}  # and the last loss of seed 0
SEEDS = (0, 1, 2)


def train(root: Path, loss: float | None, **changed: Any) -> RecordedRun:
    """A run of 300 steps that ends with this validation loss; None for one that never starts."""
    run = RecordedRun(root)
    values = ResolvedConfig(run=root.name, **{"ids": IDS, **changed}).training_json()
    write_json(run.paths.config, values)
    if loss is not None:
        run.launch(0)
        for step in range(0, 301, 50):
            run.metric("eval", step, loss=loss + 5 * 2 ** -(step / 10))
        run.save(300)
        run.complete(300)
        run.validate(300)
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[RunPaths]:
    """Two rates with three seeds each, the better one last."""
    return [
        train(
            tmp_path / f"rate{lr * 1000:g}-s{seed}",
            loss + seed / 100,
            train={"lr": lr, "seed": seed},
        ).paths
        for lr, loss in RATES.items()
        for seed in SEEDS
    ]


def swept(runs: list[RunPaths]) -> Sweep:
    return sweep_of(comparison(runs))


def texts(columns: Any) -> dict[str, list[str]]:
    return {column.label: column.texts for column in columns}


def test_runs_are_rows_sorted_by_validation_loss_with_the_keys_that_differ(runs):
    found = texts(swept(runs).columns)
    assert found["validation loss"] == ["3.2000", "3.2100", "3.2200", "3.3000", "3.3100", "3.3200"]
    assert found["train.lr"] == ["0.003"] * 3 + ["0.001"] * 3
    assert found["train.seed"] == ["0", "1", "2"] * 2


def test_runs_that_differ_in_the_seed_alone_have_a_mean_and_a_deviation(runs):
    sweep = swept(runs)
    found = texts(sweep.means)
    losses = [3.20, 3.21, 3.22]
    assert found["validation loss"][0] == f"{fmean(losses):.4f} ± {stdev(losses):.4f}"
    assert (found["train.lr"], found["runs with a loss"]) == (["0.003", "0.001"], ["3", "3"])
    assert [setting.name for setting in sweep.settings] == ["lr 0.003", "lr 0.001"]


def test_runs_that_differ_in_more_than_the_seed_have_no_mean(tmp_path):
    mixed = [
        train(tmp_path / f"r{n}", 3.0 + n / 10, train={"seed": n, "lr": n / 1000}).paths
        for n in range(1, 6)
    ]
    sweep = swept(mixed)
    assert sweep.means == []
    assert [setting.name for setting in sweep.settings] == [f"r{n}" for n in range(1, 6)]


def test_changed_corpus_is_another_setting_and_is_told(tmp_path):
    changed = IDS.model_copy(update={"tokens": "e" * 16})
    same = [train(tmp_path / f"a{n}", 3.0, train={"seed": n}).paths for n in range(3)]
    other = [train(tmp_path / f"b{n}", 2.0, ids=changed, train={"seed": n}).paths for n in range(3)]
    sweep = swept(same + other)
    assert [[run.state.run for run in setting.runs] for setting in sweep.settings] == [
        ["b0", "b1", "b2"],
        ["a0", "a1", "a2"],
    ]
    assert "do not all have the same tokens" in sweep.notes[0]
    assert "ids.tokens" not in texts(sweep.columns)


def test_other_weights_to_start_from_are_not_taken_for_other_tokens(tmp_path):
    other = IDS.model_copy(update={"model": "e" * 12, "plugins": {"own.py": "f" * 64}})
    runs = [train(tmp_path / f"a{n}", 3.0, train={"seed": n}).paths for n in range(3)]
    runs += [train(tmp_path / f"b{n}", 2.0, ids=other, train={"seed": n}).paths for n in range(3)]
    sweep = swept(runs)
    assert sweep.notes == []
    assert texts(sweep.columns)["ids.model"] == ["e" * 12] * 3 + ["–"] * 3


def test_a_few_runs_side_by_side_have_the_notes_of_many(tmp_path, capsys):
    changed = IDS.model_copy(update={"tokens": "e" * 12})
    runs = [train(tmp_path / "a", 3.0).paths, train(tmp_path / "b", 2.0, ids=changed).paths]
    compare(runs)
    assert "note: these runs do not all have the same tokens" in capsys.readouterr().out
    compare(runs, page=(page := tmp_path / "compare.html"))
    assert "Note: these runs do not all have the same tokens" in page.read_text()


def test_mean_over_scores_of_other_questions_is_told(runs):
    for paths in runs:
        digest = "b" if paths.root.name == "rate1-s1" else "a"
        score_words(RecordedRun(paths.root), 300, 0.5, data_digest=digest)
    [note] = swept(runs).notes
    assert note.startswith("words acc (1,000 documents): these runs were scored on other questions")
    assert note.endswith(" than the others: rate1-s1")


def of_tokenizers(
    root: Path, bits: dict[str, float], *, estimated: bool | None = None
) -> list[RunPaths]:
    """Two runs for each tokens id, with this loss in bits per byte, and the lower loss per token where
    that is higher. The tokens of all have the same text."""
    made = []
    for number, (tokens, bpb) in enumerate(bits.items()):
        folder = tokens_folder(root / "data", tokens)
        folder.mkdir(parents=True)
        shards.make(folder)
        for seed in (0, 1):
            run = train(
                root / f"{tokens[0]}{seed}",
                None,
                data=str(root / "data"),
                ids=IDS.model_copy(update={"tokens": tokens}),
                tokenizer={"vocab_size": 300 + number},
                train={"seed": seed},
            )
            run.launch(0)
            flag = {"bpb_estimated": estimated} if seed else {}
            run.metric("eval", 300, loss=6 - bpb, bpb=bpb + seed / 100, **flag)
            run.save(300)
            made.append(run.paths)
    return made


def test_runs_of_two_tokenizers_on_one_text_are_sorted_by_bits_per_byte(tmp_path):
    runs = of_tokenizers(tmp_path, {"e" * 12: 2.0, "f" * 12: 1.5}, estimated=True)
    sweep = swept(runs)
    assert texts(sweep.columns)["bits per byte of text"] == [
        "1.5000",
        "~1.5100",
        "2.0000",
        "~2.0100",
    ]
    assert texts(sweep.means)["bits per byte of text"][0] == "1.5050 ± 0.0071"
    assert sweep.sorted_by == "bits per byte of text"
    assert "the same validation text: compare bits per byte" in sweep.notes[0]


def test_other_validation_text_is_said_and_sorts_by_the_loss(tmp_path):
    runs = of_tokenizers(tmp_path, {"e" * 12: 2.0, "f" * 12: 1.5})
    manifest = tokens_folder(tmp_path / "data", "f" * 12) / MANIFEST
    changed = ShardManifest.read(manifest).model_copy(update={"settings": {"val_fraction": 0.2}})
    changed.write(manifest)
    sweep = swept(runs)
    assert sweep.sorted_by == "validation loss"
    assert [run.name[0] for run in sweep.runs] == ["e", "e", "f", "f"]
    assert "different validation text: neither losses nor bits per byte compare" in sweep.notes[0]
    manifest.unlink()
    assert "it is not known of all of them" in swept(runs).notes[0]


def test_run_without_a_loss_is_the_last_row_and_is_counted(runs, tmp_path):
    late = train(tmp_path / "late", None, train={"lr": 3e-3, "seed": 7}).paths
    sweep = swept([late, *runs])
    assert sweep.runs[-1].state.run == "late"
    assert texts(sweep.means)["runs with a loss"] == ["3 of 4", "3"]
    assert texts(sweep.columns)["state"][-1] != "validated"


def test_sweep_before_any_loss_is_told_without_figures(tmp_path):
    waiting = [train(tmp_path / f"w{n}", None, train={"seed": n}).paths for n in range(6)]
    sweep = swept(waiting)
    assert sweep_charts(sweep) == [] and len(sweep.runs) == 6
    compare(waiting, page=tmp_path / "page.html")
    assert "w5" in (tmp_path / "page.html").read_text()


def test_scores_have_columns_and_means(runs):
    for number, paths in enumerate(runs):
        run = RecordedRun(paths.root)
        score_words(run, 300, 0.5 + number / 10)
    sweep = swept(runs)
    label = "words acc (1,000 documents)"
    assert texts(sweep.columns)[label][0] == "0.8000 ± 0.0100"
    assert texts(sweep.means)[label] == ["0.9000 ± 0.1000", "0.6000 ± 0.1000"]


@pytest.mark.parametrize("width", [80, 50, 200])
def test_each_run_is_one_line_of_a_terminal(runs, width, capsys, monkeypatch):
    for name, value in {"COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("forge.core.terminal.is_terminal", lambda _: True)
    compare(runs)
    lines = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    rows = [line for line in lines if re.match(r"rate\d-s\d ", line)]
    assert [row.split()[1] for row in rows] == texts(swept(runs).columns)["validation loss"]
    assert all(len(row) <= width for row in rows)


def test_page_of_a_sweep_has_means_runs_and_a_figure_for_each_key(runs, tmp_path):
    compare(runs, page=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    heads = re.findall("<h[23]>(.*?)</h[23]>", page)
    assert heads == ["Losses", "Validation loss", "Loss by train.lr", "Means over seeds", "Runs"]
    assert page.index("3.2100 ± 0.0100") < page.index("3.3100 ± 0.0100")
    assert "<script" not in page and not re.search(r"url\((?!#)", page)


def test_run_that_diverged_hides_no_other(runs, tmp_path):
    wild = train(tmp_path / "wild", 90.0, train={"lr": 0.5}).paths
    curves, by_rate = sweep_charts(swept([*runs, wild]))
    assert "1 runs lie above" in by_rate.note and "leave the figure" in curves.note
    ticks = [float(t) for t in re.findall(r">([\d.]+)</text>", by_rate.svg)]
    assert 3.2 <= max(t for t in ticks if t >= 1) < 4


def test_few_runs_stay_side_by_side(runs, capsys):
    compare(runs[:MOST_COLUMNS])
    head = capsys.readouterr().out.splitlines()[0].split()
    assert head == ["rate1-s0", "rate1-s1", "rate1-s2", "rate3-s0"]
    compare(runs[: MOST_COLUMNS + 1])
    assert "validation loss" in capsys.readouterr().out.splitlines()[0]


def test_runs_of_equal_names_are_told_apart_by_their_directories(tmp_path, capsys):
    twins = [train(tmp_path / project / "base", 3.0).paths for project in ("mine", "yours")]
    compare(twins)
    head = capsys.readouterr().out.splitlines()[0].split()
    assert head == [str(tmp_path / project / "base") for project in ("mine", "yours")]


def test_runs_on_the_same_sources_by_another_mix_are_told_not_to_compare(tmp_path):
    made = []
    for number, web in enumerate((0.9, 0.5, 0.1)):
        run = train(tmp_path / f"m{number}", 3.0 - number / 10).paths
        values = read_json(run.config)
        values["train"]["mix"] = {"web": web, "code": 1 - web}
        write_json(run.config, values)
        made.append(run)
    [note] = swept(made).notes
    assert "train.mix.code, train.mix.web" in note or "train.mix.web, train.mix.code" in note
    assert "validation losses do not compare" in note and "its own mix" in note
