"""Answers of Slurm about its cluster: all questions that a profile needs, and the answers as they
came."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field

from forge.core.errors import DataError, UnfitError
from forge.core.process import user_name
from forge.core.records import Record, RecordPart
from forge.core.terminal import one_line
from forge.slurm import partitions, slurm

# Settings of `scontrol show config` that are kept. The others name administrators, hosts and log files.
_SETTINGS = frozenset(
    (
        *("AccountingStorageEnforce", "AccountingStorageType", "ClusterName", "DefMemPerCPU"),
        *("DefMemPerNode", "EnforcePartLimits", "GresTypes", "JobAcctGatherType"),
        *("JobContainerType", "JobDefaults", "JobRequeue", "JobSubmitPlugins", "KillOnBadExit"),
        *("KillWait", "LaunchParameters", "MaxMemPerCPU", "MaxMemPerNode", "MaxNodeCount"),
        *("MaxTasksPerNode", "MpiDefault", "OverTimeLimit", "PreemptExemptTime", "PreemptMode"),
        *("PreemptParameters", "PreemptType", "PriorityType", "PrivateData", "ProctrackType"),
        *("PrologFlags", "SelectType", "SelectTypeParameters"),
        *("SlurmctldParameters", "SwitchType", "TaskPlugin", "TmpFS", "TopologyPlugin"),
    )
)
_OF_ASSOCIATION = (
    "cluster,account,partition,qos,defaultqos,grptres,maxtres,maxtrespernode,maxwall,maxjobs"
)
_OF_QOS = (
    "name,priority,flags,gracetime,preempt,preemptmode,grptres,maxtres,maxtrespernode"
    ",maxtresperuser,maxtresperaccount,maxwall,mintres"
)
_SACCTMGR = ("sacctmgr", "--noheader", "--parsable2", "show")
# What `scontrol show node` says of people: who has set the node down, and whose it is alone.
_OF_PEOPLE = re.compile(r" (Reason|Comment|Extra|AdminComment)=.*?(?= [A-Z]\w+=|$)|(?<= Owner=)\S+")
_MAX_EXAMPLES = 32


class Answer(RecordPart):
    """A command, and what it printed. error: why there is no output; "" where there is some."""

    command: list[str]
    output: str
    error: str = ""

    @property
    def lines(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.strip()]

    @property
    def rows(self) -> list[dict[str, str]]:
        """The lines of sacctmgr, by the names in the command's `format=`."""
        formats = (w.partition("=")[2] for w in self.command if w.startswith("format="))
        names = next(formats, "")
        return [dict(zip(names.split(","), line.split("|"), strict=False)) for line in self.lines]


class SiteAnswers(Record):
    """Slurm's answers about a cluster, as `forge profile --save FILE` writes them.

    The file has names of partitions, nodes, accounts and QOS, their limits, the settings of Slurm in
    _SETTINGS, and the name of the user who asked. It has no other user, no job, no password and no path
    but TmpFS.

    answers, by name: `version` (sinfo), `config` (scontrol), `visible` (partitions that sinfo shows this
    user: not hidden, and open to one of the user's groups), `partitions` and `nodes` (all of them, as
    forge/slurm/partitions.py reads them), `examples` (scontrol show node, one node of each size),
    `user` (sacctmgr: the default account), `associations` (sacctmgr: the user's accounts), `qos`
    (sacctmgr).
    """

    FIX: ClassVar[str] = "write it again on that cluster: forge profile --save FILE"

    source: str = Field(min_length=1)
    """The cluster that was asked, or the document that the answers are from."""
    synthetic: bool = False
    """Whether a person has written the answers in Slurm's format, from the numbers in `source`."""
    slurm: str
    """Version of Slurm, such as 22.05.8."""
    answers: dict[str, Answer]

    @classmethod
    def ask(cls) -> Self:
        """All answers of this host's Slurm. An answer that only some sites give (accounting) has an error
        in place of its output.

        Raises UnfitError where Slurm is not installed or refuses, SlurmSilent where the controller does
        not respond within slurm.PATIENCE_SEC.
        """
        slurm.refuse_missing("scontrol", "sinfo")
        answers = {name: _needed(command) for name, command in _needed_questions().items()}
        answers["config"] = _kept_settings(answers["config"])
        examples = _examples(answers["nodes"])
        command = ("scontrol", "show", "node", "--oneliner", ",".join(examples))
        answers["examples"] = _without_people(_asked(command))
        answers |= {name: _asked(command) for name, command in _accounting_questions().items()}
        version = re.search(r"\d+\.\d+\S*", answers["version"].output)
        cluster = settings_of(answers["config"]).get("ClusterName", "")
        return cls(
            source=f"cluster {cluster}".strip(),
            slurm=version[0] if version else "",
            answers=answers,
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file, as Record.read; also DataError for a file that lacks an answer that Slurm always
        gives."""
        site = super().read(path)
        missing = [name for name in _needed_questions() if name not in site.answers]
        if missing:
            raise DataError(
                f"{path} has no answer {', '.join(missing)}",
                cause="edited by hand, or written by another program",
                fix=cls.FIX,
            )
        site._refuse_unprintable(path)
        return site

    def _refuse_unprintable(self, path: Path) -> None:
        """DataError for characters that drive a terminal or reorder text: parts of answers are shown,
        and written into the profile."""
        texts = {"source": self.source, "slurm": self.slurm}
        texts |= {
            name: f"{a.output}{a.error}{' '.join(a.command)}" for name, a in self.answers.items()
        }
        for name, text in texts.items():
            if bad := next((c for c in text if not (c.isprintable() or c in "\n\t")), ""):
                raise DataError(
                    f"{path} has the character {bad!a} in its answer {one_line(name)}",
                    cause="Slurm prints no such character; the file was edited",
                    fix=self.FIX,
                )

    def answer(self, name: str) -> Answer:
        """The answer of this name; an empty one where nobody asked."""
        return self.answers.get(name) or Answer(command=[], output="", error="not asked")

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of slurm.conf, by name."""
        return settings_of(self.answer("config"))

    def partitions(self) -> dict[str, partitions.Partition]:
        """All partitions, with their nodes: cores and memory without those that nodes keep for
        themselves."""
        lines = self.answer("nodes").lines
        known = partitions.parse_partitions(self.answer("partitions").lines, lines)
        kept = {name: self._kept(size) for name, size in _sizes(lines).items()}
        return {
            name: replace(partition, nodes=tuple(_usable(n, kept[n.name]) for n in partition.nodes))
            for name, partition in known.items()
        }

    def _kept(self, size: tuple[str, ...]) -> tuple[int, int, int]:
        """Cores and MB that a node of this size keeps for itself, and its threads a core."""
        for line in self.answer("examples").lines:
            example = {
                name: int(number) for name, number in re.findall(r" (\w+)=(\d+)(?= |$)", line)
            }
            if (str(example.get("CPUTot")), str(example.get("RealMemory"))) == size[:2]:
                kept = example["CPUTot"] - example.get("CPUEfctv", example["CPUTot"])
                threads = example.get("ThreadsPerCore", 1)
                return max(0, kept), example.get("MemSpecLimit", 0), max(1, threads)
        return 0, 0, 1


def settings_of(config: Answer) -> dict[str, str]:
    """`Name = value` lines of scontrol show config."""
    pairs = (line.partition("=") for line in config.lines)
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _needed_questions() -> dict[str, tuple[str, ...]]:
    """Every Slurm answers them."""
    return {
        "config": ("scontrol", "show", "config"),
        "version": ("sinfo", "--version"),
        "visible": ("sinfo", "--noheader", "--format=%R"),
        "partitions": partitions.PARTITIONS,
        "nodes": partitions.NODES,
    }


def _accounting_questions() -> dict[str, tuple[str, ...]]:
    user = user_name(os.getuid())
    return {
        "user": (*_SACCTMGR, "user", user, "format=user,defaultaccount"),
        "associations": (*_SACCTMGR, "assoc", f"user={user}", f"format={_OF_ASSOCIATION}"),
        "qos": (*_SACCTMGR, "qos", f"format={_OF_QOS}"),
    }


def _needed(command: Sequence[str]) -> Answer:
    """The answer, for which Slurm has its patience. Raises SlurmSilent, UnfitError."""
    try:
        return Answer(command=list(command), output=slurm.ask(*command))
    except slurm.Refused as err:
        no_cluster = slurm.NO_CLUSTER in str(err)
        raise UnfitError(
            f"{' '.join(command)}: {one_line(str(err))}",
            cause="this host belongs to no Slurm cluster" if no_cluster else "",
            fix="run this on a login node of the cluster, where `sinfo` prints its partitions",
        ) from None


def _asked(command: Sequence[str]) -> Answer:
    """The answer, or why there is none."""
    output, error = slurm.run(command, timeout_sec=slurm.ASK_SEC)
    return Answer(command=list(command), output="" if error else output, error=error)


def _kept_settings(config: Answer) -> Answer:
    kept = [line for line in config.lines if line.partition("=")[0].strip() in _SETTINGS]
    return config.model_copy(update={"output": "\n".join(kept) + "\n"})


def _sizes(nodes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Node -> cores, memory, GPUs and disk, from lines of sinfo."""
    values = (line.split("|") for line in nodes)
    return {v[1]: (v[2], v[3], v[6], v[7]) for v in values if len(v) == 8}


def _examples(nodes: Answer) -> list[str]:
    """A node of each size: what nodes keep for themselves is in `scontrol show node` only."""
    by_size: dict[tuple[str, ...], str] = {}
    for name, size in _sizes(nodes.lines).items():
        by_size.setdefault(size, name)
    return sorted(by_size.values())[:_MAX_EXAMPLES]


def _usable(node: partitions.Node, kept: tuple[int, int, int]) -> partitions.Node:
    cores, memory, threads = kept
    usable = max(1, node.cpus - cores)
    return replace(
        node, cpus=usable, memory_mb=max(1, node.memory_mb - memory), threads_per_core=threads
    )


def _without_people(nodes: Answer) -> Answer:
    return nodes.model_copy(
        update={"output": "\n".join(_OF_PEOPLE.sub("", line) for line in nodes.lines) + "\n"}
    )
