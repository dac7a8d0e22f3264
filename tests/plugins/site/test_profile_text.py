"""Profiles that `forge profile` makes of Slurm's answers, as recorded files.

Threat: a profile that Slurm refuses, or that asks for less than the cluster has, after an edit that
nobody compared with real clusters. `sites/NAME.json` are answers (`"synthetic": true`: written by hand
from the document in `source`), `sites/NAME/` the files that are expected of them; sites/lumi has none,
its GPUs are AMD's. FORGE_RENEW_SITES=1 writes the expected files anew: read what `git diff` shows then.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from snakemake.cli import parse_args
from snakemake.ioutils import register_in_globals
from support.repository import REPOSITORY as ROOT

import forge
from forge.core.errors import ConfigError, DataError
from forge.core.machine import load_machine
from forge.hosts.allocation import Profile, allocation_resources, plain, refuse_unknown
from forge.plugins.site.profile_text import (
    FIXED,
    config_text,
    gres,
    lines_to_edit,
    machine_text,
)
from forge.plugins.site.profile_words import _OF_SNAKEMAKE
from forge.plugins.site.site_choice import BEFORE_MIN, Wishes, choose
from forge.slurm.jobs import TRAIN_RULE
from forge.slurm.sbatch import Request
from forge.slurm.site import SiteAnswers
from forge.slurm.submission import problems

SITES = Path(__file__).parent / "sites"
ALL = sorted(path.stem for path in SITES.glob("*.json"))
OF_AMD = "lumi"
WISHES = {"test-cluster": Wishes(gpus=0)}


def read(site):
    return SiteAnswers.read(SITES / f"{site}.json")


def files_of(site, wishes=None):
    choice = choose(read(site), wishes or WISHES.get(site, Wishes()))
    made = {"config.yaml": config_text(choice), "machine.yaml": machine_text(choice)}
    return {name: text.replace(forge.__version__, "VERSION", 1) for name, text in made.items()}


@pytest.mark.parametrize("site", [site for site in ALL if site != OF_AMD])
def test_profile_of_a_cluster_is_the_recorded_one(site):
    made, folder = files_of(site), SITES / site
    if os.environ.get("FORGE_RENEW_SITES"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, text in made.items():
            (folder / name).write_text(text)
    assert made == {path.name: path.read_text() for path in folder.iterdir()}


def test_cluster_of_amd_gpus_has_no_profile_but_for_its_cpus():
    with pytest.raises(ConfigError, match="AMD MI250: Forge supports NVIDIA's only"):
        files_of(OF_AMD)
    assert "device: cpu" in files_of(OF_AMD, Wishes(gpus=0))["machine.yaml"]


def requests(config, machine):
    """What a profile asks Slurm for: of training, and of a rule of one node."""
    defaults = config["default-resources"]
    asked = allocation_resources({**defaults, **config["set-resources"]["train_run"]}, machine)
    refuse_unknown(config["set-resources"]["train_run"], ())
    names = ("nodes", "tasks_per_node", "cpus_per_task", "mem_mb")
    texts = {"account": "slurm_account", "partition": "slurm_partition"}
    texts |= {name: name for name in ("gres", "constraint", "qos")}
    training = Request(
        rules=(TRAIN_RULE,),
        minutes=asked["runtime"] + BEFORE_MIN,
        other_minutes=BEFORE_MIN,
        **{name: asked[name] for name in names},
        **{name: asked.get(key, "") for name, key in texts.items()},
    )
    threads = config["set-threads"]
    return [training, *(Request.of_rule(rule, defaults, threads[rule]) for rule in threads)]


@pytest.mark.parametrize("wishes", [Wishes(), Wishes(gpus=0), Wishes(gpus=2, nodes=1)])
@pytest.mark.parametrize("site", ALL)
def test_profile_is_one_that_the_checks_before_submission_accept(site, wishes, tmp_path):
    if site == OF_AMD:
        wishes = Wishes(gpus=0)
    made = files_of(site, wishes)
    (tmp_path / "machine.yaml").write_text(made["machine.yaml"])
    config, machine = yaml.safe_load(made["config.yaml"]), load_machine(tmp_path / "machine.yaml")
    assert lines_to_edit(made["config.yaml"]) == []
    known = read(site).partitions()
    assert {request.partition for request in requests(config, machine)} <= known.keys()
    assert [problems(request, known) for request in requests(config, machine)] == [[]] * 4


def test_snakemake_reads_a_profile_and_forge_the_machine_beside_it(tmp_path):
    for name, text in files_of("kempner").items():
        (tmp_path / name).write_text(text)
    profile = Profile.of_command(["--profile", str(tmp_path), "train"], {})
    assert [path.name for path in profile.files] == ["config.yaml"]
    assert load_machine(profile.machine).gpu == "H200"


@pytest.mark.parametrize("shipped", ["slurm-cpu", "kempner", "kempner-requeue", "ethernet"])
def test_fixed_keys_are_those_of_the_shipped_profiles(shipped):
    own = {"default-resources", "set-threads", "set-resources"}
    config = yaml.safe_load((ROOT / f"profiles/{shipped}/config.yaml").read_text())
    assert yaml.safe_load(FIXED) == {key: value for key, value in config.items() if key not in own}


def with_answer(site, name, output, error=""):
    answers = read(site)
    changed = answers.answer(name).model_copy(update={"output": output, "error": error})
    return answers.model_copy(update={"answers": {**answers.answers, name: changed}})


def test_account_that_accounting_does_not_tell_is_left_to_edit():
    answers = with_answer("test-cluster", "associations", "", "no answer within 20 s")
    text = config_text(choose(answers, Wishes()))
    assert lines_to_edit(text) == ["slurm_account"]
    assert "slurm_account: EDIT_account # no answer within 20 s" in text
    assert "# Values to edit begin with EDIT_: slurm_account." in text


def test_cluster_without_accounting_has_no_account_in_its_profile():
    answers = with_answer("test-cluster", "associations", "")
    config = answers.answer("config").output.replace("accounting_storage/slurmdbd", "(null)")
    changed = answers.answer("config").model_copy(update={"output": config})
    answers = answers.model_copy(update={"answers": {**answers.answers, "config": changed}})
    assert "slurm_account" not in config_text(choose(answers, Wishes()))


def test_no_partition_for_jobs_without_gpus_is_left_to_edit():
    text = read("test-cluster").answer("partitions").output
    all_cancel = text.replace("PreemptMode=OFF", "PreemptMode=CANCEL").replace("REQUEUE", "CANCEL")
    lines = [line for line in all_cancel.splitlines() if "=high " not in line]
    high = next(line for line in all_cancel.splitlines() if "=high " in line)
    closed = high.replace("RootOnly=NO", "RootOnly=YES")
    answers = with_answer("test-cluster", "partitions", "\n".join([*lines, closed]))
    text = config_text(choose(answers, Wishes()))
    assert lines_to_edit(text) == ["slurm_partition"] and "EDIT_cpu_partition" in text


@pytest.mark.parametrize(
    "name", ["__import__('os').system('true')", "$HOME", "a b", "x#y", "a\x1bb"]
)
def test_name_that_snakemake_would_execute_or_change_is_refused(name):
    text = read("test-cluster").answer("associations").output.replace("lab", name)
    answers = with_answer("test-cluster", "associations", text)
    with pytest.raises(DataError, match="cannot stand in a profile"):
        config_text(choose(answers, Wishes()))


@pytest.mark.parametrize("name", ["all", "max-2", "threads", "2024", "no", "exists.gpu"])
def test_name_that_python_or_yaml_knows_stays_a_name(name, tmp_path):
    """Snakemake evaluates values: `slurm_partition: all` would be a function of Python."""
    answers = read("test-cluster")
    for kind, old in (("partitions", "=main "), ("nodes", "main|"), ("visible", "main\n")):
        text = answers.answer(kind).output.replace(old, old.replace("main", name))
        changed = answers.answer(kind).model_copy(update={"output": text})
        answers = answers.model_copy(update={"answers": {**answers.answers, kind: changed}})
    (tmp_path / "config.yaml").write_text(config_text(choose(answers, Wishes(gpus=0))))
    given = parse_args(["--profile", str(tmp_path)])[1].set_resources["train_run"][
        "slurm_partition"
    ]
    assert (
        given.evaluate({}, input=[], attempt=1, threads=1, rulename="", async_run=None).value
        == name
    )
    assert plain(given) == name


def test_names_that_snakemake_gives_to_expressions_are_known():
    namespace = {}
    register_in_globals(namespace)
    assert namespace.keys() <= _OF_SNAKEMAKE


def test_type_of_gpus_that_the_executor_refuses_is_left_out():
    kinds = {site: choose(read(site), Wishes(partition=p)) for site, p in (("kempner", "kempner"),)}
    assert gres(kinds["kempner"].train, 4) == "gpu:4"  # gpu:nvidia_a100-sxm4-40gb:4 in Slurm


def test_nodes_of_another_gpu_are_kept_out_by_a_feature():
    text = files_of("kempner", Wishes(partition="kempner_requeue"))["config.yaml"]
    assert yaml.safe_load(text)["set-resources"]["train_run"]["gres"] == "gpu:nvidia_h200:4"
    text = files_of("perlmutter")["config.yaml"]
    assert "constraint: hbm80g # other nodes there have A100 39 GiB" in text


def test_lines_for_evaluation_on_a_gpu_are_right_once_they_are_no_comment():
    text = files_of("perlmutter")["config.yaml"]
    lines = re.sub(r"^  # (?=evaluate_run:|  \w+: )", "  ", text, flags=re.MULTILINE)
    assert yaml.safe_load(lines)["set-resources"]["evaluate_run"] == {
        **{"slurm_partition": "gpu_ss11", "slurm_account": "m0001_g", "qos": "gpu_regular"},
        **{"constraint": "hbm80g", "gres": "gpu:a100:1"},
    }
    preempted = files_of("kempner", Wishes(partition="kempner_requeue"))["config.yaml"]
    assert "evaluate_run has CPUs" in preempted and "#   gres" not in preempted


def test_preemption_is_said_with_its_grace_time():
    machine = files_of("kempner", Wishes(partition="kempner_requeue"))["machine.yaml"]
    assert "take these nodes: REQUEUE; the job goes back to the queue" in machine
    assert yaml.safe_load(machine)["stop_grace_sec"] == 30
    machine = files_of("test-cluster", Wishes(partition="lownow", gpus=0))["machine.yaml"]
    assert "no grace time (GraceTime=0)" in machine and "stop_grace_sec" not in yaml.safe_load(
        machine
    )
