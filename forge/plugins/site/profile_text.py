"""The two files of a profile as text, each value with a comment that says where it came from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import forge
from forge.plugins.site.profile_words import (
    comment,
    cores_of,
    has_in_words,
    in_words,
    name_of,
    preempted_in_words,
)
from forge.plugins.site.site_choice import BEFORE_MIN, Choice
from forge.plugins.site.site_places import Place

# What all profiles for Slurm have alike, the shipped ones too (tests/plugins/site/test_profile_text.py);
# profiles/README.md says why.
FIXED = """\
executor: forge # submits to Slurm
jobs: 20
nolock: true
rerun-incomplete: true
retries: 0
keep-going: true
scheduler: greedy
rerun-triggers: [mtime, input, params]
shared-fs-usage: [persistence, input-output, software-deployment, sources, storage-local-copies]
latency-wait: 60
show-failed-logs: true
"""
SCHEMA = "# yaml-language-server: $schema=../../workflow/schemas/machine.schema.json"
_RULE_MB, _RULE_MIN, _RULE_THREADS = 16_000, 120, 16  # of rules of one node, where it has so much
_MAX_OTHERS = 12


def config_text(choice: Choice) -> str:
    """config.yaml. Raises DataError for names of Slurm that no file of Snakemake should hold."""
    parts = [FIXED.splitlines(), _default_resources(choice), _threads(choice), _train_run(choice)]
    body = [line for part in parts for line in part]
    return "\n".join([*_heading(choice, body), *body, ""])


def machine_text(choice: Choice) -> str:
    """machine.yaml."""
    body = [*_ranks(choice), *_preemption(choice), *_fabric(choice), *_stage(choice)]
    if choice.uses_gpus:
        body += [
            "preflight:",
            "  deadline_sec: 300 # each rank imports torch from a network disk, and starts CUDA and NCCL",
        ]
    return "\n".join([SCHEMA, *_heading(choice, body), *body, ""])


def lines_to_edit(text: str) -> list[str]:
    """The keys of a file's lines that Slurm could not answer."""
    return re.findall(r"^\s*([\w-]+): EDIT_", text, re.MULTILINE)


def _heading(choice: Choice, body: Sequence[str]) -> list[str]:
    answers = choice.site.answers
    written = ", answers written by hand" if answers.synthetic else ""
    keys = ", ".join(lines_to_edit("\n".join(body)))
    edit = f"Values to edit begin with EDIT_: {keys}" if keys else "No line is left to edit"
    return [
        f"# Made by forge profile {forge.__version__} from {comment(answers.source)}"
        f" (Slurm {comment(answers.slurm)}{written}).",
        f"# {edit}. Every key is explained once, in profiles/README.md.",
    ]


# --- config.yaml -----------------------------------------------------------------------------------


def _default_resources(choice: Choice) -> Iterator[str]:
    yield "default-resources: # of rules of one node: tokenize, validate"
    place = choice.rules
    yield from _account(choice, place or choice.train, "  ")
    if place is None:
        yield "  slurm_partition: EDIT_cpu_partition # none takes jobs without GPUs and cancels none"
        yield f"  mem_mb: {_RULE_MB}"
        yield f"  runtime: {_RULE_MIN} # minutes"
        return
    yield f"  slurm_partition: {name_of(place.partition.name)} # {_why_rules(place)}"
    yield from _qos(place, "  ")
    memory = min(node.memory_mb for node in place.nodes)
    mem_mb, most = rule_memory(place), place.minutes[0]
    yield f"  mem_mb: {mem_mb} # of {memory} MB a node (sinfo)"
    minutes = int(min(_RULE_MIN, most))
    yield f"  runtime: {minutes} # minutes, {in_words(most)} at most ({place.minutes[1]})"


def rule_memory(place: Place) -> int:
    """MB of a rule of one node: half a node at most, so that two fit, and what its cores may have."""
    memory = min(node.memory_mb for node in place.nodes)
    per_cpu = place.partition.max_memory_per_cpu * max(1, _rule_threads(place) // 2)
    return int(min(_RULE_MB, memory // 2, per_cpu, place.at_most("mem")[0]))


def _rule_threads(place: Place | None) -> int:
    if place is None:
        return _RULE_THREADS
    cpus = min(node.cpus for node in place.nodes)
    return int(max(1, min(_RULE_THREADS, cpus // 2, place.at_most("cpu")[0])))


def _why_rules(place: Place) -> str:
    if place.model:
        return "has GPUs, as all partitions here: name another if jobs without GPUs are refused"
    return f"{has_in_words(place)}; {preempted_in_words(place)}"


def _account(choice: Choice, place: Place, indent: str) -> Iterator[str]:
    association = place.association
    if association:
        names = dict.fromkeys(a.account for a in choice.site.associations)
        others = ", ".join(name for name in names if name != association.account)
        what = "your default account" if association.is_default else "the first that may run here"
        also = f"; you also have {comment(others)}" if others else ""
        yield f"{indent}slurm_account: {name_of(association.account)} # {what} (sacctmgr){also}"
    elif choice.site.has_accounts:
        why = choice.site.answers.answer("associations").error or "sacctmgr shows you none"
        yield f"{indent}slurm_account: EDIT_account # {comment(why)[:80]}"


def _qos(place: Place, indent: str) -> Iterator[str]:
    if place.unusual_qos and place.association:
        usual = place.association.usual_qos
        if not usual:
            why = "your account has no default QOS (sacctmgr)"
        elif place.partition.accepts_qos(usual):
            why = f"{comment(usual)}, your usual one, is for trials"
        else:
            why = f"{comment(usual)}, your usual one, is not for this partition (AllowQos)"
        yield f"{indent}qos: {name_of(place.qos)} # {why}"


def _threads(choice: Choice) -> Iterator[str]:
    place, why = choice.rules, ""
    threads = _rule_threads(place)
    half = max(1, threads // 2)
    if place:
        why = f" # of {min(node.cpus for node in place.nodes)} {cores_of(place)} a node (sinfo)"
    yield "set-threads:"
    yield f"  tokenize: {threads}{why}"
    yield f"  validate_run: {half}"
    yield f"  evaluate_run: {half}"


def _train_run(choice: Choice) -> Iterator[str]:
    place, size = choice.train, choice.size
    yield "set-resources:"
    yield "  train_run: # the allocation of a run: stage, preflight and training"
    name = name_of(place.partition.name)
    yield f"    slurm_partition: {name} # {has_in_words(place)}; {preempted_in_words(place)}"
    rules = choice.rules or place
    if place.account != rules.account:
        yield from _account(choice, place, "    ")
    if rules.unusual_qos and not place.unusual_qos and place.qos:
        yield f"    qos: {name_of(place.qos)} # your usual one"
    yield from _qos(place, "    ")
    constraint = feature(place)
    if constraint:
        others = ", ".join(sorted(place.others))
        yield f"    constraint: {name_of(constraint)} # other nodes there have {comment(others)}"
    most = f"{size.most_nodes:g} at most: {size.nodes_rule}"
    yield f"    nodes: {size.nodes} # {most}; preflight.spare_nodes come on top"
    ranks = f"one rank a GPU, of {place.gpus} a node" if choice.uses_gpus else "ranks"
    yield f"    tasks_per_node: {size.ranks} # {ranks}"
    if choice.uses_gpus:
        yield f'    gres: "{gres(place, size.ranks)}" # nodes have gpu{_kind(place)}:{place.gpus} (sinfo)'
    share = _share(choice)
    yield f"    cpus_per_task: {size.cpus_per_task} # {share}"
    yield f"    mem_mb: {size.mem_mb} # per node, {_memory_share(choice)}"
    yield f"    runtime: {size.minutes} # minutes: {_runtime(choice)}"
    yield from _others(choice)
    if choice.uses_gpus:
        yield from _on_a_gpu(choice)


def _share(choice: Choice) -> str:
    place, size = choice.train, choice.size
    cpus = min(node.cpus for node in place.nodes)
    if not choice.uses_gpus or size.ranks == place.gpus:
        what = f"{cpus} {cores_of(place)} a node, shared among {size.ranks}"
    else:
        what = f"the share of {size.ranks} of {place.gpus} GPUs in {cpus} {cores_of(place)}"
    return what + _limited(place, "cpu")


def _memory_share(choice: Choice) -> str:
    place = choice.train
    memory = min(node.memory_mb for node in place.nodes)
    per_cpu = place.partition.max_memory_per_cpu
    limit = f", {per_cpu:g} a core at most (MaxMemPerCPU)" if math.isfinite(per_cpu) else ""
    return f"of {memory} MB (sinfo){limit}{_limited(place, 'mem')}"


def _limited(place: Place, resource: str) -> str:
    most, rule = place.at_most(resource)
    return f", at most {most:g} ({rule})" if math.isfinite(most) else ""


def _runtime(choice: Choice) -> str:
    most, rule = choice.train.minutes
    if math.isinf(most):
        return "Slurm has no limit here, 7 days were chosen"
    return f"{in_words(most)} ({rule}) without {BEFORE_MIN} minutes for stage and preflight"


def _others(choice: Choice) -> Iterator[str]:
    rest = [p for p in choice.others if p.partition.name != choice.train.partition.name]
    for other in choice.site.qos_besides(choice.train):
        least = f", {other.least_nodes} nodes or more" if other.least_nodes > 1 else ""
        time = f"up to {in_words(other.minutes[0])}{least}"
        yield f"    # qos: {comment(other.qos)}: {time}; {preempted_in_words(other)}"
    names = dict.fromkeys(place.partition.name for place in rest)
    for name in list(names)[:_MAX_OTHERS]:
        place = next(place for place in rest if place.partition.name == name)
        yield f"    # --partition {comment(name)}: {has_in_words(place)}; {preempted_in_words(place)}"
    if len(names) > _MAX_OTHERS:
        yield f"    # and {len(names) - _MAX_OTHERS} more partitions"


def _on_a_gpu(choice: Choice) -> Iterator[str]:
    place = choice.train
    if place.preemption.mode:
        yield "  # evaluate_run has CPUs: Snakemake would take the preemption of its job for a failure."
        return
    yield "  # Tasks of evaluate.tasks on a GPU; without these lines on CPUs."
    yield "  # evaluate_run:"
    values = {"slurm_partition": name_of(place.partition.name)}
    if choice.rules and place.account != choice.rules.account:
        values["slurm_account"] = name_of(place.account)
    values |= {"qos": name_of(place.qos)} if place.unusual_qos else {}
    constraint = feature(place)
    values |= {"constraint": name_of(constraint)} if constraint else {}
    values["gres"] = f'"{gres(place, 1)}"'
    yield from (f"  #   {key}: {value}" for key, value in values.items())


def gres(place: Place, gpus: int) -> str:
    """Format GPUs of a node as a gres, with their type where Snakemake's executor takes its name."""
    return f"gpu:{place.kind}:{gpus}" if _is_type(place.kind) else f"gpu:{gpus}"


def _is_type(kind: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z][\w.]*", kind))


def _kind(place: Place) -> str:
    return f":{comment(place.kind)}" if place.kind else ""


def feature(place: Place) -> str:
    """The feature that these nodes have and those with other GPUs have not; "" where the type of the GPUs
    tells them apart, or nothing does."""
    names = {node.name for node in place.nodes}
    asked = place.kind if _is_type(place.kind) else ""
    others = [n for n in place.partition.nodes if n.gpus and n.name not in names]
    alike = [node for node in others if node.num_gpus(asked)]
    if not place.model or not alike:
        return ""
    own = frozenset.intersection(*(node.features for node in place.nodes))
    return min(
        own.difference(*(node.features for node in alike)), key=lambda f: (len(f), f), default=""
    )


# --- machine.yaml ----------------------------------------------------------------------------------


def _ranks(choice: Choice) -> Iterator[str]:
    model = choice.train.model
    yield "launcher: srun # one task a rank"
    if model is None:
        yield "device: cpu"
        return
    yield "device: cuda"
    said = f"Slurm says {comment(choice.train.kind) or 'no type'}"
    if model.is_planned:
        yield f"gpu: {model.name} # for the times in forge plan; {said}"
    else:
        yield f"# gpu: {said}; its speed is not known, forge plan takes an H100's"
    if model.memory_gib:
        usual = (
            ", the usual size of this name: nvidia-smi shows yours" if model.is_usual_size else ""
        )
        yield f"gpu_memory_gib: {model.memory_gib} # of one GPU{usual}"
    else:
        yield "# gpu_memory_gib: 79 # Slurm does not say the size: nvidia-smi on a node does"


def _preemption(choice: Choice) -> Iterator[str]:
    place, requeue = choice.train.preemption, choice.site.settings.get("JobRequeue", "1")
    if not place.mode:
        return
    by = f"{comment(place.by)} take these nodes: {place.mode}"
    if place.mode == "REQUEUE":
        again = "; the job goes back to the queue and the run resumes"
        again += "" if requeue != "0" else " (JobRequeue=0: by the executor's --requeue)"
    else:
        again = "; rerun the same command, the run resumes" if place.mode == "CANCEL" else ""
    yield f"# Preemption: {by}{again}."
    if place.grace_sec:
        yield f"stop_grace_sec: {place.grace_sec} # GraceTime, from SIGTERM to SIGKILL"
    else:
        yield "# There is no grace time (GraceTime=0): what was done since the last checkpoint is lost."


def _fabric(choice: Choice) -> Iterator[str]:
    yield "# fabric: Slurm does not know networks. Forge finds InfiniBand and the route between nodes;"
    yield "# where that is the wrong one, name the right one: docs/new-cluster.md."
    if choice.uses_gpus:
        yield "fabric:"
        yield "  backend: nccl"


def _stage(choice: Choice) -> Iterator[str]:
    folder = choice.site.settings.get("TmpFS", "/tmp")
    disk_mb = min((node.disk_mb for node in choice.train.nodes), default=0)
    usual = "$SLURM_TMPDIR, else $TMPDIR, else /tmp"
    if not disk_mb:
        yield f"# stage.folder: Slurm knows no disk of the nodes (TmpDisk=0); {usual} is taken."
    else:
        yield f"# stage.folder: {usual} is taken. Slurm knows of {disk_mb} MB in"
        yield f"# {comment(folder)} of each node (TmpDisk, TmpFS): name a directory there if need be."
