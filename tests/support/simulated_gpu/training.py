"""`python -m support.simulated_gpu.training GUARD`: training steps on a simulated GPU.

Each line of standard input is a case, each line of standard output what was found, or null; both are
JSON. GUARD is the library made of guard.cpp. A case runs in a child of this process, which has imported
torch and never computed. The rank trains with others of the process group `fake`, whose collectives
return at once.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from support.simulated_gpu import faults
from support.simulated_gpu.device import Findings, SimulatedGpu, install

from forge.core.config import Config
from forge.core.memory import Shape

VOCABULARY = 512
DEADLINE_SEC = 300
# What a case would import in its own time, longer than it trains.
IMPORTED = (
    *(
        "torch._dynamo",
        "torch._inductor.utils",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ),
    *(
        "torch.testing._internal.distributed.fake_pg",
        "support.gpu",
        "support.simulated_gpu.recorder",
    ),
    *("forge.checkpoint.storage", "forge.trainer.loop"),
)


@dataclass(frozen=True)
class Case:
    """What is trained, and what is broken on purpose.

    ranks: of at most four a node. train, model: keys of these sections. saves: the state is copied
    beside each step. fault: a function of `faults`; "" for none.
    """

    ranks: int = 8
    train: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    saves: bool = False
    fault: str = ""

    @property
    def steps(self) -> int:
        """One to warm up, and one that reads its results. A save begins after this one, and is waited for
        by that of a third."""
        return 3 if self.saves else 2

    @property
    def ranks_per_node(self) -> int:
        return min(4, self.ranks)

    @property
    def config(self) -> Config:
        train = {"seq_len": 64, "batch_size": 4 * self.ranks, "micro_batch_size": 2, **self.train}
        model = {"dim": 128, "layers": 3, "heads": 4, **self.model}
        return Config.model_validate({"model": model, "train": train})


def shape_of(case: Case) -> Shape:
    """The case, as `forge plan` sees it."""
    return Shape.of(case.config, VOCABULARY, case.ranks, case.ranks_per_node)


def main() -> None:
    gpu = SimulatedGpu(Path(sys.argv[1]))
    install(gpu)
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _answer(gpu, Case(**json.loads(line)))
        if os.waitpid(child, 0)[1]:
            print("null", flush=True)


def _answer(gpu: SimulatedGpu, case: Case) -> NoReturn:
    """In the child: its line, or a traceback, and the end of the process."""
    signal.alarm(DEADLINE_SEC)
    status = 1
    try:
        if case.fault:
            getattr(faults, case.fault)()
        print(json.dumps([vars(findings) for findings in _train(gpu, case)]), flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _train(gpu: SimulatedGpu, case: Case) -> list[Findings]:
    """What each step, and what comes between it and the next, has done. The first is a warm-up."""
    import torch
    import torch.distributed as dist
    from support.simulated_gpu.recorder import Recorder
    from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError, FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from forge.trainer.numerics import prepare

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    config = case.config
    prepare(torch.device("cuda", 0), deterministic=config.train.deterministic)
    mode, found = FakeTensorMode(allow_non_fake_inputs=True), []
    with mode, Recorder(gpu):
        step, saver = _made(gpu, config, mode, case)
        assert {p.device for p in step.parallel.decoder.parameters()} == {torch.device("cuda", 0)}
        launched = None
        for number in range(case.steps):
            gpu.clear()
            try:
                before, launched = launched, step(number, lambda: [0.0, 0.0, 1.0])
            except FakeTensorDeviceMismatchError:  # noted by the recorder
                return [*found, gpu.clear()]
            if before:
                before.read()
            if saver and number:
                saver.save(step)
            found.append(gpu.clear())
    return found


def _made(gpu: SimulatedGpu, config: Any, mode: Any, case: Case) -> tuple[Any, Any]:
    """The training step of a new model, and what copies its state."""
    import torch
    from support.gpu import RandomBatches

    from forge.data.loader import Prefetcher
    from forge.trainer import documents, transforms
    from forge.trainer.divergence import SpikeRule
    from forge.trainer.models.decoder import make_decoder
    from forge.trainer.optim import make_optimizers
    from forge.trainer.parallel import ParallelModel
    from forge.trainer.step import TrainStep

    train, world = config.train, _world(case)
    # The number of documents is not known where tokens have no values.
    documents._bounds = lambda begins: torch.full((17,), begins.numel(), dtype=torch.int32)
    transforms._mesh = _without_modes(transforms._mesh)
    decoder = make_decoder(config.model, VOCABULARY)
    parallel = ParallelModel(decoder, train, world, "bf16", eos_id=0)
    optimizers = make_optimizers(decoder, train)
    parallel.wrap("tensors without values have no kernels")
    share = train.model_copy(update={"batch_size": train.batch_size // case.ranks})
    loader = Prefetcher(RandomBatches(share, VOCABULARY), world.device)
    spikes = SpikeRule.of(train, world.device, None)
    step = TrainStep(parallel, optimizers, _FakeBatches(loader, mode, gpu), 100, spikes)
    return step, _Copier(gpu, world.device, optimizers) if case.saves else None


def _world(case: Case) -> Any:
    import torch
    import torch.distributed as dist

    from forge.launch.process_group import World
    from forge.launch.rank import Rank

    class SimulatedWorld(World):
        def gather(self, values: list[float], what: str = "") -> list[list[float]]:
            return [values] * self.rank.world_size

    device, control = torch.device("cuda", 0), dist.group.WORLD
    return SimulatedWorld(Rank(0, 0, case.ranks, case.ranks_per_node), device, "nccl", control)


def _without_modes(make: Any) -> Any:
    """A device mesh is made of real tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    def made(*args: Any) -> Any:
        with _disable_current_modes():
            return make(*args)

    return made


class _FakeBatches:
    """The batches of a loader as fake tensors, pinned where they are. Its thread makes real ones."""

    def __init__(self, loader: Any, mode: Any, gpu: SimulatedGpu) -> None:
        self._loader, self._mode, self._gpu = loader, mode, gpu

    def batch(self, step: int) -> Any:
        from torch.utils._python_dispatch import _disable_current_modes

        fakes = []
        for tensor in self._loader.batch(step):
            with _disable_current_modes():
                is_pinned = self._gpu.storage(tensor) in self._gpu.pinned
                fakes.append(self._mode.from_tensor(tensor))
            if is_pinned:
                self._gpu.pinned.add(self._gpu.storage(fakes[-1]))
        return fakes


class _Copier:
    """Copies the state as an asynchronous save does, and reads the copy as its writer thread does."""

    def __init__(self, gpu: SimulatedGpu, device: Any, optimizers: Any) -> None:
        from forge.checkpoint.storage import Stager

        self._gpu, self._stager, self._optimizers = gpu, Stager(device), optimizers
        self.copy: Any = None
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._stager.hold_device())

    def save(self, step: Any) -> None:
        from forge.checkpoint import storage

        if self.copy is not None:
            self._stager.wait()
            for tensor in storage._tensors(self.copy):
                self._gpu.host_reads(tensor, "the writer thread")
        state = storage.training_state(step.parallel.decoder, self._optimizers)
        self.copy = self._stager.stage(state)


if __name__ == "__main__":
    main()
