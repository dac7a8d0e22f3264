"""`forge plan`, and the refusal of a run that cannot fit: against a job that waits for days and then runs
out of memory in its first step."""

import re
import time

import pytest
from support import happenings
from support.shards import make

from forge import cli
from forge.core import events
from forge.core.config import Config, load_config
from forge.core.errors import ConfigError
from forge.core.machine import load_machine
from forge.core.paths import tokens_folder
from forge.core.process import hostname
from forge.data.content_ids import resolve, resolve_ids
from forge.hosts.placement import WorldLayout, check_layout
from forge.run.plan import plan
from forge.run.programs import program_of

SEVEN_B = """
model: {dim: 4096, layers: 32, heads: 32, ffn_dim: 11008, tie_embeddings: false}
tokenizer: {vocab_size: 32000}
train: {seq_len: 4096, batch_size: 512, micro_batch_size: 1, max_steps: 10000, shard: 2}
"""
H100 = {"launcher": "srun", "gpu_memory_gib": 79}


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "config.yaml").write_text(SEVEN_B)
    return str(tmp_path / "config.yaml")


def planned(capsys, *arguments):
    code = cli.main(["plan", *arguments])
    return code, capsys.readouterr()


def test_plan_says_how_many_tokens_each_source_gives(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("""
tokenize: {sources: {web: {inputs: [web]}, code: {inputs: [code]}}}
train: {seq_len: 100, batch_size: 10, max_steps: 100}
""")
    assert "sources: code, web, in proportion to their tokens" in planned(capsys, str(path))[1].out
    mix = "--train.mix=[{step: 0, web: 3, code: 1}, {step: 60, web: 0, code: 1}]"
    code, printed = planned(capsys, str(path), mix)
    assert code == 0
    assert "sources: code 55,000, web 45,000 tokens up to the goal" in printed.out
    _, printed = planned(capsys, str(path), mix, "--parent=other@80")
    assert "sources: code 20,000, web 0 tokens up to the goal" in printed.out


def test_plan_says_what_fits(config_file, capsys):
    ranks = ("--nodes=2", "--ranks-per-node=4", "--machine.gpu_memory_gib=79")
    code, printed = planned(capsys, config_file, *ranks)
    assert code == 0
    assert "6,738,415,616 parameters, vocabulary 32,000" in printed.out
    assert "512 samples of 4096 = 2,097,152 tokens, 9.67e+16 FLOPs" in printed.out
    assert "checkpoint: 80.9 GB" in printed.out
    rows = [line.split() for line in printed.out.splitlines() if line.endswith((" yes", " no"))]
    verdicts = {(row[0], row[-7]): row[-1] for row in rows}
    assert verdicts["none", "none"] == verdicts["none", "full"] == "no"
    assert verdicts["all", "none"] == verdicts["node", "full"] == "yes"
    assert rows[0][:3] == ["2", "(config)", "none"]


def test_plan_without_a_known_gpu_compares_with_an_h100(config_file, capsys):
    code, printed = planned(capsys, config_file, "--ranks-per-node=8")
    assert code == 0 and "fits 79 GiB" in printed.out and "time on H100 GPUs" in printed.out


ON_H100 = ("--ranks-per-node=8", "--machine.gpu=H100", "--train.shard=all")


def lines_of(printed, begin):
    return [line for line in printed.out.splitlines() if line.startswith(begin)]


def test_plan_forecasts_goodput_and_end_and_says_what_they_rest_on(config_file, capsys, tmp_path):
    own = (*ON_H100, f"--results={tmp_path / 'results'}", "--run=new")
    _, printed = planned(capsys, config_file, *own, "--train.checkpoint_minutes=auto")
    goodput, ends = lines_of(printed, "forecast")
    assert goodput.startswith("forecast: goodput (ETTR) 98.")
    assert goodput.endswith("no interruption known: assumes one in 24 h (stall assumed)")
    assert re.fullmatch(r"forecast: a start now ends \d{4}-\d\d-\d\d \d\d:\d\d UTC, in .*", ends)
    log = tmp_path / "results/other/events.jsonl"
    for event, ago in ((happenings.launch(host=hostname()), 7200), (happenings.lost(), 3600)):
        events.record(log, event.model_copy(update={"time": time.time() - ago}))
    _, printed = planned(capsys, config_file, *own, "--train.checkpoint_minutes=auto")
    assert (
        "; 1 interruption in 1 h, 0 of 1 with time for a save" in lines_of(printed, "forecast")[0]
    )


def test_plan_says_how_often_a_checkpoint_is_saved(config_file, capsys):
    for minutes, words in (
        ("null", "every 50 steps, 2 kept"),
        ("2.5", "every 50 steps and 2.5 min, 2 kept"),
        ("auto", "every 50 steps and as often as is best (train.checkpoint_minutes: auto), 2 kept"),
    ):
        _, printed = planned(capsys, config_file, *ON_H100, f"--train.checkpoint_minutes={minutes}")
        assert lines_of(printed, "checkpoint")[0].endswith(words)


def test_plan_without_a_known_gpu_names_no_end(config_file, capsys):
    _, printed = planned(capsys, config_file, "--ranks-per-node=8", "--train.shard=all")
    assert lines_of(printed, "forecast")[0].startswith("forecast: not known, as the time of a step")
    minutes = "--train.checkpoint_minutes=5"
    _, printed = planned(capsys, config_file, "--ranks-per-node=8", "--train.shard=all", minutes)
    assert lines_of(printed, "forecast")[1].endswith("names no GPU whose speed is known")


KEMPNER = ("--nodes=8", "--ranks-per-node=4", "--machine.fabric.node_gbits=1600")
NAMED = ("--train.shard=all", "--train.batch_size=256", "--train.compile=true")


def test_plan_says_what_a_rank_sends(config_file, capsys):
    _, printed = planned(capsys, config_file, *KEMPNER, "--train.shard=node")
    # Two bytes of 6.74 billion weights forward, without the ends again backward, 3/4 of them from the
    # others of a node, for 16 micro-batches; gradients in fp32; a quarter of them goes between nodes.
    inside = "within its node a rank sends in a step 317 GB by 1,056 all-gathers, 323 GB by 544"
    assert f"network: {inside} reduce-scatters" in printed.out
    assert "network: between nodes a rank sends in a step 11.8 GB by 34 all-reduces" in printed.out
    _, printed = planned(
        capsys, config_file, *KEMPNER, "--train.shard=all", "--train.optimizer=muon"
    )
    # 6.48 billion weights of the blocks in bf16, to the ranks that orthogonalize them and back: 31/32 of
    # a rank's own 32nd, twice.
    assert ", 0.784 GB by 2 all-to-alls" in printed.out
    assert "network: within" not in printed.out
    assert (
        "network" not in planned(capsys, config_file, "--train.shard=none")[1].out.splitlines()[5]
    )


def test_plan_warns_where_the_network_takes_longer_than_the_backward_pass(config_file, capsys):
    _, printed = planned(capsys, config_file, *KEMPNER, *NAMED)
    [line] = [line for line in printed.out.splitlines() if line.startswith("warning")]
    settings = "train.reduce_dtype: bf16, or train.shard: node, or train.micro_batch_size: 2"
    assert line.endswith(f": set {settings}")
    for setting in ("reduce_dtype=bf16", "shard=node", "micro_batch_size=2"):
        _, printed = planned(capsys, config_file, *KEMPNER, *NAMED, f"--train.{setting}")
        assert "warning" not in printed.out


def test_time_depends_on_the_gpu_and_the_network(config_file, capsys):
    def time(*options):
        _, printed = planned(capsys, config_file, *KEMPNER, *NAMED, *options)
        [line] = [line for line in printed.out.splitlines() if line.startswith("time on")]
        return line, float(line.split()[4])

    line, seconds = time()
    assert line.startswith("time on H100 GPUs") and "of it waiting for the network" in line
    assert time("--machine.gpu=A100")[1] > 2 * seconds
    assert time("--machine.fabric.node_gbits=100")[1] > 3 * seconds


def cost_lines(capsys, config_file, *options):
    """The step's seconds, the words of the line of the cost, and the warning below it."""
    _, printed = planned(capsys, config_file, *KEMPNER, *NAMED, *options)
    lines = printed.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("cost:"))
    assert lines[at - 1].startswith("time on")
    below = [lines[at + 1]] if "max_gpu_hours" in lines[at + 1] else []
    return float(lines[at - 1].split()[4]), lines[at], below


def read_cost(line):
    """GPU-hours and node-hours."""
    gpus, nodes = re.match(
        r"cost: about ([\d,.]+) GPU-hours \(([\d,.]+) node-hours\)", line
    ).groups()
    return float(gpus.replace(",", "")), float(nodes.replace(",", ""))


def test_plan_says_gpu_hours_and_node_hours_of_the_steps_that_are_left(config_file, capsys):
    """Of 8 nodes of 4 GPUs; three digits of the time are printed."""
    seconds, line, _ = cost_lines(capsys, config_file)
    expected = (32 * 10_000 * seconds / 3600, 8 * 10_000 * seconds / 3600)
    assert read_cost(line) == pytest.approx(expected, rel=0.01)
    assert line.endswith(
        "for 10,000 steps; an estimate without queue, restarts, saves and evaluation"
    )
    _, of_child, _ = cost_lines(capsys, config_file, "--parent=other@7500")
    assert read_cost(of_child) == pytest.approx([hours / 4 for hours in expected], rel=0.01)
    assert "for 2,500 steps" in of_child
    _, spare, _ = cost_lines(capsys, config_file, "--machine.preflight.spare_nodes=2")
    assert read_cost(spare) == pytest.approx([hours * 10 / 8 for hours in expected], rel=0.01)
    assert "steps, with 2 spare nodes;" in spare


def test_plan_warns_of_more_gpu_hours_than_the_machine_allows(config_file, capsys):
    _, line, below = cost_lines(capsys, config_file, "--machine.slurm.max_gpu_hours=100")
    assert read_cost(line)[0] > 100
    assert below == ["warning: more than slurm.max_gpu_hours: 100 of machine.yaml"]
    assert cost_lines(capsys, config_file, "--machine.slurm.max_gpu_hours=1e6")[2] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--train.batch_size=192"], "resumes on 6, 4, 3, 2, 1"),
        (["--train.batch_size=192", "--machine.slurm.nodes_min=4"], "resumes on 6, 4"),
        (["--train.batch_size=192", "--machine.slurm.nodes_min=8"], "is requeued"),
    ],
)
def test_plan_says_on_how_many_nodes_a_run_resumes_that_loses_some(
    config_file, capsys, words, told
):
    words = (*KEMPNER, "--machine.launcher=srun", *words)
    shrink = "--machine.slurm.shrink=true"
    _, printed = planned(capsys, config_file, shrink, *words)
    [line] = [line for line in printed.out.splitlines() if line.startswith("shrink:")]
    assert line == f"shrink: a run that loses some of its 8 nodes {told} (slurm.shrink)"
    assert "shrink" not in planned(capsys, config_file, *words)[1].out


def test_plan_for_cpus_invents_no_cost(config_file, capsys):
    _, printed = planned(capsys, config_file, "--machine.device=cpu", "--train.shard=none")
    assert "cost: not known, since device is cpu in machine.yaml" in printed.out
    assert "-hours" not in printed.out


def test_plan_says_how_often_the_data_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("words")
    path = tmp_path / "config.yaml"
    path.write_text("""
tokenize: {inputs: [text.txt]}
train: {seq_len: 100, batch_size: 10, max_steps: 6}
""")
    assert "data: not tokenized yet" in planned(capsys, str(path))[1].out
    make(tokens_folder("data", resolve_ids(load_config(path, {})).tokens))
    _, printed = planned(capsys, str(path))
    assert "data: 3,000 tokens, 2.22 epochs" in printed.out  # 27 sequences of 100 are in an epoch
    assert "never read" not in printed.out
    assert "goal: step 6 = 6,000 tokens, 0.00141 a parameter" in printed.out


def test_plan_says_how_often_each_source_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text(name)
    path = tmp_path / "config.yaml"
    path.write_text("""
tokenize: {sources: {web: {inputs: [web.txt]}, code: {inputs: [code.txt]}}}
train: {seq_len: 100, batch_size: 10, max_steps: 12, mix: {web: 3, code: 1}}
""")
    sources = resolve_ids(load_config(path, {})).sources
    make(tokens_folder("data", sources["web"]))
    assert "data: not tokenized yet" in planned(capsys, str(path))[1].out
    make(tokens_folder("data", sources["code"]))
    _, printed = planned(capsys, str(path))
    assert "data: code 3,000 tokens, 1.11 epochs; web 3,000 tokens, 3.33 epochs" in printed.out


def test_plan_warns_of_tokens_that_no_sequence_has(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("words")
    path = tmp_path / "config.yaml"
    path.write_text("""
tokenize: {inputs: [text.txt]}
train: {seq_len: 1000, batch_size: 2, max_steps: 5, warmup_steps: 0}
""")
    make(tokens_folder("data", resolve_ids(load_config(path, {})).tokens))
    _, printed = planned(capsys, str(path))
    assert "data: 3,000 tokens, 5 epochs" in printed.out
    assert "warning: 1,000 of 3,000 train tokens (33%) are never read" in printed.out
    assert "1,001 tokens of one shard, and 1 of 3 shards are shorter" in printed.out
    assert program_of(resolve(load_config(path, {})), WorldLayout(1, 1)).warnings() == [
        line for line in printed.out.splitlines() if "never read" in line
    ]
    _, printed = planned(capsys, str(path), "--train.seq_len=2000")
    assert "data: 3,000 tokens, too few for a sequence" in printed.out


def test_auto_micro_batch_is_the_largest_that_fits_and_divides_the_share(config_file, capsys):
    auto = ("--train.micro_batch_size=auto", "--nodes=2", "--ranks-per-node=4", "--train.shard=all")
    code, printed = planned(capsys, config_file, *auto)
    assert code == 0 and "samples (auto)" in printed.out
    rows = [line.split() for line in printed.out.splitlines() if line.endswith((" yes", " no"))]
    sizes = {(row[0], row[-7]): int(row[-6]) for row in rows}
    of_sharded = [sizes["node", way] for way in ("none", "selective", "full")]
    assert all(64 % size == 0 for size in sizes.values())
    assert of_sharded == sorted(of_sharded) and of_sharded[0] < of_sharded[-1]
    assert all(row[-1] == "yes" for row in rows if int(row[-6]) > 1)


def test_auto_micro_batch_that_leaves_half_of_a_gpu_empty_is_said(config_file, capsys):
    auto = ("--train.micro_batch_size=auto", "--nodes=2", "--ranks-per-node=4", "--train.shard=all")
    small = ("--model.dim=2048", "--model.layers=8", "--model.heads=16")
    said = {}
    for share in (67, 60):  # a prime; many divisors
        code, printed = planned(
            capsys, config_file, *auto, *small, f"--train.batch_size={8 * share}"
        )
        assert code == 0, printed.err
        said[share] = [line for line in printed.out.splitlines() if "of a GPU, the next" in line]
    assert (len(said[67]), said[60]) == (1, [])
    assert "a micro-batch of 1 fills" in said[67][0]
    assert "of a rank's 67 samples, 67, does not fit" in said[67][0]


def test_plan_refuses_ranks_that_cannot_share_the_batch(config_file, capsys):
    code, printed = planned(capsys, config_file, "--ranks-per-node=6")
    assert code == 78 and "cannot be shared by a world of 6" in printed.err


def layout_checked(shard, **machine):
    values = {"tokenizer": {"vocab_size": 32000}}
    values["model"] = {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 11008}
    values["train"] = {"seq_len": 4096, "batch_size": 8, "shard": shard}
    check_layout(load_machine(None, {**H100, **machine}), WorldLayout(2, 4), Config(**values))


def test_a_model_that_cannot_fit_is_refused_with_a_setting_that_does():
    with pytest.raises(ConfigError, match=r"more than \d+ GiB .* a GPU has 79 GiB") as error:
        layout_checked("none")
    assert "set train.shard: node and train.recompute: none" in str(error.value)


def test_a_step_that_may_not_fit_is_a_warning(capsys):
    layout_checked("all", gpu_memory_gib=20)
    assert "a step may need" in capsys.readouterr().err
    layout_checked("all")
    assert capsys.readouterr().err == ""


def test_ranks_on_cpus_are_not_compared_with_a_gpu():
    layout_checked("none", device="cpu")


@pytest.mark.parametrize("where", [{"device": "cpu"}, {"fabric.backend": "gloo"}])
def test_bf16_reduction_is_refused_before_the_queue_where_ddp_averages(where):
    values = {"train": {"batch_size": 8, "reduce_dtype": "bf16"}}
    with pytest.raises(ConfigError, match="averaged by DDP, in fp32 only"):
        check_layout(load_machine(None, {**H100, **where}), WorldLayout(2, 4), Config(**values))
    check_layout(load_machine(None, H100), WorldLayout(2, 4), Config(**values))


@pytest.mark.parametrize("layout", [WorldLayout(0, 4), WorldLayout(2, 0)])
def test_a_plan_for_no_ranks_is_refused(layout):
    with pytest.raises(ConfigError, match="must be 1 or more"):
        plan(Config(), load_machine(None), layout)
