"""Slurm's commands: the only module that runs and parses them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import NamedTuple

from forge.core.errors import DataError, UnfitError
from forge.core.process import hostname, slurm_start
from forge.core.terminal import one_line, say

MAX_HOSTS = 65_536  # in a list; MAX_RANGE of Slurm's src/common/hostlist.c is as much
# slurmctld may be restarting: commands are repeated for this long.
PATIENCE_SEC = 60.0
ASK_SEC = 20.0
CANCEL_SEC = 10.0  # a person who has pressed Ctrl-C waits
_OWN_OUTPUT = "forge-output-begins"  # printed before the output of a command on a node

# Slurm's packages are installed, and nothing says where a controller would be.
NO_CLUSTER = "Could not establish a configuration source"
CONTROLLER_AWAY = "Unable to contact"  # "Unable to contact slurm controller (connect failure)"
NO_ANSWER = "no answer within"  # of `run`, where a command takes too long
_SILENCE = (CONTROLLER_AWAY, "Connection refused", "timed out", NO_ANSWER)
# What srun and sbcast say where the reason is Slurm itself, and no node: its controller is away, busy, or
# has just started. Nodes are not up for it then until they have registered, which takes up to a minute,
# and it says that memory is lacking on them (_pick_step_nodes in slurmctld/step_mgr.c of 22.05).
_SLURMS_OWN = (
    *_SILENCE,
    "Memory required by task is not available",
    "Requested nodes are busy",
    "step creation temporarily disabled",
    "step creation still disabled",
    "operation is presently disabled",
    "standby mode",
    "Zero Bytes were transmitted or received",
)

# All job states (man squeue, JOB STATE CODES). Slurm shows a flag, such as SIGNALING, in place of the
# state that it belongs to, and COMPLETING before all others (job_state_string in slurm_protocol_defs.c).
# Nothing has ended the job: its nodes boot (CONFIGURING), its size changes (RESIZING), a signal is on its
# way to a node (SIGNALING, which lasts where a node is dead), or it is stopped for a while.
RUNNING = ("RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED")
# Ended, cancelled or requeued, and its processes may still run; or its files are still copied.
ENDING = ("COMPLETING", "STAGE_OUT")
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)

# Variables with which a user sets defaults of Slurm's commands: they would hide jobs from a query, or
# from scancel, and change its output.
FILTERS = ("SQUEUE_", "SACCT_", "SCONTROL_", "SINFO_", "SCANCEL_", "SBCAST_", "SLURM_TIME_FORMAT")

# With which a user chooses another cluster than that of slurm.conf: sbatch looks at the first one first,
# all commands at the second.
CLUSTERS = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")

# Variables that srun inherits; the others describe the batch step and would act as options.
KEPT = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_TMPDIR")


class SlurmSilent(UnfitError):
    """Slurm's controller does not respond in time, or its commands are not installed."""


class Superseded(UnfitError):
    """A later start of the job runs: Slurm took this one for dead, whose node it did not reach."""


class NodeUnfit(UnfitError):
    """A node of the job does not run a command."""


@dataclass(frozen=True)
class Job:
    """A job as shown by `scontrol show job`."""

    id: str
    state: str
    restarts: int
    nodes: tuple[str, ...]  # short names, in Slurm's order; () while it is pending
    cpus_per_task: int
    partition: str
    name: str
    batch: bool  # False: salloc, which cannot be requeued
    end_time: float | None  # seconds since the epoch; None: no time limit
    is_preempted: bool = False
    cpus: tuple[tuple[str, int], ...] = ()  # node, number of cores allocated there
    tasks: int = 1  # that the job was asked for, on all nodes
    gpus_per_node: int = 0  # of the node with the fewest
    excluded: tuple[str, ...] = ()  # nodes that it must not get
    array: str = ""  # id of the array that it is a task of
    exclusive: bool = False  # whether its nodes take no other job
    suspended: str = ""  # when it was last suspended, or resumed
    num_cpus: int = 0  # that its tasks may have on all nodes; 0 where that is not known

    @property
    def is_living(self) -> bool:
        """Return whether processes of the job may still run; also in a state that only a later Slurm
        has."""
        return is_living(self.state)

    @property
    def is_running(self) -> bool:
        """Return whether the job has its nodes and nothing has ended it: a cancelled one is COMPLETING at
        once."""
        return self.state in RUNNING

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING


def is_living(state: str) -> bool:
    return state not in (*WAITING, *ENDED)


def is_here() -> bool:
    """Return whether Slurm's commands are installed on this host."""
    return shutil.which("scontrol") is not None


def refuse_missing(*programs: str) -> None:
    """UnfitError for Slurm's programs that this process cannot start, with the PATH that it searches."""
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        names, searched = ", ".join(missing), os.environ.get("PATH", "")
        raise UnfitError(
            f"{names} not found on {hostname()}; searched PATH={searched}",
            cause="the directory of Slurm's programs is not in PATH, or Slurm is not installed here",
            fix=f"in a shell in which `command -v {missing[0]}` prints a path, rerun the same command"
            " (many sites: `module load slurm`); where batch jobs get another PATH, set it in ~/.bashrc",
        )


def this_job_id() -> str | None:
    """The id of the Slurm job of this process, or None."""
    return os.environ.get("SLURM_JOB_ID") or None


@functools.cache
def cluster_name(*, patience_sec: float | None = None, timeout_sec: float = ASK_SEC) -> str:
    """ClusterName of slurm.conf: ids of jobs repeat between clusters. Raises SlurmSilent, as `ask`."""
    return _setting("ClusterName", patience_sec, timeout_sec)


def this_cluster() -> str | None:
    """The cluster of the job of this process; None outside of Slurm. Raises SlurmSilent."""
    if this_job_id() is None:
        return None
    return cluster_name() if is_here() else os.environ.get("SLURM_CLUSTER_NAME")


def hides_jobs() -> bool:
    """Return whether users see their own jobs only. Raises SlurmSilent, as `ask`."""
    return "jobs" in _setting("PrivateData").split(",")


def _setting(name: str, patience_sec: float | None = None, timeout_sec: float = ASK_SEC) -> str:
    line = ("scontrol", "show", "config")
    try:
        text = ask(*line, patience_sec=patience_sec, timeout_sec=timeout_sec)
    except Refused as err:
        raise silent(str(err)) from None
    match = re.search(rf"^{name}\s*=\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""


def show_job(
    job_id: str, *, patience_sec: float | None = None, timeout_sec: float = ASK_SEC
) -> Job | None:
    """The job; None when Slurm has forgotten it. Raises SlurmSilent, as `ask`."""
    line = ("scontrol", "show", "job", "--details", "--oneliner", job_id)
    try:
        text = ask(*line, patience_sec=patience_sec, timeout_sec=timeout_sec)
    except Refused as err:
        if "Invalid job id" in str(err):
            return None
        raise silent(str(err)) from None
    return parse_job(text)


def is_over(job: Job) -> bool:
    """Return whether this start of the job has ended, by cancellation, a requeue or otherwise. False
    while Slurm does not answer: not answered is not over."""
    return _has_ended(job, _now(job))


def no_evidence(job: Job) -> str:
    """Why what was seen of the job's nodes since it was read says nothing about them; "" where it does,
    or Slurm does not answer."""
    now = _now(job)
    if _has_ended(job, now):
        return f"job {job.id} is over, and starts processes nowhere"
    if now and now.suspended != job.suspended:
        return f"job {job.id} was suspended meanwhile"
    if now and now.is_preempted and not job.is_preempted:
        return f"job {job.id} is being preempted, and Slurm signals its processes"
    return ""


def _now(job: Job) -> Job | None:
    """The job as Slurm shows it, or as it was while Slurm does not answer."""
    try:
        return show_job(job.id)
    except SlurmSilent:
        return job


def _has_ended(job: Job, now: Job | None) -> bool:
    return now is None or not now.is_running or now.restarts != job.restarts


def parse_job(text: str) -> Job:
    """The job in the first line of `scontrol show job --details --oneliner`: a heterogeneous job has a
    line for each component, of which srun starts processes in the first one."""
    text = re.split(r"\n(?=JobId=)", text)[0]

    def field(name: str, otherwise: str = "") -> str:
        match = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", text)
        value = match.group(1) if match else otherwise
        return otherwise if value in ("(null)", "N/A") else value

    nodes = tuple(expand(field("NodeList"))) if field("NodeList") else ()
    end = field("EndTime", "Unknown")
    # With --threads-per-core=1 tasks get fewer than it says.
    num_cpus = "" if field("ReqB:S:C:T").endswith(":1") else field("NumCPUs")
    details = [
        (name, _num_cores(ids), _num_gpus(re.sub(r"\([^)]*\)", "", gres)))  # gpu:h100:4(IDX:0-3)
        for names, ids, gres in re.findall(_DETAILS, text)
        for name in expand(names)
    ]
    gpus = _num_gpus(field("TresPerNode"))  # else asked for otherwise, as by --gpus and --exclusive
    if not gpus and details:
        gpus = min(count for _, _, count in details)
    elif not gpus and nodes:
        gpus = _num_gpus(field("TresPerJob")) // len(nodes)
    return Job(
        id=field("JobId"),
        state=field("JobState"),
        restarts=int(field("Restarts", "0")),
        nodes=nodes,
        cpus_per_task=int(field("CPUs/Task", "1")),
        partition=field("Partition"),
        name=field("JobName"),
        batch=field("BatchFlag", "0") != "0",
        end_time=None if end == "Unknown" else datetime.fromisoformat(end).timestamp(),
        is_preempted=field("PreemptTime", "None") != "None",
        cpus=tuple((name, cores) for name, cores, _ in details),
        num_cpus=int(num_cpus) if num_cpus.isdecimal() else 0,  # 4-8 of a pending job
        tasks=int(field("NumTasks", "1")),
        gpus_per_node=gpus,
        excluded=tuple(expand(field("ExcNodeList"))) if field("ExcNodeList") else (),
        array=field("ArrayJobId"),
        exclusive=field("OverSubscribe") == "NO",
        suspended=field("SuspendTime"),
    )


# What a job has on some of its nodes: their names, its cores, its gres ("" from an early Slurm).
_DETAILS = r"\sNodes=(\S+) CPU_IDs=([\d,-]+)(?: Mem=\S+ GRES=(\S*))?"

# The type of a GPU in a gres, such as h100, 2080ti, 1g.10gb or nvidia_a100-sxm4-80gb: digits alone before
# the end are a number of GPUs.
GPU_TYPE = r"(?!\d+(?:,|$))[\w.-]+"


def _num_gpus(tres: str) -> int:
    """GPUs in `gres:gpu:2`, `gres/gpu:h100=4` or `gres:gpu`, as versions of Slurm write them."""
    counts = re.findall(rf"\bgpu(?::{GPU_TYPE})?(?:[:=](\d+))?(?:,|$)", tres)
    return sum(int(count or 1) for count in counts)


def _num_cores(ids: str) -> int:
    """Cores in CPU_IDs, such as `0-3,7`."""
    ranges = [one.partition("-") for one in ids.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def this_job() -> Job | None:
    """The job of this process; None outside of Slurm. Raises SlurmSilent and Superseded."""
    return own_job() if this_job_id() and is_here() else None


def own_job() -> Job | None:
    """Job of this process, as `this_job`; also for a Snakemake that has submitted jobs from within its
    own, and for rules beside it."""
    job_id, restart = slurm_start()
    job = show_job(job_id) if job_id and is_here() else None
    if job and restart is not None and job.restarts > restart:
        raise Superseded(
            f"job {job.id} was requeued and is in its restart {job.restarts}; this is restart {restart}",
            cause=f"Slurm did not reach {hostname()}, and has started the job on other nodes",
            fix="nothing: this start ends, and the later one goes on",
        )
    return job


def tasks_of_one_array(job_id: str | None) -> bool:
    """Return whether this process and that job are two tasks of one job array. False where Slurm cannot
    tell."""
    try:
        own = own_job() if job_id else None
        other = show_job(job_id) if job_id and own and own.array else None
    except UnfitError:
        return False
    return bool(own and other and own.array == other.array and own.id != other.id)


def is_superseded() -> bool | None:
    """Return whether a later start of this job runs; None while Slurm does not answer."""
    try:
        own_job()
    except Superseded:
        return True
    except SlurmSilent:
        return None
    return False


def node_address(name: str) -> str:
    """NodeAddr of a node, by which Slurm itself reaches it: an address or another name; by default its
    name. Raises SlurmSilent, as `ask`."""
    try:
        text = ask("scontrol", "show", "node", "--oneliner", name)
    except Refused as err:
        raise silent(str(err)) from None
    match = re.search(r"\sNodeAddr=(\S+)", text)
    return match[1] if match else name


def expand(hostlist: str) -> list[str]:
    """Names in a Slurm host list: `node[01-02],login` gives node01, node02, login. DataError for more
    than MAX_HOSTS."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]+(?:\[[^\]]*\])?)+", hostlist):
        names += _expand_part(part)
        _refuse_many(len(names), hostlist)
    return names


def _refuse_many(number: int, hostlist: str) -> None:
    if number > MAX_HOSTS:
        raise DataError(
            f"the host list {one_line(hostlist)[:80]} has more than {MAX_HOSTS:,} names",
            cause="Slurm itself takes no list as long; saved answers were edited",
            fix="write the file again on that cluster: forge profile --save FILE",
        )


def _expand_part(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if not match:
        return [part]
    head, ranges, tail = match.groups()
    names: list[str] = []
    for item in ranges.split(","):
        if not re.fullmatch(r"\d{1,18}(-\d{1,18})?", item, re.ASCII):
            raise DataError(
                f"{one_line(part)[:80]} is no host list of Slurm: {one_line(item)[:20]!r} is no number"
                " and no range of numbers"
            )
        first, _, last = item.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        rests = _expand_part(tail)
        _refuse_many(len(names) + (numbers.stop - numbers.start) * len(rests), part)
        names += [f"{head}{n:0{len(first)}d}{rest}" for n in numbers for rest in rests]
    return names


def srun(
    job_id: str,
    hosts: Sequence[str],
    *,
    tasks_per_node: int = 1,
    cpus_per_task: int | None = 1,
    options: Sequence[str] = (),
) -> list[str]:
    """The begin of an srun command that starts tasks on these hosts of a job only.

    cpus_per_task: cores of a task; None: the tasks share all cores that the job has there. All options
    are explicit, because inside a rule Snakemake has removed the variables that srun reads.
    """
    return [
        "srun",
        f"--jobid={job_id}",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts) * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--nodelist={','.join(hosts)}",
        *([f"--cpus-per-task={cpus_per_task}"] if cpus_per_task else []),
        "--mpi=none",  # a site's default may wait for an MPI initialization
        "--export=ALL",
        *options,
    ]


def chosen_cluster() -> str:
    """The cluster that the user's variables name, "" for that of slurm.conf. In a job it is the job's
    own, whatever the shell said that submitted it."""
    if this_job_id():
        return ""
    return next(filter(None, map(os.environ.get, CLUSTERS)), "") or ""


def environment(*, submits: bool = False) -> dict[str, str]:
    """The environment for a Slurm command: without variables that describe another step, or filter. All
    commands ask the same cluster.

    submits: with those that the user has set for sbatch, as the executor's own sbatch sees them.
    """
    dropped = ("SLURM_", "SRUN_", "SALLOC_", *FILTERS, *(CLUSTERS if submits else ("SBATCH_",)))
    kept = {k: v for k, v in os.environ.items() if k in KEPT or not k.startswith(dropped)}
    return kept | ({"SLURM_CLUSTERS": cluster} if (cluster := chosen_cluster()) else {})


def settle_environment() -> None:
    """Let the Slurm commands that another package starts in this process ask the cluster that Forge asks,
    and hide no jobs: without FILTERS."""
    cluster = chosen_cluster()
    for name in [name for name in os.environ if name.startswith((*FILTERS, *CLUSTERS))]:
        del os.environ[name]
    if cluster:
        os.environ["SLURM_CLUSTERS"] = cluster


# Set for the Snakemake of a job that runs its rules without Snakemake's `slurm-jobstep`.
RULES_IN_BATCH_STEP = "FORGE_RULES_IN_BATCH_STEP"
# What stays in its environment, as with `slurm-jobstep` 0.6.1 (`keep_slurm`), which also leaves variables
# of arrays and of the submission. Not SLURM_TMPDIR: where data is staged stays what it was.
KEPT_IN_RULES = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTER_NAME")


def settle_in_batch_step() -> None:
    """In a job of Forge's rules, take what describes the batch step from their environment: Slurm's
    commands would read it as options, such as its memory and its number of tasks."""
    if not os.environ.pop(RULES_IN_BATCH_STEP, ""):
        return
    of_step = [
        name
        for name in os.environ
        if name.startswith(("SLURM_", "SRUN_", "SBATCH_")) and name not in KEPT_IN_RULES
    ]
    for name in of_step:
        del os.environ[name]


# What a rank needs of the shell's variables, or may be configured by.
NEEDED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_.*|TZ|TERM|TMPDIR|\w*_COLOR|LD_LIBRARY_PATH|PYTHON\w*"
    r"|(SLURM|FORGE|MASTER|NCCL|GLOO|TORCH|PYTORCH|CUDA|OMP|MKL|OPENBLAS|NUMEXPR|HF|TRANSFORMERS)_\w*"
    r"|TOKENIZERS_\w*|\w*_IFNAME"
    # Of engines of containers.
    r"|XDG_RUNTIME_DIR|(CONTAINERS|APPTAINER|APPTAINERENV|SINGULARITY|SINGULARITYENV|ENROOT|PYXIS)_\w*"
)
SECRET = re.compile(r"\w*(TOKEN(?!IZER)|SECRET|KEY|PASSWORD)\w*")


def exported(environ: Mapping[str, str], wanted: str | Sequence[str]) -> dict[str, str]:
    """The variables that ranks inherit. wanted: `slurm.export` of machine.yaml."""
    if wanted == "all":
        return dict(environ)

    def is_wanted(name: str) -> bool:
        if name in wanted:
            return True
        listed = any(fnmatchcase(name, pattern) for pattern in wanted)
        return not SECRET.fullmatch(name) and (listed or bool(NEEDED.fullmatch(name)))

    return {name: value for name, value in environ.items() if is_wanted(name)}


def run(command: Sequence[str], *, timeout_sec: float, submits: bool = False) -> tuple[str, str]:
    """Output of a Slurm command, and its error ("" on success). submits: as for `environment`."""
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_sec,
            env={**environment(submits=submits), "SLURM_TIME_FORMAT": "standard"},
        )
    except subprocess.TimeoutExpired:
        return "", f"{NO_ANSWER} {timeout_sec:g} s"
    except OSError as err:
        return "", f"{command[0]}: {err}"
    if done.returncode:
        return done.stdout, done.stderr.strip() or f"exit status {done.returncode}"
    return done.stdout, ""


class Patience:
    """Tells whether to repeat a command that failed: for PATIENCE_SEC from the first failure on that is
    Slurm's own. action: what cannot be done meanwhile, for people; "" says nothing."""

    def __init__(self, action: str = "") -> None:
        self._action = action
        self._end: float | None = None  # on the monotonic clock

    def again(self, trouble: str) -> bool:
        """Return whether to repeat the command, after a pause; False for an error that is not Slurm's
        own."""
        if not is_slurms_own(trouble):
            return False
        if self._end is None:
            self._end = time.monotonic() + PATIENCE_SEC
            if self._action:
                what = one_line(trouble)
                say(f"{self._action} waits for Slurm, {PATIENCE_SEC:g} s at most: {what}")
        if time.monotonic() > self._end:
            return False
        time.sleep(1)
        return True


def run_step(command: Sequence[str], *, timeout_sec: float) -> tuple[str, str]:
    """Run srun or sbcast, as `run`, and repeat it while the error is Slurm's own, for PATIENCE_SEC at
    most. timeout_sec: of each try."""
    patience = Patience()
    while True:
        output, trouble = run(command, timeout_sec=timeout_sec)
        if trouble.startswith(NO_ANSWER) and (away := controller_trouble()):
            trouble = away
        if not trouble or not patience.again(trouble):
            return output, trouble


def answers(job_id: str, host: str, timeout_sec: float) -> bool:
    """Return whether this node of the job starts a process within the time. Also true where the trouble
    is, and stays, Slurm's own, which says nothing about the node."""
    line = srun(job_id, [host], options=("--overlap", "--gres=none", "--immediate=10"))
    trouble = run_step([*line, "true"], timeout_sec=timeout_sec)[1]
    return not trouble or is_slurms_own(trouble)


def output_on(
    job_id: str,
    host: str,
    command: Sequence[str],
    timeout_sec: float = 60,
    options: Sequence[str] = (),
) -> str:
    """The output of a short command on one node of the job, without what a site's task prolog prints
    before it. options: more of srun. Raises NodeUnfit that names the node, and SlurmSilent."""
    line = srun(job_id, [host], options=("--overlap", "--gres=none", *options))
    marked = ["sh", "-c", f'echo {_OWN_OUTPUT}; exec "$@"', "sh", *command]
    output, trouble = run_step([*line, *marked], timeout_sec=timeout_sec)
    if is_slurms_own(trouble):
        raise silent(trouble)
    if trouble:
        raise NodeUnfit(
            f"node {host} cannot run {command[0]}: {trouble}",
            cause="the node is down, or does not see this Python",
            fix="run the target preflight, which names unhealthy nodes",
        )
    return output.split(f"{_OWN_OUTPUT}\n", 1)[-1]


def cancel_step(job_id: str, name: str) -> None:
    """Kill the job's steps of this name, also on nodes whose srun has ended. Errors are ignored."""
    with contextlib.suppress(Refused, SlurmSilent):
        listed = ask("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i|%j")
        for line in listed.splitlines():
            step, _, step_name = line.strip().partition("|")
            if step_name == name:
                ask("scancel", "--signal=KILL", step)


def cancel_named(name: str) -> None:
    """Cancel this user's jobs of this name. Raises SlurmSilent and Refused, as `ask`."""
    ask("scancel", f"--name={name}", f"--user={os.getuid()}", patience_sec=CANCEL_SEC)


def accounted_state(job_id: str, *, name: str, timeout_sec: float) -> str:
    """The state in Slurm's accounting of the job of this user with that id and name, such as `CANCELLED
    by 1000` (a uid); "" when accounting does not respond or does not have the job. Another job may have
    the id: a controller that is killed forgets those that it has just given."""
    return _accounted(job_id, "State", timeout_sec, f"--name={name}", f"--user={os.getuid()}")


def accounted_end(job_id: str, *, timeout_sec: float) -> str:
    """End of the job, or of a step of it (`17.batch`), according to accounting, such as `OUT_OF_MEMORY,
    exit code 0:125`; "" as above."""
    return _accounted(job_id, "State,ExitCode", timeout_sec).replace("|", ", exit code ")


def _accounted(job_id: str, fields: str, timeout_sec: float, *only: str) -> str:
    line = ["sacct", "--jobs", job_id, *only, "--noheader", "--parsable2"]
    line += ["--allocations"] if "." not in job_id else []
    lines = run([*line, f"--format={fields}"], timeout_sec=timeout_sec)[0].splitlines()
    return lines[-1].strip() if lines else ""


class AccountedStart(NamedTuple):
    """One start of a job in Slurm's accounting: a requeued job has one for each. seconds: that it ran."""

    job: str
    state: str  # without what follows it, such as the uid in `CANCELLED by 1000`
    seconds: int


def accounted_starts(
    since: float, partition: str = "", *, timeout_sec: float = 10.0
) -> list[AccountedStart]:
    """All starts of this user's jobs since then (seconds since the epoch), in a partition or in all. []
    where accounting does not respond, or is not there."""
    if shutil.which("sacct") is None:
        return []
    when = datetime.fromtimestamp(since).isoformat(timespec="seconds")
    line = ["sacct", "--duplicates", "--allocations", "--noheader", "--parsable2"]
    line += [f"--user={os.getuid()}", f"--starttime={when}"]
    line += [f"--partition={partition}"] if partition else []
    output, _ = run([*line, "--format=JobIDRaw,State,ElapsedRaw"], timeout_sec=timeout_sec)
    rows = (row.split("|") for row in output.splitlines())
    return [
        AccountedStart(row[0], row[1].partition(" ")[0], int(row[2]))
        for row in rows
        if len(row) == 3 and row[2].isdecimal()
    ]


def requeue(job_id: str, restarts: int) -> str:
    """Requeue the job, unless it has ended or was cancelled; "" or why it was not requeued.

    restarts: of this start. Slurm's controller itself looks whether the job still runs (`incomplete`): a
    plain `requeue` starts a job again that was cancelled a moment before. It says nothing where it does
    not requeue one, so that the job is read again.
    """
    refusal = _refusal("scontrol", "requeue", "incomplete", job_id)
    for _ in range(2):  # Slurm is ending the job, and may end these commands with it
        with contextlib.suppress(SlurmSilent):
            now = show_job(job_id)
            if now and (now.restarts > restarts or now.is_waiting):
                return ""
            return refusal or f"it is {now.state if now else 'gone'}: it was cancelled meanwhile"
    return refusal


def exclude(job_id: str, names: Sequence[str]) -> str:
    """Set the nodes that a pending job must not get; "" or why Slurm refused."""
    return update(job_id, {"ExcNodeList": ",".join(names)})


def update(job_id: str, values: Mapping[str, object]) -> str:
    """Change a pending job; "" or why Slurm refused."""
    words = (f"{key}={value}" for key, value in values.items())
    return _refusal("scontrol", "update", f"JobId={job_id}", *words)


def _refusal(*command: str) -> str:
    try:
        ask(*command)
    except (Refused, SlurmSilent) as err:
        return str(err)
    return ""


class Refused(Exception):
    """A Slurm command failed although the controller responds."""


def ask(*command: str, patience_sec: float | None = None, timeout_sec: float = ASK_SEC) -> str:
    """The output of a Slurm command, which is repeated while the controller does not respond.

    patience_sec: for how long (PATIENCE_SEC for None). timeout_sec: of each try. Raises SlurmSilent when
    that time is over, and Refused.
    """
    end = time.monotonic() + (PATIENCE_SEC if patience_sec is None else patience_sec)
    while True:
        output, trouble = run(command, timeout_sec=timeout_sec)
        if not trouble:
            return output
        if not is_silence(trouble):
            raise Refused(trouble)
        if time.monotonic() > end:
            raise silent(f"{command[0]}: {trouble}")
        time.sleep(1)


def is_silence(trouble: str) -> bool:
    """Return whether this error of a command that only asks the controller means that it does not
    respond."""
    return any(sign in trouble for sign in _SILENCE)


def is_slurms_own(trouble: str) -> bool:
    """Return whether srun or sbcast failed for a reason that is Slurm's own and passes. What the command
    itself has printed does not count, nor an error of a node that did not start its task."""
    return any(
        line.startswith(("srun: ", "sbcast: ", "scontrol: "))
        and not re.search(r"on node|launch|\]:\d+\] failed", line)
        and any(sign in line for sign in _SLURMS_OWN)
        for line in trouble.splitlines()
    )


def controller_trouble(*, timeout_sec: float = ASK_SEC) -> str:
    """The error of a command that asks the controller now; "" where it responds."""
    trouble = run(["scontrol", "show", "config"], timeout_sec=timeout_sec)[1]
    return f"scontrol: {trouble}" if is_silence(trouble) else ""


def submit_limit(trouble: str) -> str:
    """The limit on jobs of a user in the queue for which sbatch refused one more, such as
    `QOSMaxSubmitJobPerUserLimit`; "" for another error."""
    match = re.search(r"\b(Assoc|QOS)\w*SubmitJob\w*", trouble)
    return match[0] if match else ""


def silent(trouble: str) -> SlurmSilent:
    answers = is_slurms_own(trouble) and not is_silence(trouble)
    return SlurmSilent(
        f"Slurm starts no process: {trouble}" if answers else f"Slurm does not answer: {trouble}",
        cause="its controller is down or restarting, or this node has no Slurm commands",
        fix="ask `sinfo`; rerun the same command when it answers",
    )
