"""For training programs that Forge runs: where to resume, when to stop, and what to tell Forge.

Optional: the same is in the variables of docs/programs.md. Needs neither torch nor anything else of
Forge, and works without Forge too: then there is no checkpoint, no goal, and nobody who asks to stop.

    from forge.program import Run

    run = Run()                                # before the model is built: from here on it can be stopped
    step = load(run.resume) if run.resume else 0
    while step < run.goal:
        step = train_one_step()
        run.heartbeat(step)
        stop = any_rank(run.stop_requested())  # the signal reaches ranks one by one: let them agree
        if stop or step % 100 == 0:
            save(run.checkpoints / f"checkpoint-{step}")
            run.saved(step)
        if stop:
            break
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


class Run:
    """The run that this process is a rank of. Every rank makes one, in its main thread."""

    def __init__(self) -> None:
        environ = os.environ
        self.resume: Path | None = Path(path) if (path := environ.get("FORGE_RESUME")) else None
        """The verified checkpoint to resume from; None for a fresh start."""
        self.checkpoints = Path(environ.get("FORGE_CHECKPOINTS") or "checkpoints")
        """Directory in which to write checkpoints."""
        self.goal = int(environ.get("FORGE_GOAL") or 0)
        """Step at which the run is complete; 0 where the config has no goal."""
        self._asked = False
        self._heartbeat, self._saved = environ.get("FORGE_HEARTBEAT"), environ.get("FORGE_SAVED")
        if (name := environ.get("FORGE_STOP_SIGNAL", "none")) != "none":
            signal.signal(signal.Signals[name], self._ask)

    def heartbeat(self, step: int) -> None:
        """Tell Forge that this rank has completed `step`."""
        _write(self._heartbeat, step)

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to save and exit. Other ranks may learn of it a step later:
        all must agree on the step, with a collective of their own."""
        return self._asked

    def saved(self, step: int) -> None:
        """Tell Forge that this rank has written its part of the checkpoint of `step`, if it has one. When
        every rank has said so, the checkpoint is sealed."""
        _write(self._saved, step)

    def _ask(self, *_: object) -> None:
        self._asked = True


def _write(path: str | None, step: int) -> None:
    if path:
        # Readers never see an empty file. A full disk ends no training: the checkpoint will say so.
        try:
            temporary = Path(f"{path}.writing")
            temporary.write_text(str(step))
            temporary.replace(path)
        except OSError:
            pass
