"""The lm-evaluation-harness on one exported checkpoint: its scores, each as a `Score`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge.core.errors import DataError
from forge.core.files import digest_bytes
from forge.core.records import Score
from forge.core.terminal import say
from forge.plugins.evaluation.settings import Evaluate
from forge.trainer import numerics

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

# What the harness puts beside the metrics of a task.
NO_METRICS = ("alias", "name", "sample_len", "sample_count")


def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def score(
    exported: Path, evaluate: Evaluate, index: TaskManager, precision: str, seq_len: int
) -> tuple[list[Score], dict[str, list[dict[str, Any]]], str]:
    """Scores of an exported checkpoint, by task and metric, the harness' samples by task, and the device
    that computed them.

    precision: `fp32`, or `bf16` for autocast over weights in fp32, as in training; log-probabilities are
    fp32, as the loss. seq_len: of training; the export may have more positions, which nothing has
    trained. What is longer loses its beginning, with a warning where that is a part of an answer.
    DataError where a task asks for what the model cannot do.
    """
    from lm_eval import simple_evaluate

    where = device()
    autocast = {"mixed_precision_dtype": "bfloat16"} if precision == "bf16" else {}
    # Logits of autocast are bf16, in which a sum of 100 nats is rounded to 0.5.
    autocast["softmax_dtype"] = "float32"
    model = _model(
        pretrained=str(exported),
        dtype="float32",
        max_length=seq_len,
        batch_size=evaluate.batch_size,
        device=where.type,
        **autocast,
    )
    try:
        results = simple_evaluate(
            model=model,
            tasks=list(evaluate.tasks),
            num_fewshot=evaluate.num_fewshot,
            limit=evaluate.limit,
            batch_size=evaluate.batch_size,
            device=where.type,
            task_manager=index,
        )
    except AssertionError as err:
        raise DataError(
            f"the evaluation harness refuses {', '.join(evaluate.tasks)}: {err or 'an assertion'}",
            cause=f"a task does not fit a model of {model.max_length} tokens, or has a mistake",
            fix="leave the task out of evaluate.tasks, or train with a larger train.seq_len",
        ) from err
    return scores_of(results), results["samples"], numerics.device_name(where)


def _model(**settings: Any) -> LM:
    """The harness' model. It cuts long contexts on the left, and has an assertion against answers that
    are longer than the model's input: they are cut in the same way."""
    from lm_eval.models.huggingface import HFLM

    class HarnessModel(HFLM):
        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            most = self.max_length
            if cut := sum(len(answer) > most for _, _, answer in requests):
                say(
                    f"warning: {cut} of {len(requests)} answers are longer than the {most} tokens of"
                    " the model: scored by their last ones"
                )
            cut_requests = [(key, context, answer[-most:]) for key, context, answer in requests]
            return super()._loglikelihood_tokens(cut_requests, *args, **kwargs)

    return HarnessModel(**settings)


def scores_of(results: Any) -> list[Score]:
    """The scores in what `simple_evaluate` returns; those of groups have no digest of data."""
    return [
        _score(results, task, key, value)
        for task, numbers in sorted(results["results"].items())
        for key, value in sorted(numbers.items())
        if key not in NO_METRICS and "_stderr," not in key and isinstance(value, int | float)
    ]


def _score(results: Any, task: str, key: str, value: float) -> Score:
    metric, _, chosen = key.partition(",")
    numbers = results["results"][task]
    return Score(
        task=task,
        metric=metric if chosen in ("", "none") else key,
        value=_finite(value),
        stderr=_finite(numbers.get(f"{metric}_stderr,{chosen}")),
        higher_is_better=results["higher_is_better"].get(task, {}).get(metric),
        num_documents=numbers["sample_len"],
        num_fewshot=results["n-shot"].get(task),
        version=str(results["versions"].get(task) or ""),
        data_digest=_data_digest(results["samples"].get(task, [])),
    )


def _finite(value: Any) -> float | None:
    """The number; None for NaN, infinity and the harness' `N/A`."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None


def _data_digest(samples: list[dict[str, Any]]) -> str:
    """blake3 of the harness' hashes of each document, prompt and target; empty without samples."""
    hashes = [s[f"{part}_hash"] for s in samples for part in ("doc", "prompt", "target")]
    return digest_bytes("".join(hashes).encode()) if hashes else ""
