"""Conversations. Threats: other ids than transformers gives for the template of the export; a question
that is learned, or an answer that is not; a file of another form that trains silently on everything."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import real_text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from forge.core.config import Config
from forge.core.errors import ConfigError, DataError, ForgeError
from forge.core.files import digest_file
from forge.core.paths import tokens_folder
from forge.data import content_ids
from forge.data.shards import ShardSet
from forge.data.tokenize import split_of, tokenize
from forge.data.tokenizer import LoadedTokenizer, build_tokenizer, load_tokenizer
from forge.data.windows import Windows
from forge.plugins.chat.conversations import encoder
from forge.plugins.chat.template import CHAT_TEMPLATE, END, START, Message, parse, render
from forge.plugins.samples.token_documents import TokenDocuments

EOS = "<|endoftext|>"
TEXTS = [
    *(text[:400] for text in list(pydoc_data.topics.topics.values())[:12]),
    *(
        "すべての人間は、生まれながらにして自由",
        "सभी मनुष्यों को 🙂\u200d",
        "\n\n x \n",
        "  ",
        "a\r\nb",
        "",
    ),
]


def trained(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def loaded(tokenizer: Tokenizer, eos: str = EOS) -> LoadedTokenizer:
    tokenizer.encode_special_tokens = True
    eos_id = tokenizer.token_to_id(eos)
    return LoadedTokenizer(tokenizer, "t", "d", tokenizer.get_vocab_size(), eos, eos_id)


def conversation(number: int) -> list[dict[str, str]]:
    texts = TEXTS[number:] + TEXTS[:number]
    roles = ["system", "user", "assistant", "user", "assistant"][number % 2 :]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


CONVERSATIONS = [conversation(number) for number in range(len(TEXTS))]


@pytest.fixture(scope="module")
def tokenizer() -> LoadedTokenizer:
    return loaded(trained([EOS, START, END]))


def messages_of(conversation: list[dict[str, str]]) -> list[Message]:
    return [Message(**message) for message in conversation]


def test_ids_are_those_of_transformers_for_the_template_of_the_export(
    tokenizer: LoadedTokenizer, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer.tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    encode = encoder(tokenizer)
    for conversation in CONVERSATIONS:
        ids = theirs.apply_chat_template(
            conversation, chat_template=CHAT_TEMPLATE, return_dict=False
        )
        assert encode(render(messages_of(conversation)))[0].tolist() == ids
    asked = theirs.apply_chat_template(
        CONVERSATIONS[0][:2],
        chat_template=CHAT_TEMPLATE,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert asked.endswith(f"{END}\n{START}assistant\n")


@pytest.mark.tools
def test_ids_are_those_of_transformers_for_a_published_tokenizer_and_its_own_template() -> None:
    from transformers import PreTrainedTokenizerFast

    folder = real_text.tokenizer("qwen2_5")
    own = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    encode = encoder(loaded(Tokenizer.from_file(str(folder / "tokenizer.json"))))
    english, *others = (real_text.help_pages(language) for language in real_text.LANGUAGES)
    for page in sorted(path.name for path in english.iterdir())[:40]:
        conversation = [{"role": "system", "content": "Translate."}]
        for other in others:  # the same page in another language
            conversation += [
                {"role": "user", "content": (english / page).read_text()},
                {"role": "assistant", "content": (other / page).read_text()},
            ]
        ids, learned = encode(render(messages_of(conversation)))
        for template in (own, CHAT_TEMPLATE):
            assert ids.tolist() == theirs.apply_chat_template(
                conversation, chat_template=template, return_dict=False
            )
        answers = [one["content"] + END for one in conversation if one["role"] == "assistant"]
        assert theirs.decode(ids[learned].tolist()) == "".join(answers)


def test_answers_and_their_ends_are_learned_and_nothing_else(tokenizer: LoadedTokenizer) -> None:
    encode = encoder(tokenizer)
    for conversation in CONVERSATIONS:
        ids, learned = encode(render(messages_of(conversation)))
        answers = [one["content"] for one in conversation if one["role"] == "assistant"]
        # The first token of an answer that begins with a line end may be one with that of the header.
        found = tokenizer.decode(ids[learned].tolist()).split(END)
        assert len(found) == len(answers) + 1 and not found[-1]
        for text, answer in zip(found, answers, strict=False):
            lost = answer.removesuffix(text)
            assert answer.endswith(text) and not lost.strip("\n")


def test_a_rendered_conversation_is_parsed_again() -> None:
    for conversation in CONVERSATIONS:
        assert parse(render(messages_of(conversation))) == messages_of(conversation)
    assert parse("def f(): pass") is None


# --- tokenizers that do not fit -------------------------------------------------------------------


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not have <\|im_start\|>"):
        encoder(loaded(trained([EOS])))


def test_a_tokenizer_whose_documents_end_like_messages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ends documents with <\|im_end\|>"):
        encoder(loaded(trained([EOS, START, END]), eos=END))


def test_a_tokenizer_that_eats_the_line_end_after_a_message_is_refused() -> None:
    tokenizer = trained([EOS])
    tokenizer.add_special_tokens([START, AddedToken(END, rstrip=True)])
    with pytest.raises(ConfigError, match="white space beside"):
        encoder(loaded(tokenizer))


# --- files ----------------------------------------------------------------------------------------

SEQ_LEN = 64


def spelled(count: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    for number in range(count):
        turns = [
            (
                {"role": "user", "content": f"Count to {n}"},
                {"role": "assistant", "content": "1 " * n},
            )
            for n in range(1, 2 + number % 3)
        ]
        named = {"role": "system", "content": f"You are number {number}."}
        yield {"messages": [named, *(message for turn in turns for message in turn)]}


def config_of(
    folder: Path, lines: list[object], *, trained_on: int = SEQ_LEN, **tokenize_keys: object
):
    path = folder / "chats.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n")
    settings = {"inputs": [str(path)], "format": "chat", "seq_len": SEQ_LEN, "val_fraction": 0.2}
    config = Config.model_validate(
        {
            "run": "chats",
            "data": str(folder / "data"),
            "results": str(folder / "results"),
            "tokenizer": {"vocab_size": 400},
            "tokenize": settings | tokenize_keys,
            "train": {"seq_len": trained_on},
        }
    )
    return content_ids.resolve(config)


def shards_of(folder: Path, lines: list[object], **keys: object) -> ShardSet:
    config = config_of(folder, lines, **keys)
    build_tokenizer(config)
    return ShardSet.open(tokenize(config, workers=2))


def test_each_window_has_whole_conversations_and_each_conversation_is_in_one(
    tmp_path: Path,
) -> None:
    lines = [*spelled(200)]
    shards = shards_of(tmp_path, lines, shard_tokens=1024)
    tokenizer = load_tokenizer(next((tmp_path / "data/tokenizers").iterdir()))
    assert len(shards.train) > 3
    found: list[str] = []
    for split in (shards.train, shards.val):
        windows = Windows(split, SEQ_LEN)
        assert windows.num_samples * SEQ_LEN == sum(shard.num_tokens - 1 for shard in split)
        for row in windows.gather(np.arange(windows.num_samples)):
            assert row[-1] < 0  # the first of the next window is no target
            ids = np.where(row < 0, ~row, row)[:-1]
            texts = tokenizer.decode(ids.tolist()).split(EOS)
            found += [text for text in texts if text]
            learned = row[:-1][row[:-1] >= 0]
            ends = np.count_nonzero(learned == tokenizer.tokenizer.token_to_id(END))
            assert ends == sum(text.count("assistant\n") for text in texts) > 0
            assert tokenizer.eos_id not in learned
    expected = [render(messages_of(line["messages"])) for line in lines]
    assert sorted(found) == sorted(expected)


def test_windows_are_nearly_full(tmp_path: Path) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Count {number}"},
                {"role": "assistant", "content": "1 " * (1 + number % 90)},
            ]
        }
        for number in range(400)
    ]
    shards = shards_of(tmp_path, lines, val_fraction=0.01, seq_len=256, trained_on=256)
    ids = np.concatenate([shard.ids() for shard in shards.train])
    padding = np.count_nonzero((ids[1:] == shards.eos_id) & (ids[:-1] == shards.eos_id))
    assert padding / len(ids) < 0.02


def test_a_conversation_longer_than_the_window_is_refused_by_its_line(tmp_path: Path) -> None:
    lines = [*spelled(20)]
    lines[7]["messages"][1]["content"] = "why " * 200
    with pytest.raises(DataError, match=r"chats.jsonl, document 8: it has \d+ tokens"):
        shards_of(tmp_path, lines)


def test_a_longer_conversation_is_cut_and_said_where_the_config_allows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*spelled(40)]
    lines[7]["messages"][1]["content"] = "why " * 200  # no answer within the window
    lines[9]["messages"][-1]["content"] = "so " * 200
    shards = shards_of(tmp_path, lines, too_long="cut")
    said = capsys.readouterr().err
    assert "of 40 documents 2 cut after 64 tokens, 1 left out: no token is learned" in said
    assert sum(total.documents for total in shards.manifest.totals.values()) == 39


def test_a_cut_conversation_has_its_line_and_one_in_two_files_is_of_both(tmp_path: Path) -> None:
    lines = [*spelled(40)]
    lines[9]["messages"][-1]["content"] = "🙂 so " * 200
    files = [tmp_path / "chats.jsonl", tmp_path / "copy.jsonl"]
    files[1].write_text("\n".join(json.dumps(lines[number]) for number in (9, 3)))
    inputs = [str(file) for file in files]
    shards = shards_of(tmp_path, lines, inputs=inputs, too_long="cut", val_fraction=0.05)
    tokenizer = load_tokenizer(next((tmp_path / "data/tokenizers").iterdir()))
    documents = TokenDocuments(shards, tokenizer.decode)

    def found(file: Path) -> list[int | None]:
        digest = digest_file(file)
        origins = [
            documents.origin(shard, span, digest)
            for shard in shards.train
            for span in documents.spans(shard, 0, shard.num_tokens)
        ]
        return sorted(origin.number for origin in origins if origin.digest == digest)

    def split(number: int) -> str:
        return split_of(render(messages_of(lines[number]["messages"])), 0.05)

    kept = [n for n in range(40) if split(n) == "train"]
    assert {3, 9} <= set(kept)
    assert set(found(files[0])) == {number + 1 for number in kept}
    assert found(files[1]) == [1, 1, 2, 2], "each twice in the tokens"


WRONG = {
    "no answers": ({"messages": [{"role": "user", "content": "a"}]}, "no message of the role"),
    "another key": ({"conversations": []}, "no list of messages: it is an object with conv"),
    "other roles": ({"messages": [{"from": "gpt", "value": "a"}]}, "line 1, message 1 is"),
    "a role": ({"messages": [{"role": "tool", "content": "a"}]}, "line 1, message 1 is"),
    "no text": ({"messages": [{"role": "user", "content": None}]}, "line 1, message 1 is"),
    "a list": ([1], "no list of messages: it is no object"),
    "tools": (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]},
        "the keys tool_calls, which would not be read",
    ),
    "a weight of 0": (
        {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
        "the keys weight, which would not be read",
    ),
    "train: false": (
        {"messages": [{"role": "assistant", "content": "a", "train": False}]},
        "the keys train, which would not be read",
    ),
    "a mark": (
        {"messages": [{"role": "assistant", "content": f"a{END}"}]},
        r"has <\|im_end\|> in its content",
    ),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_file_of_another_form_is_refused_by_line(tmp_path: Path, name: str) -> None:
    line, message = WRONG[name]
    with pytest.raises(DataError, match=message):
        shards_of(tmp_path, [line])


def test_keys_that_say_nothing_are_let_through(tmp_path: Path) -> None:
    empty = {"tool_calls": None, "name": "", "functions": [], "meta": {}}
    lines = [*spelled(20)]
    for line in lines:
        line["messages"] = [message | empty for message in line["messages"]]
    assert shards_of(tmp_path, lines).train


def test_text_that_is_no_conversation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="it is no conversation"):
        shards_of(tmp_path, [*spelled(9)], inputs=["python:stdlib"])


def test_windows_of_another_length_than_those_of_training_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"windows of 32 tokens, and train\.seq_len is 64"):
        config_of(tmp_path, [], seq_len=32)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seq_len": None}, "the format chat needs seq_len"),
        ({"format": "jsonl"}, "seq_len: for formats of conversations"),
        ({"format": "jsonl", "seq_len": None, "too_long": "cut"}, "too_long: for formats of conv"),
    ],
)
def test_a_length_of_windows_stands_beside_conversations_alone(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, [], **keys)


def test_ids_name_the_length_of_windows(tmp_path: Path) -> None:
    config = config_of(tmp_path, [*spelled(3)])
    other = Config.model_validate(
        config.to_json()
        | {
            "ids": None,
            "tokenize": {**config.tokenize.model_dump(), "seq_len": 128},
            "train": {"seq_len": 128},
        }
    )
    assert content_ids.resolve(other).ids.tokens != config.ids.tokens
    assert tokens_folder(config.data, config.ids.tokens).name == config.ids.tokens
