"""The paced program as a Trainer of Hugging Face with its just-in-time checkpoint.

The Trainer shards batches as paced.py does, so chains are equal. The chain is in its checkpoints as
the state of a callback. Rank 0 writes the model, as the Trainer does with DDP: --mib is of this file.
"""

from __future__ import annotations

import time
from typing import Any

import paced  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from chain import SAMPLES_PER_RANK, START, link  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint


class Samples(Dataset[dict[str, int]]):
    """Their numbers."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"sample": number}


class Model(nn.Module):
    """That of paced.py, which gives its loss itself."""

    payload: Tensor

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.net = nn.Linear(paced.WIDTH, paced.WIDTH, bias=False)
        self.register_buffer("payload", torch.zeros(mib * 2**18))

    def forward(self, sample: Tensor) -> dict[str, Tensor]:
        width = torch.arange(1, paced.WIDTH + 1) / paced.WIDTH
        return {"loss": self.net(torch.sin(sample[:, None] * width)).square().mean()}


class Pace(TrainerCallback, ExportableState):
    """Makes a step last --step-sec, and writes it to steps.jsonl with the chain."""

    def __init__(self, chain: str = START) -> None:
        self.chain, self.options, self.begin = chain, paced.arguments(), 0.0
        self.samples: Tensor = torch.empty(0)  # of this rank in this step

    def state(self) -> dict[str, Any]:
        return {"args": {"chain": self.chain}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.log = paced.StepLog(self.options.folder, state.global_step)
        self.log.write(resumed=str(state.global_step or ""), corrupt=False)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        gathered = [torch.empty_like(self.samples) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, self.samples)
        self.chain = link(self.chain, state.global_step, torch.cat(gathered).tolist())
        time.sleep(max(0.0, self.options.step_sec - (time.monotonic() - self.begin)))
        self.log.write(step=state.global_step, chain=self.chain)


class PacedTrainer(Trainer):
    """Takes the samples in their order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(Samples())

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *more: Any) -> Tensor:
        [pace] = [one for one in self.callback_handler.callbacks if isinstance(one, Pace)]
        pace.samples = inputs["sample"]
        return super().training_step(model, inputs, *more)


def main() -> None:
    options = paced.arguments()
    torch.set_num_threads(1)
    checkpoints = options.folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    settings = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=options.steps,
        per_device_train_batch_size=SAMPLES_PER_RANK,
        save_steps=max(1, round(options.save_every_sec / options.step_sec)),
        save_total_limit=options.keep,
        enable_jit_checkpoint=True,
        restore_callback_states_from_checkpoint=True,
        ddp_backend="gloo",
        ddp_timeout=round(options.timeout_sec),
        ddp_broadcast_buffers=False,
        use_cpu=True,
        optim="sgd",
        learning_rate=0.01,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = PacedTrainer(
        Model(options.mib), settings, train_dataset=Samples(), callbacks=[Pace()]
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(checkpoints)))


if __name__ == "__main__":
    main()
