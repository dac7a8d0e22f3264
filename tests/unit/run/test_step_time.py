"""Against a plan whose time is wrong by more than a third: computed by hand, and compared with steps that
others have published. No GPU of Forge's own has been compared with it."""

import pytest
from support.repository import REPOSITORY as ROOT

from forge.core import collectives, memory
from forge.core.config import load_config
from forge.core.errors import ConfigError
from forge.core.machine import load_machine
from forge.core.memory import GIB, Shape
from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.run.step_time import BANDWIDTHS, Speed, remedies, step_time
from forge.trainer.metrics import PEAK_BF16_FLOPS

PEAK = 989.4e12
H200 = Speed(PEAK, 4.8e12, 450e9, 4 * 50e9)  # nodes of four, 400 Gbit/s each
H100_500W = Speed(PEAK, 2.4e12, 450e9, 8 * 50e9)  # of torchtitan's tables: slower memory
SEVEN_B = Llama(dim=4096, layers=32, heads=32, ffn_dim=11008, tie_embeddings=False)
EIGHT_B = Llama(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, tie_embeddings=False)
THIRTEEN_B = Llama(dim=5120, layers=40, heads=40, kv_heads=8, ffn_dim=17920, tie_embeddings=False)
VOCAB = 32000


def seven_b(ranks, **train):
    values = {"seq_len": 4096, "batch_size": 4 * ranks, "micro_batch_size": 1, "compile": True}
    return Shape(SEVEN_B, VOCAB, Train(**{**values, "shard": "all", **train}), ranks, 4)


def bandwidth(**network):
    return Speed(PEAK, 3.35e12, 450e9, network.get("gbits", 1600) * 1e9 / 8)


def test_computing_takes_as_long_as_products_and_passes_over_memory():
    """One rank, 4 samples. Products: 4 x 4096 tokens of 46.1 GFLOPs at 0.6 of 989 TFLOP/s are 1.27 s. A
    block keeps 155 KB a token, of which 5 x 0.5 pass at 3.0 TB/s: 67 ms; logits 2 ms. The update moves 40
    bytes a weight: 89 ms."""
    time = step_time(seven_b(1), bandwidth())
    assert time.computing == pytest.approx(1.272 + 0.067 + 0.002 + 0.089, rel=0.01)
    assert (time.waiting, time.between_nodes) == (0, 0)
    flops = 4 * 4096 * SEVEN_B.flops_per_token(VOCAB, 4096)
    assert time.mfu == pytest.approx(flops / PEAK / time.total)


def test_recomputing_takes_a_third_of_the_blocks_products_again():
    """44.6 of 46.1 GFLOPs a token are of blocks: a third of them is 0.41 s; and 2 of 5 passes, 27 ms."""
    whole, full = (step_time(seven_b(1, recompute=how), bandwidth()) for how in ("none", "full"))
    assert full.computing - whole.computing == pytest.approx(0.41 + 0.027, rel=0.02)
    assert full.computing > step_time(seven_b(1, recompute="selective"), bandwidth()).computing


def test_what_a_rank_sends_in_rings():
    """7B in bf16 is 13.5 GB, gathered twice but for its ends (0.5 GB), by 31 of 32 ranks; gradients in
    fp32 are 27.0 GB."""
    gathers, again, reduces, *_ = collectives.of_step(seven_b(32, batch_size=32))
    assert gathers.sent_bytes == pytest.approx(13.48e9 * 31 / 32, rel=0.001)
    assert again.sent_bytes == pytest.approx((13.48e9 - 0.524e9) * 31 / 32, rel=0.001)
    assert reduces.sent_bytes == pytest.approx(26.95e9 * 31 / 32, rel=0.001)
    assert {entry.nodes for entry in (gathers, again, reduces)} == {8}


@pytest.mark.parametrize(
    ("shard", "inside", "between"),
    [("all", 0, 3), ("node", 3, 1), (2, 3, 1), (8, 0, 4), ("none", 0, 1)],
)
def test_only_what_leaves_a_node_goes_between_nodes(shard, inside, between):
    sent = [
        entry for entry in collectives.of_step(seven_b(32, shard=shard)) if entry.phase != "end"
    ]
    assert sum(entry.nodes == 1 for entry in sent) == inside
    assert sum(entry.nodes > 1 for entry in sent) == between


def test_ranks_wait_where_reducing_takes_longer_than_the_backward_pass():
    """One sample a rank and step. Beside the backward pass (0.227 s) 12.6 + 26.1 GB go in rings that
    share a node's 100 GB/s, of which NCCL reaches 0.8: 0.483 s. Forward: 13.1 GB, 0.163 s beside 0.11."""
    shape = seven_b(32, batch_size=32)
    time = step_time(shape, bandwidth(gbits=800))
    assert time.backward == pytest.approx(0.227, rel=0.03)
    assert time.between_nodes == pytest.approx(0.483, rel=0.01)
    assert time.waiting == pytest.approx(0.483 - 0.227 + 0.163 - 0.108, rel=0.05)
    assert time.is_slowed_by_network


def test_remedies_are_the_settings_that_end_the_waiting():
    """With eight samples a rank and 1600 Gbit/s, each of the three does."""
    speed, shape = bandwidth(gbits=1600), seven_b(32, batch_size=256)
    shape = shape.changed(micro_batch_size=1)
    assert step_time(shape, speed).is_slowed_by_network
    assert remedies(shape, speed, 79 * GIB) == [
        "train.reduce_dtype: bf16",
        "train.shard: node",
        "train.micro_batch_size: 2",
    ]
    # A slow network takes more; nothing that does not fit is named.
    assert remedies(shape, bandwidth(gbits=400), 79 * GIB) == ["train.shard: node"]
    together = seven_b(128, batch_size=1024)
    assert remedies(together, bandwidth(gbits=100), 40 * GIB) == []


@pytest.mark.parametrize(
    ("model", "layout", "speed", "train", "published"),
    [
        # KempnerForge, benchmarks/mfu_scaling: seconds of a step; 7B there has 8.03 billion weights.
        (EIGHT_B, (1, 4), H200, {"batch_size": 8, "recompute": "full"}, 3.13),
        (EIGHT_B, (4, 4), H200, {"batch_size": 32, "recompute": "full", "shard": "all"}, 3.36),
        (
            *(THIRTEEN_B, (8, 4), H200),
            {"batch_size": 128, "recompute": "full", "shard": "all", "compile": False},
            14.81,
        ),
        # torchtitan, benchmarks/llama3_h100_202412: tokens of a rank over tokens/s of a GPU.
        *(
            (
                *(EIGHT_B, (ranks, 8), H100_500W),
                {
                    **{"batch_size": 2 * ranks, "micro_batch_size": 2, "seq_len": 8192},
                    **{"recompute": "selective", "shard": "all"},
                },
                2 * 8192 / tokens_per_sec,
            )
            for ranks, tokens_per_sec in ((8, 6667), (128, 6514))
        ),
    ],
)
def test_time_is_within_a_third_of_what_others_have_measured(
    model, layout, speed, train, published
):
    values = {"seq_len": 4096, "micro_batch_size": 4, "compile": True, **train}
    time = step_time(Shape(model, 128256, Train(**values), *layout), speed)
    assert time.total == pytest.approx(published, rel=0.33)


def test_gpu_is_known_by_its_name():
    h200 = Speed.of(load_machine(None, {"gpu": "NVIDIA H200", "fabric.node_gbits": 800}), 4)
    assert h200 == Speed(PEAK, 4.8e12, 450e9, 100e9)
    assert Speed.of(load_machine(None, {"gpu": "H100 PCIe"}), 8).link == 64e9
    assert Speed.of(load_machine(None, {"gpu": "GH200"}), 8).memory == 4.0e12
    assert Speed.of(load_machine(None), 8) == Speed(PEAK, 3.35e12, 450e9, 400e9)
    with pytest.raises(ConfigError, match="the speed of the GPU V100 is not known"):
        Speed.of(load_machine(None, {"gpu": "V100"}), 8)


@pytest.mark.parametrize("name", [name for name, peak in PEAK_BF16_FLOPS.items() if peak])
def test_every_gpu_with_a_known_peak_has_bandwidths(name):
    speed = Speed.of(load_machine(None, {"gpu": f"NVIDIA {name} 80GB"}), 1)
    assert (speed.peak, speed.memory, speed.link) == (PEAK_BF16_FLOPS[name], *BANDWIDTHS[name])


def row(size, ranks):
    """A row of the table in docs/gpu.md: config/sizes on H100 nodes of Kempner."""
    config = load_config(str(ROOT / f"config/sizes/{size}.yaml"), {})
    machine = load_machine(str(ROOT / "profiles/kempner/machine.yaml"))
    shape = Shape.of(config, config.tokenizer.vocab_size, ranks, min(4, ranks))
    shape = memory.with_micro_batch(shape, machine.gpu_memory_gib * GIB)
    if memory.estimate(shape).total > machine.gpu_memory_gib * GIB:
        return f"| {size} | {ranks} | does not fit | | | |"
    time = step_time(shape, Speed.of(machine, shape.ranks_per_node))
    tokens = config.train.batch_size * config.train.seq_len / time.total
    return (
        f"| {size} | {ranks} | {shape.micro_samples} | {time.total:.3g} | {tokens / ranks:,.0f}"
        f" | {time.mfu:.0%} |"
    )


@pytest.mark.parametrize("ranks", [1, 8, 32])
@pytest.mark.parametrize("size", ["1b", "7b"])
def test_page_about_gpus_shows_these_estimates(size, ranks):
    assert row(size, ranks) in (ROOT / "docs/gpu.md").read_text().splitlines()
