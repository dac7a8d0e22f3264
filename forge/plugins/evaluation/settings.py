"""Section `evaluate`: tasks for checkpoints of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from forge.core.section import FilePath, Section, later


class Evaluate(Section):
    """Tasks of the lm-evaluation-harness for a run's checkpoints. Needs `make setup EXTRAS=evaluate`."""

    BOUND = ()
    IS_OF_TRAINER = True

    tasks: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default=[], max_length=256
    )
    """Names of tasks, groups or tags (`lm-eval ls tasks` lists them), such as hellaswag; []: none."""
    include_path: FilePath | None = None
    """Directory of your own tasks, YAML files as the harness reads them; they go before its own."""
    num_fewshot: int | None = Field(None, ge=0)
    """Examples before each question; null: as each task has it."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many documents of each task, for tests; null: all."""
    batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = 8
    """Requests in a forward pass; `auto`: the most that fit, which the harness tries out."""
    every: int | None = Field(None, ge=1)
    """Also score every checkpoint whose step is a multiple of this, under Slurm as jobs during training.
    Itself a multiple of train.keep_every; null: the last checkpoint only."""
    contamination: float | None = later(None, gt=0, le=1)
    """Look for questions and answers of the tasks in the training text, and give the scores without those
    that it holds: at least this share of their sequences of 13 words, such as 0.8. null: no search."""

    @field_validator("tasks")
    @classmethod
    def _each_once(cls, tasks: list[str]) -> list[str]:
        if twice := sorted({task for task in tasks if tasks.count(task) > 1}):
            raise ValueError(f"{', '.join(twice)} is named more than once")
        return tasks

    @field_validator("batch_size", mode="before")
    @classmethod
    def _is_batch_size(cls, value: Any) -> Any:
        if value != "auto" and not (str(value).isdecimal() and int(value) >= 1):
            raise ValueError("must be auto, or a number of requests, 1 or more")
        return value
