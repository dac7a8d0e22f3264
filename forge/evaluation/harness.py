"""The lm-evaluation-harness on one exported checkpoint: its scores, each as a `Score`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge.core.evaluation import Evaluate
from forge.core.files import digest_bytes
from forge.core.records import Score
from forge.trainer import numerics

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

# What the harness puts beside the metrics of a task.
NO_METRICS = ("alias", "name", "sample_len", "sample_count")


def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def score(
    exported: Path, evaluate: Evaluate, index: TaskManager, precision: str
) -> tuple[list[Score], str]:
    """Scores of an exported checkpoint, by task and metric, and the device that computed them.

    precision: `fp32`, or `bf16` for autocast over weights in fp32, as in training. An input that is
    longer than train.seq_len loses its beginning.
    """
    from lm_eval import simple_evaluate

    where = device()
    autocast = {"mixed_precision_dtype": "bfloat16"} if precision == "bf16" else {}
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported), "dtype": "float32", **autocast},
        tasks=list(evaluate.tasks),
        num_fewshot=evaluate.num_fewshot,
        limit=evaluate.limit,
        batch_size=evaluate.batch_size,
        device=where.type,
        task_manager=index,
    )
    return scores_of(results), numerics.device_name(where)


def scores_of(results: Any) -> list[Score]:
    """The scores in what `simple_evaluate` returns; those of groups have no digest of data."""
    return [
        _score(results, task, key, value)
        for task, found in sorted(results["results"].items())
        for key, value in sorted(found.items())
        if key not in NO_METRICS and "_stderr," not in key and isinstance(value, int | float)
    ]


def _score(results: Any, task: str, key: str, value: float) -> Score:
    metric, _, chosen = key.partition(",")
    found = results["results"][task]
    return Score(
        task=task,
        metric=metric if chosen in ("", "none") else key,
        value=_finite(value),
        stderr=_finite(found.get(f"{metric}_stderr,{chosen}")),
        higher_is_better=results["higher_is_better"].get(task, {}).get(metric),
        num_documents=found["sample_len"],
        num_fewshot=results["n-shot"].get(task),
        version=str(results["versions"].get(task) or ""),
        data_digest=_data_digest(results["samples"].get(task, [])),
    )


def _finite(value: Any) -> float | None:
    """None for NaN, infinity and the harness' `N/A`."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None


def _data_digest(samples: list[dict[str, Any]]) -> str:
    """blake3 of the harness' hashes of each document, prompt and target; empty without samples."""
    hashes = [s[f"{part}_hash"] for s in samples for part in ("doc", "prompt", "target")]
    return digest_bytes("".join(hashes).encode()) if hashes else ""
