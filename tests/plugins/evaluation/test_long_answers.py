"""An answer may be longer than the input of the model: the harness itself ends with an assertion."""

import json

import pytest
import torch

from forge.core.errors import DataError
from forge.plugins.evaluation import harness
from forge.plugins.evaluation.settings import Evaluate

pytestmark = pytest.mark.all

TASK = """\
task: long
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
generation_kwargs: {{max_gen_toks: 16}}
"""


@pytest.fixture
def score(tmp_path, monkeypatch):
    """score("multiple_choice"): the scores of a model with 16 tokens of input, for such a task."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<s>", "a", "b", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    exported = tmp_path / "exported"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<s>", unk_token="<unk>", model_max_length=16
    ).save_pretrained(exported)
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=4, max_position_embeddings=16, **small, **heads)
    LlamaForCausalLM(config).save_pretrained(exported)
    data = tmp_path / "long.jsonl"
    row = {"text": "a b a", "choices": ["b " * 40 + "a", "a", "b"], "answer": 1}
    data.write_text(json.dumps(row) + "\n")

    def run(kind, precision="fp32", seq_len=16):
        from lm_eval.tasks import TaskManager

        (tmp_path / "tasks").mkdir()
        (tmp_path / "tasks/long.yaml").write_text(TASK.format(data=data, kind=kind))
        index = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
        evaluate = Evaluate(tasks=["long"], include_path=str(tmp_path / "tasks"))
        return harness.score(exported, evaluate, index, precision, seq_len)

    return run


def test_answer_that_is_longer_than_the_input_is_cut_on_the_left_with_a_warning(score, capsys):
    found, _, _ = score("multiple_choice")
    assert {one.task for one in found} == {"long"} and found[0].value is not None
    assert "warning: 1 of 3 answers are longer than the 16 tokens" in capsys.readouterr().err


def test_task_that_the_model_is_too_small_for_is_no_bug(score):
    with pytest.raises(
        DataError, match="the evaluation harness refuses long: Invalid config"
    ) as caught:
        score("generate_until")
    assert "larger train.seq_len" in caught.value.fix


def test_model_reads_as_many_tokens_as_it_was_trained_on_whatever_its_export_has(score, capsys):
    score("multiple_choice", seq_len=8)
    assert "warning: 1 of 3 answers are longer than the 8 tokens" in capsys.readouterr().err


def test_sums_of_log_probabilities_of_bf16_are_not_rounded_to_bf16(score):
    _, samples, _ = score("multiple_choice", "bf16")
    [[long, *_]] = [sample["filtered_resps"] for sample in samples["long"]]
    assert torch.tensor(long[0]).bfloat16().item() != long[0]
