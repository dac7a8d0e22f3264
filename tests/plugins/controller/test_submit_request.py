"""A controller that Slurm never starts, or that may not submit, would leave its runs alone for ever."""

import shlex
import subprocess

import pytest

from forge import cli
from forge.core.errors import ConfigError, Exit, UnfitError
from forge.core.machine import ControllerSettings
from forge.plugins.controller import submit
from forge.plugins.controller.places import ControllerPaths
from forge.plugins.controller.records import Controller, SubmitCheck
from forge.slurm.partitions import parse_partitions

CHECK = SubmitCheck(account="lab", partition="cpu", requests=[["lab", "cpu"], ["lab", "gpu"]])


def partitions(**alloc_nodes):
    lines = [
        f"PartitionName={name} Default=NO State=UP MaxTime=12:00:00"
        f" AllocNodes={alloc_nodes.get(name, 'ALL')}"
        for name in ("cpu", "gpu")
    ]
    nodes = [f"cpu|c{n}|8|5000|idle|(null)|(null)|0" for n in (1, 2)]
    nodes += ["gpu|g1|8|5000|idle|(null)|gpu:2|0"]
    return parse_partitions(lines, nodes)


def options(settings=None, **alloc_nodes):
    return submit.request_of(
        settings or ControllerSettings(), CHECK, partitions(**alloc_nodes)
    ).options


def test_request_follows_the_profile_up_to_the_limit_of_its_partition():
    assert shlex.join(options()) == (
        "--account=lab --partition=cpu --export=ALL --time=720 --signal=B:USR1@300"
        " --nodes=1 --ntasks=1 --cpus-per-task=1 --mem=2000 --job-name=forge-submit"
        " --requeue"
    )


def test_settings_win_over_the_profile():
    settings = ControllerSettings(
        partition="gpu", account="own", runtime=4, mem_mb=500, options="--mail-type=END --qos='a b'"
    )
    line = options(settings)
    assert {"--account=own", "--partition=gpu", "--time=4", "--signal=B:USR1@60"} <= {*line}
    assert {"--mem=500", "--mail-type=END", "--qos=a b"} <= {*line}


def test_qos_of_the_profile_is_that_of_its_partition_and_one_of_the_options_wins():
    """Where an account has no default QOS, Slurm refuses a job without one."""

    def given(**settings):
        check = CHECK.model_copy(update={"qos": "gp_lab"})
        return submit.request_of(ControllerSettings(**settings), check, partitions()).options

    assert "--qos=gp_lab" in given()
    assert not any("qos" in word for word in given(partition="gpu"))
    line = given(options="-q own")
    assert line.index("--qos=gp_lab") < line.index("own")  # sbatch takes the last of two


def test_partition_that_is_not_known_gets_a_day():
    request = submit.request_of(ControllerSettings(partition="new"), CHECK, {})
    assert "--time=1440" in request.options


def test_nodes_that_may_not_submit_are_left_out():
    assert "--exclude=c2" in options(gpu="login,c1")


def test_nodes_that_the_user_excludes_are_excluded_beside_those_that_may_not_submit():
    """Of two --exclude sbatch takes the last."""
    line = options(ControllerSettings(options="-x c7 --nice"), gpu="login,c1")
    assert [word for word in line if "-x" in word or "clude" in word] == ["--exclude=c7,c2"]


def test_partition_of_which_no_node_may_submit_is_refused_with_other_ways():
    with pytest.raises(UnfitError) as err:
        options(gpu="login[1-2]")
    assert "no node of partition cpu may submit jobs to gpu (AllocNodes=login1,login2)" in str(
        err.value
    )
    assert "tmux" in err.value.fix and "scrontab" in err.value.fix


def test_job_that_comes_back_from_a_requeue_is_cancelled_again(monkeypatch):
    asked, lives = [], iter([True, True, True, False])
    monkeypatch.setattr(submit.slurm, "ask", lambda *line: asked.append(line))
    submit._cancel(["12"], lambda: next(lives), 60.0, again_sec=0.0)
    assert asked[:2] == [("scancel", "12")] * 2


def test_job_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(submit.slurm, "ask", lambda *_: "")
    with pytest.raises(UnfitError, match=r"job 12, 13 has not ended within 0\.1 s"):
        submit._cancel(["12", "13"], lambda: True, 0.1)


@pytest.mark.parametrize(
    ("said", "is_error"), [("Invalid job id specified", False), ("Access/permission denied", True)]
)
def test_job_that_has_ended_is_no_error_and_another_users_is(monkeypatch, said, is_error):
    def ask(*_):
        raise submit.slurm.Refused(said)

    monkeypatch.setattr(submit.slurm, "ask", ask)
    if is_error:
        with pytest.raises(UnfitError, match="another user"):
            submit._cancel(["12"], lambda: False, 1.0)
    else:
        submit._cancel(["12"], lambda: False, 1.0)


@pytest.fixture
def controllers(monkeypatch, tmp_path):
    """Two controllers of the project, jobs 12 (a) and 13 (b), of which those in this list live."""
    monkeypatch.chdir(tmp_path)
    for job, run in (("12", "a"), ("13", "b")):
        check = CHECK.model_copy(update={"runs": {run: f"results/{run}"}})
        record = Controller(job=job, cluster="x", command=["train"], check=check, environment={})
        record.write(ControllerPaths(job).record)
    living = []
    monkeypatch.setattr(submit.slurm, "cluster_name", lambda **_: "x")
    monkeypatch.setattr(submit.controller_job, "listed", lambda job: job in living or None)
    monkeypatch.setattr(submit.adopt, "adoptable", lambda _: [])
    return living


@pytest.mark.parametrize(
    ("living", "named", "stopped"),
    [(["12"], "", "12"), (["12", "13"], "13", "13"), ([], "", "13"), ([], "12", "12")],
)
def test_stop_means_the_job_that_is_named_or_the_only_one_that_lives(
    controllers, living, named, stopped
):
    controllers += living
    assert submit._to_stop(named).record.job == stopped


@pytest.mark.usefixtures("controllers")
@pytest.mark.parametrize(("named", "job"), [("", "12"), ("13", "13")])
def test_controller_of_another_cluster_is_not_stopped_from_here(monkeypatch, named, job):
    monkeypatch.setattr(submit.slurm, "cluster_name", lambda **_: "y")
    with pytest.raises(UnfitError, match=f"job {job} .* it is of cluster x, and this is y") as err:
        submit._to_stop(named)
    assert f"forge submit --stop {job}" in err.value.fix


def test_stop_means_the_one_that_lives_here_beside_one_of_another_cluster(controllers):
    record = Controller.read(ControllerPaths("13").record)
    record.model_copy(update={"cluster": "y"}).write(ControllerPaths("13").record)
    controllers += ["12"]
    assert submit._to_stop("").record.job == "12"


@pytest.mark.parametrize(
    ("named", "words", "fix"),
    [
        ("", "2 controllers live: job 12 (a), job 13 (b)", "forge submit --stop 12"),
        ("14", "job 14 is no controller of", "one of job 12 (a), job 13 (b)"),
    ],
)
def test_stop_without_a_choice_or_with_a_wrong_one_names_the_controllers(
    controllers, named, words, fix
):
    controllers += ["12", "13"]
    with pytest.raises(ConfigError) as err:
        submit._to_stop(named)
    assert words in err.value.what and fix in err.value.fix


def test_what_is_downloaded_is_there_before_the_rules_that_read_it(monkeypatch):
    """Snakemake's --until leaves out what comes after any of its rules: a tokenizer, behind inputs."""
    lines = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(submit.subprocess, "run", lambda line, **_: lines.append(line) or done)
    rules = ["evaluate_data", "inputs", "tokenize", "tokenizer", "train_run"]
    submit._make_here(["train"], CHECK.model_copy(update={"rules": rules}))
    asked = [line[line.index("--until") + 1 :] for line in lines]
    assert asked == [["inputs"], ["tokenizer", "evaluate_data"]]


def test_of_what_snakemake_says_its_error_is_left():
    said = (
        "\nSNAKEMAKE\n=========\n  Date: x\n  Config MD5: 99\n\nBuilding DAG of jobs...\n"
        "MissingRuleException:\nNo rule to produce trian\nUsing profile profiles/mine for x.\n"
    )
    assert submit.NOISE.sub("", said).split() == [
        "MissingRuleException:",
        "No",
        "rule",
        "to",
        "produce",
        "trian",
    ]
    usage = (
        "Using profile p.\nusage: snakemake [-h]\n   [--x]\n__main__.py: error: no --bogus\nmore\n"
    )
    assert submit.NOISE.sub("", usage) == "__main__.py: error: no --bogus\nmore\n"


def test_directory_without_a_workflow_is_refused_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submit.slurm, "refuse_missing", lambda *_: None)
    with pytest.raises(ConfigError, match="has no workflow/Snakefile"):
        submit.submit(["--profile", "profiles/mine", "train"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "word", ["-n", "--dry-run", "--directory=/x", "-d", "-np", "-kpn", "-Fnj4", "-pd/x"]
)
def test_words_with_which_nothing_would_run_are_refused(word):
    with pytest.raises(ConfigError, match=f"does not take {word}"):
        submit._refuse_words(["--profile", "p", word])


@pytest.mark.parametrize("word", ["-p", "-kF", "-j4", "--nolock", "-sn", "train-n"])
def test_other_words_are_snakemakes(word):
    submit._refuse_words(["--profile", "p", word])


@pytest.mark.parametrize(
    ("words", "of_snakemake", "stop"),
    [
        (["--profile", "p", "train", "--config", "nodes=4"], None, False),
        (["--profile", "p", "train", "--stop"], [], True),  # Snakemake has no such option
        (["--stop"], [], True),
        (["--stop", "12"], ["12"], True),
        (["--stop", "--profile", "p", "train"], [], True),
        (["--profile", "p", "train", "--stop=12"], ["12"], True),
        ([], [], False),
    ],
)
def test_all_words_behind_submit_are_snakemakes_but_a_first_option_of_its_own(
    monkeypatch, words, of_snakemake, stop
):
    seen = []
    monkeypatch.setattr(submit, "submit", lambda command: seen.append((command, False)))
    monkeypatch.setattr(submit, "stop", lambda job: seen.append((job.split(), True)))
    assert cli.main(["submit", *words]) == Exit.DONE
    assert seen == [(words if of_snakemake is None else of_snakemake, stop)]
