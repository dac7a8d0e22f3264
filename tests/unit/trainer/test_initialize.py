"""Initial weights. Against weights that depend on the number of ranks: the same run on another cluster
would be another run. Initialization needs no communication, so the ranks are processes of a "fake" group,
one after the other."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest
import torch
import torch.distributed as dist
from support.architectures import each_architecture
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.launch.process_group import World
from forge.launch.rank import Rank
from forge.trainer import initialize
from forge.trainer.initialize import initialized
from forge.trainer.models.decoder import Decoder, make_decoder
from forge.trainer.parallel import ParallelModel

# Of 9 ranks the last one has 4 rows of the vocabulary, the others 12; and none of a key projection's 8.
SMALL = Llama(dim=32, layers=2, heads=4, kv_heads=1, ffn_dim=48, tie_embeddings=False)
VOCAB, RANKS_PER_NODE = 100, 2
BLOCKS = (64, 512, 2**20)  # of two rows, of some, and of all


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Processes that run one function each: torch remembers the rank of a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forge.trainer.parallel"])
    with context.Pool(2, maxtasksperchild=1) as pool:
        yield pool


def rows_of(number: int, world_size: int, shard: str | int) -> dict:
    """This rank's rows of each weight, by size of the blocks."""
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=world_size)
    rank = Rank(number, number % RANKS_PER_NODE, world_size, RANKS_PER_NODE)
    world = World(rank, torch.device("cpu"), "gloo", dist.group.WORLD)
    model = make_decoder(SMALL, VOCAB)
    ParallelModel(model, Train(shard=shard, batch_size=world_size), world, "fp32")
    return {numbers: own_rows(model, numbers) for numbers in BLOCKS}


def own_rows(model: Decoder, numbers: int) -> dict:
    initialize.BLOCK_NUMBERS = numbers
    initialize.initialize(model, seed=3)
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().numpy().copy()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("world_size", "shard", "ranks_per_copy"),
    [(1, "all", 1), (2, "none", 1), (4, "node", 2), (6, 3, 3), (9, "all", 9)],
)
def test_rows_of_all_ranks_are_the_weights_of_a_single_process(
    ranks: Pool,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    shard: str | int,
    ranks_per_copy: int,
) -> None:
    calls = [(number, world_size, shard) for number in range(world_size)]
    found = ranks.starmap(rows_of, calls, chunksize=1)
    for numbers in BLOCKS:
        monkeypatch.setattr(initialize, "BLOCK_NUMBERS", numbers)
        expected = initialized(SMALL, VOCAB, seed=3).named_parameters()
        parts = [own[numbers] for own in found]
        copies = [parts[at : at + ranks_per_copy] for at in range(0, world_size, ranks_per_copy)]
        for name, weight in expected:
            for copy in copies:
                rows = [torch.from_numpy(part[name]) for part in copy]
                assert torch.equal(torch.cat(rows), weight), (name, numbers)


def test_a_rank_has_memory_for_its_own_rows_only(ranks: Pool) -> None:
    [own] = ranks.starmap(rows_of, [(0, 4, "all")])
    full = initialized(SMALL, VOCAB).num_parameters()
    assert sum(rows.size for rows in own[64].values()) == pytest.approx(full / 4, rel=0.02)


def test_seed_alone_decides_the_initial_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = initialized(Llama(dim=64, layers=8, heads=2), 1000, seed)
        return torch.cat([parameter.flatten() for parameter in model.parameters()]).detach()

    torch.manual_seed(1)
    first, state = weights(0), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone


def test_no_two_blocks_of_rows_are_alike(monkeypatch) -> None:
    monkeypatch.setattr(initialize, "BLOCK_NUMBERS", 32)  # a row each
    matrices = [p.detach() for p in initialized(SMALL, VOCAB).parameters() if p.dim() == 2]
    starts = [tuple(row.sign().tolist()[:32]) for matrix in matrices for row in matrix]
    assert len(set(starts)) == len(starts)


@each_architecture
def test_norms_begin_with_1_and_biases_with_0(small) -> None:
    decoder = initialized(small, VOCAB)
    vectors = {name: p for name, p in decoder.named_parameters() if p.dim() == 1}
    assert vectors
    for name, vector in vectors.items():
        assert torch.equal(vector, torch.full_like(vector, not name.endswith("bias"))), name


def test_initial_spread_is_0_02_and_smaller_towards_the_residual_stream() -> None:
    model = initialized(Llama(dim=256, layers=8, heads=4), 1000)
    weights = {name: weight for name, weight in model.named_parameters() if "layers.3" in name}
    for name, weight in weights.items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones(256))
            continue
        std = 0.02 / 4 if "o_proj" in name or "down_proj" in name else 0.02  # 4 = sqrt(2 * layers)
        assert weight.std().item() == pytest.approx(std, rel=0.02)
        assert abs(weight.mean().item()) < 4 * std / weight.numel() ** 0.5
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)
