"""A model over the ranks. Against settings that fail at the first step of a job that waited a week."""

import pytest
import torch

from forge.core.errors import ConfigError
from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.launch.process_group import World
from forge.launch.rank import Rank
from forge.trainer import transforms
from forge.trainer.models.decoder import make_decoder
from forge.trainer.parallel import ParallelModel


def test_a_model_sharded_over_gpus_by_gloo_is_refused():
    world = World(Rank(0, 0, 2, 2), torch.device("cuda", 0), "gloo", None)
    decoder = make_decoder(Llama(dim=32, layers=1, heads=2), 100)
    with pytest.raises(ConfigError, match="Gloo cannot shard a model over GPUs"):
        ParallelModel(decoder, Train(shard="all"), world, "bf16")


def test_gradients_in_bf16_are_refused_where_ddp_averages_them():
    world = World(Rank(0, 0, 2, 2), torch.device("cpu"), "gloo", None)
    decoder = make_decoder(Llama(dim=32, layers=1, heads=2), 100)
    with pytest.raises(ConfigError, match="averaged by DDP, in fp32 only"):
        ParallelModel(decoder, Train(reduce_dtype="bf16"), world, "bf16")


@pytest.mark.parametrize(
    ("device", "backend", "precision", "expected"),
    [
        ("cuda", "nccl", "bf16", True),
        ("cuda", "nccl", "fp32", False),
        ("cuda", "gloo", "bf16", False),
        ("cpu", "gloo", "bf16", False),
    ],
)
def test_fsdp2_replicates_on_gpus_in_bf16_only(device, backend, precision, expected):
    world = World(Rank(0, 0, 2, 2), torch.device(device), backend, None)
    assert transforms.replicates(world, precision) == expected


@pytest.mark.parametrize(
    ("device", "key", "earlier", "expected"),
    [
        ("cuda", None, None, True),  # the default on GPUs
        ("cpu", None, None, False),
        ("cuda", False, None, False),
        ("cpu", True, None, True),
        ("cuda", None, "no compiler", False),  # as the run's first launch decided
        ("cpu", None, "", True),
    ],
)
def test_blocks_are_compiled_on_gpus_or_as_the_first_launch_decided(
    monkeypatch, device, key, earlier, expected
):
    monkeypatch.setattr(ParallelModel, "_compile", lambda _: "")
    parallel = ParallelModel.__new__(ParallelModel)
    parallel.settings, parallel.uses_fsdp2 = Train(compile=key), True
    parallel.world = World(Rank(0, 0, 1, 1), torch.device(device), "gloo", None)
    parallel.wrap(earlier)
    assert parallel.is_compiled == expected
