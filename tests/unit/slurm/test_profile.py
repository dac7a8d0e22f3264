"""What a command takes from its profile, by its own parser: all of it, and the machine beside it."""

import os
import shutil
from types import SimpleNamespace

import pytest

from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.paths import shipped
from forge.hosts import network
from forge.hosts.allocation import Allocation, Profile

OWN = """executor: forge
set-resources:
  train_run: {nodes: 2, tasks_per_node: 4, gres: "gpu:4", mem_mb: 1000}
  evaluate_run: {gres: "gpu:1"}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project with the profile profiles/own, and profiles/other with nothing but a machine.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    for name, launcher in (("own", "srun"), ("other", "torchrun"), ("local", "torchrun")):
        (tmp_path / "profiles" / name).mkdir(parents=True)
        (tmp_path / f"profiles/{name}/machine.yaml").write_text(f"launcher: {launcher}\n")
    (tmp_path / "profiles/own/config.yaml").write_text(OWN)
    return tmp_path


def of(*words):
    """The profile of a command, and the resources that Snakemake has from it."""
    from snakemake.cli import parse_args

    resources = parse_args([*words, "-n"])[1].set_resources
    return Profile.of_command([*words, "-n"], resources), resources


def allocation(*words):
    profile, resources = of(*words)
    of_train = resources.get("train_run", {})
    return Allocation(of_train, {"base": Config(run="base")}, {}, profile)


@pytest.mark.parametrize(
    "words",
    [
        ("--profile", "profiles/own"),
        ("--profile=profiles/own", "train"),
        ("--profile", "profiles/own/config.yaml"),
        ("--workflow-profile", "profiles/own"),
    ],
)
def test_machine_beside_the_profile_is_read(folder, words):
    made = allocation(*words)
    assert made.machine.launcher == "srun"
    assert made.of_profile["machine"].endswith("profiles/own/machine.yaml")


def test_profile_of_the_environment_counts_unless_the_command_has_one(folder, monkeypatch):
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "profiles/own")
    assert allocation().machine.launcher == "srun"
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "profiles/other")  # it has no config.yaml
    assert allocation("--profile", "profiles/own").machine.launcher == "srun"


def test_without_a_profile_it_is_the_local_one(folder):
    assert of() == (Profile(), {})
    local = os.path.relpath(shipped() / "profiles/local/machine.yaml")
    assert allocation().of_profile == {"machine": local}


def test_machine_that_only_the_profile_names_is_read(folder):
    path = folder / "profiles/own/config.yaml"
    path.write_text(OWN.replace("{nodes", "{machine: profiles/other/machine.yaml, nodes"))
    (folder / "profiles/own/machine.yaml").unlink()
    assert allocation("--profile", "profiles/own").machine.launcher == "torchrun"


def test_copy_that_names_the_originals_machine_is_refused_with_the_line(folder):
    path = folder / "profiles/own/config.yaml"
    path.write_text(OWN.replace("{nodes", "{machine: profiles/other/machine.yaml, nodes"))
    with pytest.raises(
        ConfigError, match=r"own/config\.yaml says machine: profiles/other"
    ) as caught:
        allocation("--profile", "profiles/own")
    assert "remove the line `machine: profiles/other/machine.yaml`" in caught.value.fix
    path.write_text(OWN.replace("{nodes", "{machine: profiles/own/machine.yaml, nodes"))
    assert allocation("--profile", "profiles/own").machine.launcher == "srun"  # the same file


def due(rule):
    return SimpleNamespace(rule=SimpleNamespace(name=rule), wildcards=SimpleNamespace(run="base"))


def test_set_resources_that_removes_what_the_profile_sets_is_refused_for_rules_that_run(folder):
    made = allocation("--profile", "profiles/own", "--set-resources", "train_run:nodes=4")
    with pytest.raises(ConfigError) as caught:
        made.check_runs([due("train_run")], {})
    said = str(caught.value)
    assert "leaves train_run without gres, mem_mb, tasks_per_node" in said
    assert "give `--config nodes=4` instead" in said
    with pytest.raises(ConfigError, match="leaves evaluate_run without gres"):
        made.check_runs([due("evaluate_run")], {})
    made.check_runs([due("validate_run")], {})


def test_set_resources_that_keeps_all_keys_is_taken(folder):
    all_keys = ("nodes=4", "tasks_per_node=4", "gres=gpu:4", "mem_mb=2000")
    words = [f"train_run:{key}" for key in all_keys]
    made = allocation("--profile", "profiles/own", "--set-resources", *words)
    made.check_runs([due("train_run")], {})


def test_cluster_without_a_machine_file_is_refused(folder):
    (folder / "profiles/own/machine.yaml").unlink()
    made = allocation("--profile", "profiles/own")
    settings = SimpleNamespace(default_resources={}, overwrite_resources={})
    made.check_profile(settings, [], submits=False)
    with pytest.raises(ConfigError, match=r"no machine\.yaml says how ranks start"):
        made.check_profile(settings, [], submits=True)


def test_all_lines_to_edit_are_named(folder):
    path = folder / "profiles/own/config.yaml"
    path.write_text(OWN.replace('gres: "gpu:1"', "slurm_partition: EDIT_gpu_partition"))
    made = allocation("--profile", "profiles/own")
    of_rules = of("--profile", "profiles/own")[1]
    settings = SimpleNamespace(
        default_resources={"slurm_account": "EDIT_account"}, overwrite_resources=of_rules
    )
    with pytest.raises(ConfigError) as caught:
        made.check_profile(settings, [], submits=False)
    assert caught.value.what == (
        "the profile still says slurm_account: EDIT_account (default-resources),"
        " slurm_partition: EDIT_gpu_partition (evaluate_run)"
    )
    assert "profiles/own/config.yaml" in caught.value.fix


# --- the executor ----------------------------------------------------------------------------------


OF_OLD_PROFILES = """executor: slurm
slurm-requeue: true
slurm-status-command: squeue
slurm-init-seconds-before-status-checks: 3
slurm-keep-successful-logs: true
"""
NEEDLESS = (
    "slurm-requeue, slurm-status-command, slurm-init-seconds-before-status-checks,"
    " slurm-keep-successful-logs"
)


def refused(*words):
    """What and how to go on, of the refusal of a command."""
    with pytest.raises(ConfigError) as caught:
        allocation(*words)
    return caught.value.what, caught.value.fix


def test_profile_for_the_plugin_is_refused_with_the_lines_to_change(folder):
    file = folder / "profiles/own/config.yaml"
    file.write_text(OWN.replace("executor: forge\n", OF_OLD_PROFILES) + "slurm-logdir: logs\n")
    what, fix = refused("--profile", "profiles/own")
    assert what == f"profiles/own/config.yaml has executor: slurm, {NEEDLESS}, slurm-logdir"
    assert fix == (
        "write `executor: forge` instead of `executor: slurm`, `forge-logdir` instead of"
        f" `slurm-logdir`; remove {NEEDLESS}, not needed any more"
    )


def test_options_of_the_plugin_are_refused_beside_forges_executor(folder):
    """Also where the command chooses that executor, and where the value is the plugin's default."""
    file = folder / "profiles/own/config.yaml"
    file.write_text(f"{OWN}slurm-array-limit: 1000\n")
    renamed = "write `forge-array-limit` instead of `slurm-array-limit`"
    beside = ("profiles/own/config.yaml has slurm-array-limit", renamed)
    assert refused("--profile", "profiles/own") == beside
    file.write_text(f"{OWN.replace('executor: forge', 'executor: local')}slurm-array-limit: 5\n")
    assert refused("--profile", "profiles/own", "--executor", "forge") == beside
    assert allocation("--profile", "profiles/own").machine.launcher == "srun"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("--executor", "slurm"), ["--executor slurm"]),
        (("--executor=slurm",), ["--executor slurm"]),
        (("-e", "slurm", "--slurm-no-account"), ["--executor slurm", "--slurm-no-account"]),
        (("--slurm-qos=high",), ["--slurm-qos"]),
    ],
)
def test_plugin_and_its_options_are_refused_on_the_command_line(folder, words, options):
    what, fix = refused("--profile", "profiles/own", *words)
    assert what == f"this command has {', '.join(options)}"
    renamed = [f"`{o.replace('slurm', 'forge')}` instead of `{o}`" for o in options]
    assert fix == f"write {', '.join(renamed)}"


def test_second_of_two_profiles_chooses_the_executor(folder):
    (folder / "profiles/other/config.yaml").write_text("executor: slurm\n")
    both = ("--profile", "profiles/other", "--profile", "profiles/own")
    assert of(*both)[0].submits and allocation(*both)
    what, _ = refused("--profile", "profiles/own", "--profile", "profiles/other")
    assert what == "profiles/other/config.yaml has executor: slurm"


def test_plugin_is_refused_where_the_profile_could_not_be_read():
    """As after --directory."""
    with pytest.raises(ConfigError, match="executor slurm"):
        Profile(executor="slurm").refuse_plugin()
    Profile(executor="forge").refuse_plugin()


# --- ranks and the GPUs of this machine ------------------------------------------------------------


@pytest.fixture
def on_machine(folder, monkeypatch, capsys):
    """on_machine(1): ranks of the shipped local profile on a machine with a GPU, and what was said."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(shipped() / "profiles/local", folder / "profiles/local", dirs_exist_ok=True)

    def ranks(gpus, *words):
        monkeypatch.setattr(network, "count_gpus", lambda: gpus)
        made = allocation("--profile", "profiles/local", *words)
        assert made.layout("base").world_size == made.of_profile["tasks_per_node"]
        return made.layout("base").world_size, capsys.readouterr().err

    return ranks


@pytest.mark.parametrize(
    ("gpus", "visible", "ranks"),
    [(0, None, 2), (1, None, 1), (2, None, 2), (8, None, 2), (8, "3", 1), (8, "", 2), (1, "-1", 2)],
)
def test_local_profile_has_no_more_ranks_than_gpus_and_says_so(
    on_machine, monkeypatch, gpus, visible, ranks
):
    """Without a visible one there are as many as asked: they are refused, or train on the CPU."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, said = on_machine(gpus)
    assert found == ranks
    assert ("1 of 2 ranks (tasks_per_node), one for each GPU" in said) == (ranks == 1)


def test_ranks_are_as_asked_on_cpus_in_a_job_and_by_another_executor(on_machine, monkeypatch):
    assert on_machine(1, "--executor", "dryrun")[0] == 2
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "7")
        assert on_machine(1)[0] == 2
    with open("profiles/local/machine.yaml", "a") as file:
        file.write("device: cpu\n")
    found, said = on_machine(1)
    assert (found, "GPU" in said) == (2, False)
