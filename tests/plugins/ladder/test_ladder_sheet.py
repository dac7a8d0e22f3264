"""Rows of a ladder in the sample sheet. Threats: rungs that do not start where their decay begins, rows
that replace others, or sizes that cannot be fitted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from forge import cli
from forge.checkpoint import family
from forge.core.config import read_values
from forge.core.sample_sheet import read_rows, run_configs

CONFIG = {
    "model": {"dim": 32, "layers": 2, "heads": 2},
    "train": {"seq_len": 32, "batch_size": 8, "lr": 4e-3},
}
SMALL = (
    *("--depths", "1,2,3,4", "--seeds", "1,2", "--budgets", "0.1,0.2,0.4"),
    *("--forecast", "5", "--at", "0.2", "--width-per-depth", "8", "--head", "8"),
)
HEAD = (
    "run\tladder.role\tmodel.layers\tmodel.dim\tmodel.heads\ttrain.lr\ttrain.schedule"
    "\ttrain.wsd_decay_fraction\ttrain.warmup_steps\ttrain.seed\ttrain.checkpoint_every"
    "\ttrain.keep_every\ttrain.max_steps\ttrain.decay_steps"
)


@pytest.fixture
def sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_config()
    path = tmp_path / "config/runs.tsv"
    path.write_text("# mine\r\nrun\ttrain.seed\r\nother\t0\r\n", newline="")
    return path


def write_config(**sections: object) -> None:
    Path("config").mkdir(exist_ok=True)
    Path("config/config.yaml").write_text(yaml.safe_dump({**CONFIG, **sections}))


def test_rows_of_a_small_ladder_are_these(sheet: Path) -> None:
    assert cli.main(["ladder", *SMALL]) == 0
    text = sheet.read_bytes().decode()
    assert text.count("\n") == text.count("\r\n") == 2 + 1 + 4 * 2 * (1 + 3) + 1
    comment, head, other, trunk, *rungs = text.split("\r\n")[:7]
    assert (comment, other) == ("# mine", "other\t0" + 13 * "\t")
    assert sorted(head.split("\t")) == sorted([*HEAD.split("\t"), "parent"])
    rows = {row.run: row.overrides for row in read_rows(sheet)}
    shared = {
        **{"model.layers": 1, "model.dim": 8, "model.heads": 1, "train.lr": 0.016},
        **{"train.schedule": "wsd", "train.wsd_decay_fraction": 0.2, "train.warmup_steps": 7},
    }
    seeded = {**shared, "train.seed": 1}
    # 1,808 parameters: 0.1 x 20 x 1808 tokens are 14.1 steps of 256, of which 11.3 are before the decay.
    assert rows["ladder-d1-s1"] == seeded | {
        **{"ladder.role": "trunk", "train.max_steps": 45, "train.decay_steps": 56},
        **{"train.checkpoint_every": 1, "train.keep_every": 1},
    }
    for k, begin, end in (("0_1", 11, 14), ("0_2", 23, 29), ("0_4", 45, 56)):
        assert rows[f"ladder-d1-s1-k{k}"] == seeded | {
            **{"parent": f"ladder-d1-s1@{begin}", "ladder.role": "rung"},
            **{"train.max_steps": end, "train.decay_steps": end},
        }
    forecast = rows["ladder-d5-k0_2"]
    assert "parent" not in forecast and "train.seed" not in forecast
    assert forecast["train.max_steps"] == forecast["train.decay_steps"] == 1706
    assert trunk.startswith("ladder-d1-s1\t1\t") and rungs[0].startswith("ladder-d1-s1-k0_1\t1\t")


def test_every_rung_starts_at_a_checkpoint_that_is_kept_and_where_its_rate_begins_to_decay(
    sheet: Path,
) -> None:
    assert cli.main(["ladder", *SMALL]) == 0
    configs = run_configs(read_values("config/config.yaml"), str(sheet))
    family.refuse_circles(configs)
    rungs = [config for config in configs.values() if config.parent]
    assert len(rungs) == 24
    for rung in rungs:
        name, _, step = str(rung.parent).partition("@")
        trunk, begin = configs[name].train, int(step)
        assert rung.train.decay_begin(rung.train.max_steps) == begin
        assert (
            begin == trunk.max_steps
            or begin % trunk.keep_every == begin % trunk.checkpoint_every == 0
        )
        assert trunk.decay_begin(trunk.decay_steps or 0) >= trunk.max_steps > trunk.warmup_steps
        assert rung.train.seed == trunk.seed


def test_project_that_scores_checkpoints_has_a_ladder_whose_trunks_are_not_scored(
    sheet: Path,
) -> None:
    train = {**CONFIG["train"], "checkpoint_every": 500, "keep_every": 1000}
    write_config(train=train, evaluate={"tasks": ["words"], "every": 1000})
    assert cli.main(["ladder", *SMALL]) == 0
    rows = {row.run: row.overrides for row in read_rows(sheet)}
    roles = {row.get("ladder.role") for row in rows.values() if "evaluate.every" in row}
    assert roles == {"trunk"} and rows["ladder-d1-s1"]["evaluate.every"] is None
    configs = run_configs(read_values("config/config.yaml"), str(sheet))
    assert configs["ladder-d5-k0_2"].of_plugins["evaluate"].every == 1000


def test_dry_run_shows_rows_and_their_cost_and_changes_nothing(
    sheet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sheet.read_bytes()
    Path("machine.yaml").write_text("gpu: H100\ndevice: cuda\n")
    assert cli.main(["ladder", *SMALL, "-n", "--machine", "machine.yaml"]) == 0
    assert sheet.read_bytes() == before
    lines = capsys.readouterr().out.splitlines()
    rung = next(line.split() for line in lines if line.startswith("ladder-d4-s2-k0_4"))
    assert rung[1:5] == ["65,792", "522,240", "1,632", "2,040"]
    assert float(rung[6]) >= 0
    assert any(
        "FLOPs" in line and "GPU-hours (the estimate of forge plan)" in line for line in lines
    )


def test_new_sheet_of_its_own_is_said_to_be_new_and_how_the_workflow_takes_it(
    sheet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["ladder", *SMALL, "--sheet", "config/ladder.tsv", "--name", "l"]
    assert cli.main([*own, "-n"]) == 0
    made = sheet.with_name("ladder.tsv")
    assert f"{made} would be a new sheet (--dry-run)\n" in capsys.readouterr().out
    assert not made.exists()
    assert cli.main(own) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith(f"{made}, a new sheet: 33 new rows; ")
    assert f"the target ladder, with --config runs={made}, trains" in told
    assert len(read_rows("config/ladder.tsv")) == 33
    assert "l-d4-s2-k0_4" in Path("config/ladder.tsv").read_text()
    assert "ladder" not in sheet.read_text()


REFUSED = {
    "three sizes": (("--depths", "1,2,3"), {}, "--depths names 3 sizes and --budgets 3 lengths"),
    "two lengths": (("--budgets", "1,2"), {}, "--depths names 4 sizes and --budgets 2 lengths"),
    "one seed": (
        ("--seeds", "1"),
        {},
        "--depths and --seeds give 4 trunks, and an interval needs 6",
    ),
    "no larger size": (("--forecast", "4"), {}, "--forecast is 4, and the rungs reach depth 4"),
    "heads": (("--head", "16"), {}, "depth 1 has width 8, no multiple of --head 16"),
    "a fixed width": ((), {"model": {"dim": 32, "ffn_dim": 64}}, "the config sets model.ffn_dim"),
    "too short": ((), {"train": {"batch_size": 512}}, "the shortest run of depth 1 would have"),
    "a decay of all steps": (
        (),
        {"train": {"wsd_decay_fraction": 1.0}},
        "the shortest run of depth 1 would have 0 steps",
    ),
    "a short forecast": (("--at", "0.06"), {}, "the shortest run of depth 5 would have 512 steps"),
    "no number": (("--budgets", "a"), {}, "is no list of positive numbers"),
    "half a layer": (("--depths", "1.5,2,3,4"), {}, "is no list of whole numbers"),
    "a size twice": (("--forecast", "6,5,5"), {}, "--forecast: '6,5,5' has 5 twice"),
    "a length twice": (("--budgets", "1,2,1.0"), {}, "--budgets: '1,2,1.0' has 1 twice"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_ladder_that_cannot_be_fitted_is_refused_and_the_sheet_stays(
    name: str, sheet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, sections, message = REFUSED[name]
    write_config(**sections)
    before = sheet.read_bytes()
    try:
        code = cli.main(["ladder", *SMALL, *options])
    except SystemExit as err:
        code = err.code
    assert code in (2, 78)
    assert message in capsys.readouterr().err
    assert sheet.read_bytes() == before


def test_rows_with_a_name_that_is_taken_or_a_grid_are_refused(
    sheet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet.write_text("run\ttrain.seed\nladder-d2-s1\t0\n")
    assert cli.main(["ladder", *SMALL]) == 78
    assert "has the run ladder-d2-s1 already" in capsys.readouterr().err
    sheet.write_text("run\tgrid:train.lr\nr\t1e-3,2e-3\n")
    assert cli.main(["ladder", *SMALL]) == 78
    assert "the column train.lr of the sample sheet is a grid" in capsys.readouterr().err
    assert sheet.read_text() == "run\tgrid:train.lr\nr\t1e-3,2e-3\n"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("rung\t", "ladder.role is rung, and parent is null"),
        ("forecast\tother@4", "ladder.role is forecast, and parent is other@4"),
        ("step\t", "ladder.role is 'step'"),
    ],
)
def test_role_that_does_not_fit_its_row_is_refused(
    sheet: Path, cells: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from forge.core.errors import ConfigError

    sheet.write_text(f"run\tladder.role\tparent\nother\t\t\nr\t{cells}\n")
    with pytest.raises(ConfigError, match=message):
        run_configs(read_values("config/config.yaml"), str(sheet))
