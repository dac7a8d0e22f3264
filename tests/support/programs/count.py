"""A training program without torch: each rank counts steps, and saves its part of a checkpoint directory.

It takes part as any program does: by its command line, the variables of the contract, files and signals.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--save-every", type=int, default=5)
parser.add_argument("--sleep", type=float, default=0.01)
parser.add_argument("--exit-at", type=int, help="end at this step ...")
parser.add_argument("--exit-with", type=int, default=0, help="... with this status")
parser.add_argument("--hang-at", type=int, help="stop working at this step, on the last rank")
parser.add_argument("--slow-save", type=float, default=0.0, help="seconds of the last rank's save")
parser.add_argument("--kill-in-save", type=int, help="kill -9 of the last rank in this step's save")
parser.add_argument("--once", type=Path, help="do these things only while this file is not there")
options = parser.parse_args()

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
checkpoints = Path(os.environ["FORGE_CHECKPOINTS"])
is_last = rank == world_size - 1
misbehaves = options.once is None or not options.once.exists()
asked = []
signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))


def once(at):
    return misbehaves and at is not None and step >= at


def wait_for_others():
    """As in a collective: no rank begins a step before all have ended the one before."""
    beats = Path(os.environ["FORGE_HEARTBEAT"]).parent
    while not asked and any(told(beats / str(other)) < step for other in range(world_size)):
        time.sleep(0.002)


def told(beat):
    words = beat.read_text().split() if beat.exists() else []
    return int(words[0]) if words else -1


def save():
    folder = checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    if is_last and misbehaves:
        time.sleep(options.slow_save)
    text = json.dumps({"step": step, "rank": rank}) + " " * 1000
    with open(folder / f"part-{rank}.json", "w") as file:
        file.write(text[:20])
        if is_last and once(options.kill_in_save):
            options.once.touch()
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(text[20:])
    if rank == 0:
        (folder / "state.json").write_text(json.dumps({"step": step}))


step = 0
if resume := os.environ["FORGE_RESUME"]:
    step = json.loads((Path(resume) / "state.json").read_text())["step"]
    json.loads((Path(resume) / f"part-{rank}.json").read_text())
print(f"rank {rank} begins at step {step}", flush=True)
beat = Path(os.environ["FORGE_HEARTBEAT"])
beat.write_text(str(step))
while step < options.steps:
    if once(options.exit_at):
        if options.once:
            options.once.touch()
        print(f"rank {rank} gives up at step {step}", flush=True)
        sys.exit(options.exit_with)
    if is_last and once(options.hang_at):
        options.once.touch()
        time.sleep(3600)
    wait_for_others()
    time.sleep(options.sleep)
    step += 1
    beat.write_text(str(step))
    stop = bool(asked)
    if stop or step % options.save_every == 0 or step == options.steps:
        save()
    if stop:
        break
