"""A callback for the Trainer of Hugging Face transformers: heartbeat, orderly stop, finished checkpoints.

trainer = Trainer(..., callbacks=[ForgeCallback()])
trainer.train(resume_from_checkpoint=os.environ.get("FORGE_RESUME") or None)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from forge.program import Run


class ForgeCallback(TrainerCallback):
    """Tells Forge each step and each checkpoint; saves and ends training when Forge asks for it.

    Make one on every rank before the model is built. Costs one all_reduce of a number a step.
    """

    def __init__(self) -> None:
        self.run = Run()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """All ranks agree on the step at which they stop."""
        self.run.heartbeat(state.global_step)
        asked = torch.tensor(int(self.run.stop_requested()), device=args.device)
        if dist.is_initialized():
            dist.all_reduce(asked)
        if asked:
            control.should_save = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer calls this on every rank after its part has been written."""
        self.run.saved(state.global_step)
