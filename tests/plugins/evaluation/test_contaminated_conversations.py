"""Threat: an item that was trained on as a conversation counts as clean, since marks of the format are
between its question and its answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.core.files import digest_file
from forge.data.shards import InputEntry
from forge.plugins.evaluation.contamination import TextsOfSource, search
from forge.plugins.evaluation.sequences import Item

pytestmark = pytest.mark.all  # imports what contamination does

QUESTION = "why does the old lighthouse keeper climb every winter evening all ninety narrow steps"
ANSWER = "because the lamp needs oil"


@pytest.mark.parametrize(
    ("is_plain", "verdict"), [(True, "contaminated"), (False, "question only")]
)
def test_answer_in_the_next_message_belongs_to_its_question(
    is_plain: bool, verdict: str, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    entry = InputEntry(name=str(path), size=path.stat().st_size, digest=digest_file(path))
    settings = {"inputs": [str(path)], "format": "chat", "seq_len": 64, "val_fraction": 1e-9}
    texts = TextsOfSource(tokens="", settings=settings, files=[entry], is_plain=is_plain)
    [found] = search({"task": [Item(QUESTION, ANSWER)]}, 0.8, {"": texts}, {"": {}})["task"]
    assert found.verdict == verdict
