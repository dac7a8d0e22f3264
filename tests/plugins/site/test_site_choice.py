"""Threat: a wish that is silently not followed, and a place for training that Slurm would not give."""

import contextlib
import re
from pathlib import Path

import pytest

from forge.core.errors import ConfigError, ForgeError
from forge.plugins.site.site_choice import Wishes, choose
from forge.slurm.site import SiteAnswers

SITES = Path(__file__).parent / "sites"


def read(site):
    return SiteAnswers.read(SITES / f"{site}.json")


def changed(answers, name, old, new):
    answer = answers.answer(name)
    assert old in answer.output
    replaced = answer.model_copy(update={"output": answer.output.replace(old, new)})
    return answers.model_copy(update={"answers": {**answers.answers, name: replaced}})


def chosen(site, **wishes):
    return choose(read(site), Wishes(**wishes))


def test_best_gpus_that_nobody_preempts_are_chosen_and_the_others_told():
    choice = chosen("kempner")
    assert choice.train.partition.name == "kempner_h200" and not choice.train.preemption.mode
    assert choice.others[0].partition.name == "kempner_requeue"
    assert choice.rules.partition.name == "shared"  # not serial_requeue, not test


def test_partition_for_trials_is_not_chosen_for_its_better_gpus():
    answers = changed(read("snellius"), "partitions", "=gpu_h100 ", "=h100_debug ")
    answers = changed(answers, "nodes", "gpu_h100|", "h100_debug|")
    answers = changed(answers, "visible", "gpu_h100", "h100_debug")
    assert choose(answers, Wishes()).train.partition.name == "gpu_a100"


def test_place_that_gives_no_job_its_least_size_is_not_chosen():
    nodes = "Nodes=gcn[101-108]"  # the later of two values counts
    answers = changed(read("snellius"), "partitions", nodes, f"{nodes} MinNodes=99")
    assert choose(answers, Wishes()).train.partition.name == "gpu_a100"
    with pytest.raises(ConfigError, match="--nodes 99 is more than 8: partition gpu_h100 has 8"):
        choose(answers, Wishes(partition="gpu_h100"))


def test_hidden_partition_is_chosen_only_where_it_is_named():
    answers = changed(read("snellius"), "visible", "gpu_h100\n", "")
    assert choose(answers, Wishes()).train.partition.name == "gpu_a100"
    assert choose(answers, Wishes(partition="gpu_h100")).train.partition.name == "gpu_h100"


def test_qos_is_the_longest_that_is_not_for_trials_where_there_is_no_default():
    assert chosen("marenostrum5").train.qos == "acc_ehpc"
    assert chosen("perlmutter").train.qos == "gpu_regular"  # not gpu_preempt


@pytest.mark.parametrize(
    ("wishes", "nodes", "most", "rule"),
    [
        ({}, 2, 4, "QOS kempner: gres/gpu=16"),
        ({"nodes": 4}, 4, 4, "QOS kempner: gres/gpu=16"),
        ({"gpus": 2}, 2, 8, "QOS kempner: gres/gpu=16"),
        ({"partition": "kempner_rtx"}, 2, 2, "QOS kempner: gres/gpu=16"),
    ],
)
def test_nodes_are_two_or_what_is_wished_within_the_limit_that_is_named(wishes, nodes, most, rule):
    size = chosen("kempner", **wishes).size
    assert (size.nodes, size.most_nodes, size.nodes_rule) == (nodes, most, rule)


def test_share_of_a_node_follows_its_gpus_and_what_nodes_keep_for_themselves():
    whole, half = chosen("dsai").size, chosen("dsai", gpus=2).size
    assert (whole.ranks, whole.cpus_per_task, whole.mem_mb) == (4, 31, 1488000)  # 12000 MB a core
    assert (half.ranks, half.cpus_per_task, half.mem_mb) == (2, 31, 744000)


def test_limit_of_cores_in_a_qos_is_kept():
    answers = changed(
        read("dsai"),
        "qos",
        "normal|0||00:00:00||cluster|||",
        "normal|0||00:00:00||cluster||cpu=64|",
    )
    size = choose(answers, Wishes()).size
    assert size.cpus_per_task * size.ranks * size.nodes <= 64
    assert (size.nodes, size.nodes_rule) == (1, "QOS normal: cpu=64")


def test_time_is_the_least_limit_without_stage_and_preflight():
    answers = changed(
        read("dsai"),
        "associations",
        "normal,qos_gpu|normal|||||",
        "normal,qos_gpu|normal||||1-00:00:00|",
    )
    assert choose(answers, Wishes()).size.minutes == 24 * 60 - 20
    endless = changed(read("dsai"), "partitions", "MaxTime=3-00:00:00", "MaxTime=UNLIMITED")
    assert choose(endless, Wishes()).size.minutes == 7 * 24 * 60 - 20


def test_node_with_fewer_gpus_than_wanted_is_not_counted():
    assert len(chosen("narval").train.nodes) == 6  # two of eight have 2 GPUs and slices
    assert len(chosen("narval", gpus=2).train.nodes) == 8


def test_slices_of_gpus_are_no_gpus_for_ranks():
    names = {place.partition.name for place in chosen("snellius").others}
    assert "gpu_mig" not in names
    assert chosen("snellius", partition="gpu_a100").train.gpus == 4


@pytest.mark.parametrize(
    ("site", "wishes", "message"),
    [
        ("kempner", {"partition": "kempner_h10"}, "no such partition.*did you mean kempner_h100"),
        ("kempner", {"partition": "zzz"}, "no such partition.*partitions are: kempner, "),
        ("juwels-booster", {"partition": "largebooster"}, "is INACTIVE and takes no jobs"),
        ("kempner", {"partition": "kempner_interactive"}, "has parts of GPUs .MIG. only"),
        ("kempner", {"gpus": 5, "partition": "kempner_h100"}, "kempner_h100 has 4"),
        ("kempner", {"gpus": 9}, "--gpus 9: kempner_rtx has 8"),
        ("juwels-booster", {"gpus": 2, "partition": "batch"}, "--gpus 2: no node has any"),
        ("kempner", {"gpus": -1}, "--gpus -1"),
        ("kempner", {"nodes": 0}, "--nodes 0"),
        ("kempner", {"nodes": 5}, "more than 4: QOS kempner: gres/gpu=16.*kempner_requeue"),
        ("dsai", {"nodes": 4}, "more than 3: partition h100: node=3"),
        ("lumi", {}, "are AMD MI250: Forge supports NVIDIA's only.*--gpus 0"),
        ("lumi", {"partition": "dev-g"}, "the GPUs of dev-g are AMD MI250"),
    ],
)
def test_wish_that_cannot_be_followed_is_refused_with_the_value_to_give(site, wishes, message):
    with pytest.raises(ConfigError) as error:
        chosen(site, **wishes)
    assert re.search(message, str(error.value), re.DOTALL)


def test_partition_of_other_accounts_is_refused_with_the_accounts_of_both():
    answers = changed(read("kempner"), "partitions", "kempner_alvarez_lab,", "")
    with pytest.raises(ConfigError, match="admits kempner_dev; your accounts are kempner_alv"):
        choose(answers, Wishes(partition="kempner_h100"))
    choice = choose(answers, Wishes())
    assert choice.train.model is None and "kempner_h100" in choice.closed


def test_no_open_partition_is_an_error_with_what_to_ask_for():
    answers = changed(
        read("marenostrum5"), "associations", "acc_debug,acc_ehpc,gp_debug,gp_ehpc", "other"
    )
    with pytest.raises(ConfigError, match="no partition here is open to an account of yours"):
        choose(answers, Wishes())


@pytest.mark.parametrize("site", sorted(path.stem for path in SITES.glob("*.json")))
def test_answers_that_are_cut_short_end_in_a_choice_or_in_an_error_for_people(site):
    whole = read(site)
    for name, answer in whole.answers.items():
        half = answer.output[: len(answer.output) // 2]
        for output, error in ((half, ""), ("", "no answer within 20 s"), (answer.output[7:], "")):
            cut = answer.model_copy(update={"output": output, "error": error})
            with contextlib.suppress(ForgeError):
                choose(whole.model_copy(update={"answers": {**whole.answers, name: cut}}), Wishes())


def test_partitions_of_some_accounts_are_taken_where_accounting_does_not_answer():
    answers = read("kempner")
    silent = answers.answer("associations").model_copy(update={"output": "", "error": "no answer"})
    answers = answers.model_copy(update={"answers": {**answers.answers, "associations": silent}})
    assert choose(answers, Wishes()).train.partition.name == "kempner_h200"


def test_partition_too_short_for_stage_and_preflight_is_refused():
    answers = changed(read("test-cluster"), "partitions", "MaxTime=01:00:00", "MaxTime=00:15:00")
    with pytest.raises(ConfigError, match=r"gives jobs 15 minutes \(partition main\), of which"):
        choose(answers, Wishes())
