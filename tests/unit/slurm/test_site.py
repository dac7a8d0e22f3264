"""Threat: answers of Slurm that are lost or changed before anybody reads them, and files with more about
people than a stranger may see."""

import pwd

import pytest

from forge.core.errors import DataError, UnfitError
from forge.slurm import site, slurm
from forge.slurm.site import SiteAnswers

PARTITION = (
    "PartitionName=main AllowAccounts=ALL Default=YES MaxTime=01:00:00 State=UP Nodes=node[01-02]"
)
ANSWERS = {
    "sinfo --version": "slurm-wlm 22.05.8\n",
    "sinfo --noheader --format=%R": "main\n",
    "scontrol show partition": f"{PARTITION}\n",
    "sinfo --all": "main|node01|8|5000|idle|(null)|gpu:2|1000\n"
    "main|node02|8|5000|idle|(null)|gpu:2|1000\nmain|node03|4|5000|idle|(null)|(null)|0\n",
    "scontrol show config": "ClusterName = forge\nSlurmUser = admin(7)\nJobCompPass = geheim\n",
    "scontrol show node": "NodeName=node01 CPUEfctv=8 Owner=anna(12) RealMemory=5000"
    " Comment=see Bert Reason=disk [carl@2026-01-01] \n",
    "sacctmgr": "forge|lab||normal,long|normal||||\n",
}


def answer_of(command):
    words = " ".join(command)
    return next(text for start, text in ANSWERS.items() if words.startswith(start))


@pytest.fixture
def a_slurm(monkeypatch):
    asked = []

    def ask(*command, **_):
        asked.append(command)
        return answer_of(command)

    monkeypatch.setattr(slurm, "refuse_missing", lambda *_: None)
    monkeypatch.setattr(slurm, "ask", ask)
    monkeypatch.setattr(slurm, "run", lambda command, **_: (ask(*command), ""))
    return asked


def test_answers_that_are_saved_are_read_back_as_they_were(a_slurm, tmp_path):
    asked = SiteAnswers.ask()
    asked.write(tmp_path / "site.json")
    assert SiteAnswers.read(tmp_path / "site.json") == asked
    assert (asked.slurm, asked.source, asked.synthetic) == ("22.05.8", "cluster forge", False)
    assert [node.gpus for node in asked.partitions()["main"].nodes] == [
        *((("", 2),), (("", 2),)),
        (),
    ]
    assert asked.answer("associations").rows[0]["qos"] == "normal,long"


def test_nothing_of_other_people_is_kept(a_slurm):
    text = SiteAnswers.ask().model_dump_json()
    assert [name for name in ("admin", "geheim", "anna", "Bert", "carl") if name in text] == []
    assert "RealMemory=5000" in text and "ClusterName" in text


def test_one_node_of_each_size_is_asked_about(a_slurm):
    SiteAnswers.ask()
    [command] = [words for words in a_slurm if words[:3] == ("scontrol", "show", "node")]
    assert command[-1] == "node01,node03"


def test_accounting_that_does_not_answer_is_an_answer_with_its_error(a_slurm, monkeypatch):
    def run(command, **_):
        return ("", "no answer within 20 s") if command[0] == "sacctmgr" else ("", "")

    monkeypatch.setattr(slurm, "run", run)
    answer = SiteAnswers.ask().answer("associations")
    assert (answer.rows, answer.error) == ([], "no answer within 20 s")


def test_host_without_a_cluster_is_refused_with_what_to_do(a_slurm, monkeypatch):
    def ask(*command, **_):
        raise slurm.Refused(f"slurm_load_ctl_conf error: {slurm.NO_CLUSTER}")

    monkeypatch.setattr(slurm, "ask", ask)
    with pytest.raises(UnfitError, match=r"(?s)belongs to no Slurm cluster.*login node"):
        SiteAnswers.ask()


def test_file_without_an_answer_that_every_slurm_gives_is_refused_by_its_name(a_slurm, tmp_path):
    asked = SiteAnswers.ask()
    del asked.answers["nodes"]
    asked.write(tmp_path / "site.json")
    with pytest.raises(DataError, match="has no answer nodes"):
        SiteAnswers.read(tmp_path / "site.json")


@pytest.mark.parametrize("bad", ["\x1b[2J", "\u202e", "\x9b", "\r"])
def test_file_with_a_character_that_drives_terminals_is_refused(a_slurm, tmp_path, bad):
    asked = SiteAnswers.ask()
    answer = asked.answers["qos"]
    asked.answers["qos"] = answer.model_copy(update={"output": f"normal{bad}|"})
    asked.write(tmp_path / "site.json")
    with pytest.raises(DataError, match="in its answer qos") as refused:
        SiteAnswers.read(tmp_path / "site.json")
    assert bad not in str(refused.value)


def test_rows_have_the_names_of_the_first_format_of_two():
    command = ["sacctmgr", "show", "qos", "format=name,flags", "format=other"]
    assert site.Answer(command=command, output="a|b").rows == [{"name": "a", "flags": "b"}]


def test_user_without_a_name_is_asked_about_by_number(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(site.os, "getuid", lambda: 1234)
    assert "user=1234" in site._accounting_questions()["associations"]
