"""Threats: a contender of bench.gpu that does not train what the others train; one that runs out of
memory and ends the bench with it; a turn that finds the GPU's memory full of the others' weights."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.pages import commands_of
from support.repository import REPOSITORY
from torch import nn
from torch._dynamo.utils import counters

from bench.contenders import hf_llama, nanogpt, ours, titan
from bench.contenders.sizes import FULL, QUICK, TRAIN, Sizes, Step, fill
from bench.contest import Contest, Result, Sleeper, pretended, world_of
from bench.roofline import Rates, floor_seconds
from forge.launch.process_group import World

pytestmark = pytest.mark.tools

TINY, SHARD = QUICK
MAKERS = {
    "nanoGPT": nanogpt.nanogpt_step,
    "transformers": hf_llama.llama_step,
    "torchtitan-like": titan.titan_step,
    "forge": ours.forge_step,
}


@pytest.fixture
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.weekly
def test_every_contender_trains_in_a_quick_run() -> None:
    [documented] = commands_of("tests/distributed/test_gpu_bench.py")
    _, *words = documented.bare.split()
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = done.stdout.split("\n== ")[1:]
    rows = [
        (table.partition(":")[0], line.split()[0], float(line.split()[-2]))
        for table in tables
        for line in table.splitlines()
        if line.startswith(tuple(MAKERS))
    ]
    assert {(size, name) for size, name, _ in rows} == {
        *(("tiny", name) for name in MAKERS),
        ("tiny/4", "torchtitan-like"),
        ("tiny/4", "forge"),
    }
    # The first loss is a little larger than that of a guess.
    assert all(loss < math.log(TINY.vocab_size) for *_, loss in rows), rows


@pytest.mark.parametrize("sizes", [TINY, replace(SHARD, ranks=1)], ids=["tied", "untied"])
def test_torchtitan_like_step_is_that_of_a_plain_loop(uncompiled, sizes: Sizes) -> None:
    """Chunks of the loss, sharding and recomputation change nothing but roundings."""
    model = titan.Llama(sizes)
    fill(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), TRAIN.lr, betas=(0.9, 0.95), weight_decay=TRAIN.weight_decay
    )
    tokens, targets = sizes.batch(torch.device("cpu"))
    expected = []
    for _ in range(4):
        hidden = model(tokens, titan.turns(sizes, tokens.device))
        loss = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), TRAIN.grad_clip)
        optimizer.step()
        expected.append(float(loss.detach()))
    with world_of(sizes) as world:
        for how in ("none", "selective", "full"):
            step = titan.titan_step(replace(sizes, others_recompute=how), world)
            found = [float(step.take()) for _ in range(4)]
            assert found == pytest.approx(expected, abs=2e-3), how
    assert expected[-1] < expected[0] - 0.05


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_asleep_has_no_weights_and_wakes_with_its_first_ones(uncompiled, name: str) -> None:
    with world_of(TINY) as world:
        step = MAKERS[name](TINY, world)
        losses = [float(step.take()) for _ in range(3)]
        sleeper = Sleeper(step)
        state = [value for values in step.optimizer.state.values() for value in values.values()]
        for tensor in [*step.model.parameters(), *(value for value in state if value.dim())]:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            assert local.untyped_storage().nbytes() == 0
        step = sleeper.wake()
        assert float(step.take()) == losses[0]


@pytest.mark.parametrize("name", ["transformers", "torchtitan-like", "forge"])
def test_one_graph_serves_all_blocks_also_after_waking(name: str) -> None:
    """Past eight graphs of one function torch runs it uncompiled, and says nothing."""
    deep = replace(TINY, model=TINY.model.model_copy(update={"layers": 10}))
    torch.compiler.reset()
    counters.clear()
    with torch.compiler.set_stance("default", force_backend="aot_eager"), world_of(deep) as world:
        step = MAKERS[name](deep, world)
        float(step.take())
        float(Sleeper(step).wake().take())
    # Of the block; and of the loss, but for Forge's, whose loss is an operator.
    assert counters["stats"]["unique_graphs"] == (1 if name == "forge" else 2)
    assert not counters["graph_break"]
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["torchtitan-like", "forge"])
def test_a_pretended_rank_trains_with_finite_numbers(uncompiled, name: str) -> None:
    """With torch 2.11 gradients were whatever was in memory."""
    with world_of(SHARD) as world:
        step = MAKERS[name](SHARD, world)
        losses = [float(step.take()) for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        parts = sum(parameter.to_local().numel() for parameter in step.model.parameters())
        assert parts * SHARD.ranks == SHARD.model.num_parameters(SHARD.vocab_size)
    assert not dist.is_initialized()


def test_weights_that_a_pretended_rank_gathers_are_whole_and_finite(uncompiled) -> None:
    with pretended(4) as world:
        block = ours.forge_step(SHARD, world).model.model.layers[0]
        own = block.mlp.up_proj.weight.to_local().bfloat16()
        block.unshard()
        assert torch.equal(block.mlp.up_proj.weight, own.repeat(4, 1))


# --- turns ----------------------------------------------------------------------------------------


def small_step(_: Sizes, __: World) -> Step:
    model = nn.Linear(2, 2)
    return Step(model, torch.optim.SGD(model.parameters()), lambda: 1.0)


def raising(error: Exception):
    def contender(_: Sizes, __: World) -> Step:
        raise error

    return contender


def raising_at(number: int, error: Exception):
    """Its steps are well up to this one."""
    left = iter(range(1, number))

    def take() -> float:
        if next(left, None) is None:
            raise error
        return 1.0

    return lambda sizes, world: small_step(sizes, world)._replace(take=take)


def contest_of(contenders: dict, seconds: float = 60) -> dict[str, Result]:
    end = time.perf_counter() + seconds
    with world_of(TINY) as world:
        contest = Contest(contenders, TINY, world)
        contest.run(num_steps=2, max_rounds=3, deadline=end, end=end)
    return contest.results


def test_contenders_without_memory_or_package_are_left_out_and_the_others_go_on() -> None:
    results = contest_of(
        {
            "large": raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")),
            "later": raising_at(6, torch.OutOfMemoryError("CUDA out of memory")),
            "missing": raising(ImportError("No module named 'transformers'")),
            "broken": raising(ValueError("shapes\ndo not fit")),
            "good": small_step,
        }
    )
    assert {name: result.failure for name, result in results.items()} == {
        "large": "out of memory",
        "later": "out of memory",
        "missing": "left out: No module named 'transformers'",
        "broken": "failed: ValueError: shapes",
        "good": "",
    }
    assert [name for name, result in results.items() if result.is_fault] == ["broken"]
    assert [len(results[name].seconds) for name in ("large", "later", "good")] == [0, 2, 6]


def test_each_turn_is_in_the_file_before_the_next_one_begins(tmp_path, monkeypatch) -> None:
    """A bench that is killed leaves what it has measured."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # bench.gpu sets it as it is imported
    from bench import gpu

    file, lines = tmp_path / "bench.jsonl", []

    def counting(sizes: Sizes, world: World) -> Step:
        lines.append(len(file.read_text().splitlines()) if file.exists() else 0)
        return small_step(sizes, world)

    broken = raising(torch.OutOfMemoryError("CUDA out of memory"))
    contenders = {"first": counting, "broken": broken, "last": counting}
    device, end = torch.device("cpu"), time.perf_counter() + 60
    bench = gpu.Bench(device, Rates(1e12, 1e11), 1e15, True, [*contenders], end, file)
    with world_of(TINY) as world:
        contest = Contest(contenders, TINY, world, partial(gpu.append_turn, TINY, bench))
        contest.run(num_steps=2, max_rounds=1, deadline=end, end=end)
    assert lines == [0, 2]
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["step"], one["failure"], len(one["seconds"])) for one in told] == [
        *(("first", "", 2), ("broken", "out of memory", 0), ("last", "", 2))
    ]
    assert told[0]["size"] == TINY.name and told[0]["mfu"] > 0 and told[1]["loss"] is None


def test_a_loss_that_is_not_finite_is_a_fault() -> None:
    def contender(sizes: Sizes, world: World) -> Step:
        return small_step(sizes, world)._replace(take=lambda: math.nan)

    assert contest_of({"nan": contender})["nan"].failure == "failed: RuntimeError: the loss is nan"


def test_a_step_of_forge_without_torch_compile_is_a_fault(monkeypatch, uncompiled) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch, "compile", lambda forward, **_: fails)
    result = contest_of({"forge": ours.forge_step})["forge"]
    assert result.is_fault and "torch.compile has failed" in result.failure


def test_when_the_time_is_up_nothing_is_built() -> None:
    result = contest_of({"late": raising(AssertionError("it was built"))}, seconds=-1)["late"]
    assert (result.failure, result.is_fault) == ("left out: the time is up", False)


def test_transformers_is_left_out_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers" in contest_of({"hf": hf_llama.llama_step})["hf"].failure


# --- the roofline ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", FULL, ids=[one.name for one in FULL])
def test_floor_counts_the_flops_of_mfu_but_for_causal_attention(sizes: Sizes) -> None:
    shape = sizes.model
    norms = (2 * shape.layers + 1) * shape.dim  # are no products
    # MFU has 12 L D T a token; a causal kernel computes 7, the scores twice.
    attention = (12 - 7) * shape.layers * shape.dim * sizes.seq_len
    expected = sizes.flops - sizes.tokens * (6 * norms + attention)
    assert floor_seconds(sizes, Rates(1.0, math.inf)) == pytest.approx(expected)


def test_floor_is_no_less_than_compute_or_bandwidth_alone() -> None:
    rates = Rates(700e12, 3e12)
    both = floor_seconds(TINY, rates)
    by_flops = floor_seconds(TINY, Rates(rates.flops, math.inf))
    by_bytes = floor_seconds(TINY, Rates(math.inf, rates.bytes))
    assert max(by_flops, by_bytes) <= both <= by_flops + by_bytes


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--quick", "--sizes", "7B"], "--sizes has no '7B'; choose from tiny,tiny/4"),
        (["--quick", "--only", "forge,jax"], "--only has no 'jax'; choose from nanoGPT,"),
    ],
)
def test_unknown_names_are_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options, said: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # bench.gpu sets it as it is imported
    from bench import gpu

    monkeypatch.setattr(sys, "argv", ["bench.gpu", *options])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert said in capsys.readouterr().err
