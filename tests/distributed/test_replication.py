"""Copies of a model kept alike by FSDP2, as on GPUs in bf16, and by DDP, as on CPUs. Against gradients,
losses and checkpoints that depend on which of the two it was."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.forked import DEADLINE_SEC, LEFT_OVER, RankStart
from support.gpu import full
from support.live_run import LONG, TWO_RANKS

from forge.checkpoint import storage
from forge.checkpoint.save_plan import KeptPlans
from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.launch.process_group import World
from forge.launch.rank import Rank
from forge.trainer import optim, transforms
from forge.trainer.initialize import initialize
from forge.trainer.models.decoder import make_decoder
from forge.trainer.parallel import ParallelModel
from forge.validation import model_checks, replay

RANKS, VOCAB = 2, 301
MODEL = Llama(dim=64, layers=3, heads=4, tie_embeddings=False)
# Of the norm of all gradients. bf16 has 8 bits, and autocast keeps fp32 between blocks: 6e-3 measured.
LIMITS = {"fp32": 1e-6, "bf16": 2e-2}


@dataclass(frozen=True)
class Case:
    """What two ranks train, and where they meet and save."""

    folder: Path
    precision: str
    tied: bool = False
    reduce_dtype: str = "fp32"
    shard: str = "none"
    kept: str = "ddp"

    @property
    def model(self) -> Llama:
        return MODEL.model_copy(update={"tie_embeddings": self.tied})


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list]]:
    """on_ranks(function, case): what the function returns on each rank."""
    for name in LEFT_OVER:  # the fork server stays, so it must not have the mark of what does not
        monkeypatch.delenv(name, raising=False)
    context = multiprocessing.get_context("forkserver")
    with context.Pool(RANKS, maxtasksperchild=1) as pool:
        yield lambda function, case: pool.starmap_async(
            function, [(case, rank) for rank in range(RANKS)], chunksize=1
        ).get(DEADLINE_SEC)


def by(name: str) -> None:
    """Have this process keep copies alike by "fsdp2" or by "ddp", whatever the device."""
    transforms.replicates = lambda world, precision: name == "fsdp2"  # type: ignore[assignment]


def joined(case: Case, rank: int) -> World:
    torch.set_num_threads(1)
    store = dist.FileStore(str(case.folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    return World(Rank(rank, rank, RANKS, RANKS), torch.device("cpu"), "gloo", group)


def replicated(case: Case, world: World) -> ParallelModel:
    """A model that was initialized and wrapped; micro-batches of two of a rank's four samples."""
    train = Train(
        **{"seq_len": 32, "batch_size": 4 * RANKS, "micro_batch_size": 2},
        **{"shard": case.shard, "reduce_dtype": case.reduce_dtype},
    )
    decoder = make_decoder(case.model, VOCAB)
    parallel = ParallelModel(decoder, train, world, case.precision)
    initialize(decoder, seed=0)
    return parallel


def batch(world: World, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + world.rank.rank)
    tokens = torch.randint(VOCAB, (4, 33), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# --- gradients and losses ---------------------------------------------------------------------------


def gradients_of(case: Case, rank: int) -> dict:
    """(gradients, loss of the step, evaluated loss) of this rank, by each of the two."""
    world, found = joined(case, rank), {}
    for name in ("ddp", "fsdp2"):
        by(name)
        parallel = replicated(case, world)
        parallel.wrap()
        loss = float(parallel.backward(*batch(world, 0)))
        with torch.no_grad():
            evaluated = parallel.loss(*batch(world, 1))
        dtypes = {p.dtype for p in parallel.decoder.parameters()}
        assert dtypes == {torch.float32}
        found[name] = all_gradients(parallel), loss, evaluated
    return found


def all_gradients(parallel: ParallelModel) -> np.ndarray:
    grads = [full(p.grad).flatten() for p in parallel.decoder.parameters()]
    return torch.cat(grads).double().numpy()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", LIMITS)
def test_gradients_and_losses_are_those_of_ddp(on_ranks, tmp_path, precision, tied):
    case = Case(tmp_path, precision, tied)
    for found in on_ranks(gradients_of, case):
        (expected, *losses), (grads, *others) = found.values()
        error = relative(grads, expected)
        assert error <= LIMITS[precision]
        assert others == pytest.approx(losses, abs=LIMITS[precision])
        assert precision == "fp32" or error > 0  # bf16 is not what was compared with itself


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def gradients_reduced_in_each(case: Case, rank: int) -> list[np.ndarray]:
    """In fp32, then in bf16, by `case.kept`."""
    world = joined(case, rank)
    by(case.kept)
    found = []
    for reduce_dtype in ("fp32", "bf16"):
        parallel = replicated(replace(case, reduce_dtype=reduce_dtype), world)
        parallel.wrap()
        parallel.backward(*batch(world, 0))
        found.append(all_gradients(parallel))
    return found


@pytest.mark.parametrize(("kept", "shard"), [("fsdp2", "none"), ("ddp", "all")])
def test_gradients_reduced_in_bf16_are_rounded_and_alike_on_all_ranks(
    on_ranks, tmp_path, kept, shard
):
    case = Case(tmp_path, "fp32", kept=kept, shard=shard)
    found = on_ranks(gradients_reduced_in_each, case)
    for exact, rounded in found:
        assert 1e-4 < relative(rounded, exact) < LIMITS["bf16"]
    assert np.array_equal(found[0][1], found[1][1])


# --- checkpoints ------------------------------------------------------------------------------------


def saved_and_loaded(case: Case, rank: int) -> list:
    """Three steps by each of the two, the state of the first two saved and loaded by the other."""
    world, found = joined(case, rank), []
    for maker, reader in (("ddp", "fsdp2"), ("fsdp2", "ddp")):
        folder = case.folder / maker
        folder.mkdir(exist_ok=True)
        made = trained(case, world, maker, folder)
        storage.write_state(storage.training_state(*made), folder, world, KeptPlans())
        loaded = trained(case, world, reader, folder, load=True)
        digests = [storage.weights_digest(model) for model, _ in (made, loaded)]
        moments = [moments_of(*state) for state in (made, loaded)]
        assert all(map(torch.equal, *moments))
        found.append(digests)
    return found


def trained(case: Case, world: World, name: str, folder: Path, *, load: bool = False) -> tuple:
    """Model and optimizer after two steps, or as loaded."""
    by(name)
    parallel = replicated(case, world)
    optimizers = optim.make_optimizers(parallel.decoder, parallel.settings)
    if load:
        storage.load_state(parallel.decoder, optimizers, folder, world)
    parallel.wrap()
    for step in () if load else range(2):
        parallel.backward(*batch(world, step))
        norm = parallel.gradient_norm()
        optim.update(optimizers, norm, largest=1.0, unless=torch.tensor(False))
        parallel.loss(*batch(world, step))  # leaves nothing gathered for the save
    return parallel.decoder, optimizers


def moments_of(model: torch.nn.Module, optimizers: optim.Optimizers) -> list[torch.Tensor]:
    state = storage.training_state(model, optimizers)["optimizer"]
    return [full(tensor) for _, tensors in sorted(state.items()) for tensor in tensors.values()]


def test_checkpoint_of_one_is_loaded_by_the_other_with_the_same_digest(on_ranks, tmp_path):
    case = Case(tmp_path, "bf16")
    found, other = on_ranks(saved_and_loaded, case)
    for made, loaded in found:
        assert made == loaded and made
    assert found[0] != found[1]  # they were trained in another arithmetic
    assert other == [[None, None]] * 2  # only rank 0 has a digest


# --- runs -------------------------------------------------------------------------------------------


def with_fsdp2(_start: RankStart) -> None:
    """An `Arm`: this rank replicates as ranks with GPUs do."""
    by("fsdp2")


def train_with_fsdp2(run, *more):
    outcome = run.fork("train", *TWO_RANKS, *more, arm=with_fsdp2).end()
    assert outcome.code == 0, outcome.text
    return run


def test_resumed_run_is_bitwise_equal_and_valid(runs, monkeypatch):
    settings = (*LONG, "--train.precision=bf16", "--train.micro_batch_size=2")
    short = (*settings, "--train.max_steps=4", "--train.checkpoint_every=100")
    at_once = train_with_fsdp2(runs("at-once", *short))
    resumed = train_with_fsdp2(runs("resumed", *short), "--train.max_steps=2")
    train_with_fsdp2(resumed)
    assert [event["step"] for event in resumed.events("init")] == [0, 2]
    assert dict(resumed.losses()) == dict(at_once.losses())
    assert resumed.weights_digest() == at_once.weights_digest()
    # Validation computes with DDP and autocast here, on GPUs too with other arithmetic than training.
    monkeypatch.setattr(model_checks, "same_arithmetic", lambda *_: False)
    monkeypatch.setattr(replay, "same_arithmetic", lambda *_: False)
    outcome = at_once.forge("validate")
    assert outcome.code == 0, outcome.text
