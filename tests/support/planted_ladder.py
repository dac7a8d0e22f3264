"""A ladder whose rungs have results on a planted curve: the files of runs that have ended, without their
training."""

from __future__ import annotations

from contextlib import chdir

from support.clone import Project
from support.manifests import lineage_of, save

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import ParentCheckpoint
from forge.core.config import Config
from forge.core.paths import RunPaths, checkpoint_name
from forge.core.records import Trained, Validated
from forge.data.content_ids import resolve
from forge.reporting.trusted import project_runs

ROWS = (
    *("--depths", "1,2,3,4", "--seeds", "1,2", "--budgets", "0.1,0.2,0.4"),
    *("--forecast", "5", "--at", "0.07,0.08", "--width-per-depth", "8", "--head", "8"),
)
NOISE = 0.002  # relative, of a seed: the sign of a trunk


def planted_bpb(parameters: int, tokens: int) -> float:
    """The curve that rungs are on but for their noise."""
    return 8 / parameters**0.3 + 30 / tokens**0.35 + 0.9


def size_of(config: Config) -> tuple[int, int]:
    """Parameters of the blocks, and tokens at the end."""
    train, model = config.train, config.model
    return model.layers * model.block_parameters, train.max_steps * train.batch_size * train.seq_len


def plant(project: Project, *, but: tuple[str, ...] = ()) -> list[str]:
    """Write what trunks and rungs leave behind, but of these runs and of the forecast row. Returns the
    names of all rungs."""
    with chdir(project.root):
        configs, _ = project_runs()
        ladder = {name: c for name, c in configs.items() if "-s" in name}
        for name, config in ladder.items():
            if name not in but:
                _plant(config)
        return [name for name, config in ladder.items() if config.parent]


def _plant(config: Config) -> None:
    resolved, paths = resolve(config), RunPaths.of(config)
    resolved.write(paths.config)
    step, parent = config.train.max_steps, None
    if config.parent:
        trunk, _, at = config.parent.partition("@")
        folder = paths.root.parent / trunk / "checkpoints" / checkpoint_name(int(at))
        digest = Checkpoint.open(folder).manifest.digest if folder.exists() else "d" * 64
        parent = ParentCheckpoint(run=trunk, step=int(at), digest=digest)
        paths.parent_trained.touch()
    lineage = lineage_of(resolved, parent=parent)
    made = save(paths, step, config=resolved, lineage=lineage, content=config.run.encode())
    Trained(
        run=config.run,
        goal_step=step,
        step=step,
        checkpoint=f"checkpoints/{made.folder.name}",
        weights_digest="a" * 64,
        config_digest="c" * 64,
    ).write(paths.trained)
    sign = 1 if "-s1" in config.run else -1
    bpb = planted_bpb(*size_of(config)) * (1 + NOISE * sign)
    validated = {"step": step, "checkpoint_digest": made.digest, "loss": 3.0, "bpb": bpb}
    Validated(**validated).write(paths.validated)
