"""Threat: a number of the harness under another name, or a NaN that ends hours of evaluation."""

import math

from forge.core.records import Score
from forge.plugins.evaluation.harness import scores_of


def results(**found):
    names = dict.fromkeys(found)
    return {
        "results": found,
        "higher_is_better": {"words": {"acc": True, "perplexity": False}},
        "n-shot": {"words": 2},
        "versions": {**names, "words": 1.5},
        "samples": {"words": [{"doc_hash": "a", "prompt_hash": "b", "target_hash": "c"}]},
    }


def test_each_metric_has_its_error_its_direction_and_the_digest_of_the_questions():
    words = {
        **{"alias": " - words", "name": "words", "sample_len": 4, "acc,none": 0.5},
        **{"acc_stderr,none": 0.25, "exact,strict": 1, "exact_stderr,strict": "N/A"},
    }
    acc, exact = scores_of(results(words=words))
    assert (acc.task, acc.metric, acc.value, acc.stderr) == ("words", "acc", 0.5, 0.25)
    assert (acc.higher_is_better, acc.num_documents, acc.num_fewshot) == (True, 4, 2)
    assert acc.version == "1.5" and acc.data_digest == exact.data_digest != ""
    assert (exact.metric, exact.value, exact.stderr) == ("exact,strict", 1.0, None)


def test_value_that_is_not_finite_is_none_and_can_be_written():
    (found,) = scores_of(results(words={"sample_len": 4, "perplexity,none": math.inf}))
    assert found.value is None
    assert Score.model_validate_json(found.model_dump_json()) == found


def test_a_group_has_scores_without_a_digest():
    (found,) = scores_of(results(many={"sample_len": 9, "acc,none": 0.5}))
    assert (found.task, found.num_documents, found.data_digest, found.version) == (
        "many",
        9,
        "",
        "",
    )
