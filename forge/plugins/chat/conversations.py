"""Conversations of JSONL, `{"messages": [{"role": …, "content": …}, …]}` in each line: their text, and
its ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import orjson
from numpy.typing import NDArray

from forge.core.errors import ConfigError, DataError
from forge.data import decoding
from forge.data.decoding import check_length, offset_from
from forge.data.encoders import Ids
from forge.data.input_bytes import TextInput
from forge.data.tokenizer import LoadedTokenizer
from forge.plugins.chat.template import ANSWERS, END, ROLES, START, Message, parse, render

# Ids of a rendered conversation, and which of them are learned. Raises DataError.
EncodeConversation = Callable[[str], tuple[Ids, NDArray[np.bool_]]]
FORM = 'each line must look like {"messages": [{"role": "user", "content": "…"}, …]}'


# --- text -------------------------------------------------------------------------------------------


def documents(file: TextInput) -> Iterator[str]:
    """The conversations, rendered. DataError for a line that is none, and for a file without answers."""
    start = number = answers = 0
    with file.open() as stream:
        while line := stream.readline(decoding.MAX_DOCUMENT_BYTES + 1):
            number += 1
            where = f"{file.location}, line {number}"
            check_length(len(line), where, "write one conversation per line")
            text, _ = file.utf8.decode(line, offset_from(start))
            start += len(line)
            if text.strip("\ufeff \t\r\n"):
                messages = _messages(text.removeprefix("\ufeff"), where)
                answers += sum(role == ANSWERS and bool(content) for role, content in messages)
                yield render(messages)
    if number and not answers:
        raise DataError(
            f"{file.location} has no message of the role {ANSWERS}: no token of it would be learned",
            cause="questions without answers, or another file than was meant",
            fix="correct tokenize.inputs, or the file",
        )


def _messages(line: str, where: str) -> list[Message]:
    try:
        record = orjson.loads(line)
    except ValueError as err:
        raise DataError(
            f"{where} is not JSON: {err}: {line.strip()[:60]!r}",
            cause="truncated, or indented JSON; each line must be one complete object",
            fix="correct the line",
        ) from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        keys = f"an object with {', '.join(record)}" if isinstance(record, dict) else "no object"
        raise DataError(f"{where} has no list of messages: it is {keys[:200]}", fix=FORM)
    return [_message(one, f"{where}, message {n}") for n, one in enumerate(messages, 1)]


def _message(message: object, where: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or role not in ROLES or not isinstance(content, str):
        raise DataError(
            f"{where} is {json.dumps(message, ensure_ascii=False)[:80]}",
            cause="another form of conversations, calls of tools, or parts that are not text",
            fix=f"{FORM}; role is one of {', '.join(ROLES)}, content a string",
        )
    # What says nothing is let through, as tool_calls: null. Not "weight": 0, nor "train": false.
    unread = (key for key, value in message.items() if value not in (None, "", [], {}))
    if more := [key for key in unread if key not in Message._fields]:
        raise DataError(
            f"{where} has the keys {', '.join(more)}, which would not be read",
            fix="remove them, or put into content what shall be read",
        )
    if mark := next((mark for mark in (START, END) if mark in content), None):
        raise DataError(
            f"{where} has {mark} in its content, which would end a message there",
            fix="remove it from the content, or leave this conversation out",
        )
    return Message(str(role), content)


# --- ids --------------------------------------------------------------------------------------------


def encoder(tokenizer: LoadedTokenizer) -> EncodeConversation:
    """Encoder of rendered conversations, whose ids are those of transformers for the export. Learned are
    the tokens of answers and END after them; a token that also has a part of the header is not.

    ConfigError for a tokenizer without START and END, or where one of them ends a document.
    """
    start, end = (_special_id(tokenizer, mark) for mark in (START, END))
    after = tokenizer.encode("\n")

    def encode(document: str) -> tuple[Ids, NDArray[np.bool_]]:
        messages = parse(document)
        if messages is None:
            raise DataError(f"it is no conversation: {document[:40]!r}", fix=FORM)
        ids: list[int] = []
        learned: list[bool] = []
        for role, content in messages:
            header = f"{role}\n"
            encoding = tokenizer.encoding(header + content)
            if tokenizer.eos_id in encoding.ids:
                raise DataError(
                    f"{content[:40]!r} has the id that ends a document",
                    cause="the tokenizer has no other id for a part of it",
                    fix="remove that part, or choose another tokenizer",
                )
            of_answer = [role == ANSWERS and at >= len(header) for at, _ in encoding.offsets]
            ids += [start, *encoding.ids, end, *after]
            learned += [False, *of_answer, role == ANSWERS, *[False] * len(after)]
        return np.array(ids, np.uint32), np.array(learned)

    _check(tokenizer, encode)
    return encode


def _special_id(tokenizer: LoadedTokenizer, mark: str) -> int:
    found = tokenizer.tokenizer.token_to_id(mark)
    if found is None or found == tokenizer.eos_id:
        what = "does not have" if found is None else "ends documents with"
        raise ConfigError(
            f"the format chat needs a tokenizer with {START} and {END}, and another token that ends a"
            f" document: tokenizer {tokenizer.id} {what} {mark}",
            fix="train a tokenizer (tokenizer.source: train gives it these tokens), choose one that has"
            " them, or set tokenizer.eos_token to another of its special tokens",
        )
    return int(found)


def _check(tokenizer: LoadedTokenizer, encode: EncodeConversation) -> None:
    """ConfigError where the tokenizer gives other ids for a text that has START and END as tokens, as one
    that takes the white space beside them away."""
    import tokenizers

    text = render([Message("user", " Hi\n there "), Message(ANSWERS, " 1\n\n ")])
    whole = tokenizers.Tokenizer.from_str(tokenizer.tokenizer.to_str())
    whole.no_truncation()
    expected = whole.encode(text, add_special_tokens=False).ids
    if encode(text)[0].tolist() != expected:
        raise ConfigError(
            f"tokenizer {tokenizer.id} gives other ids for a conversation than for its messages",
            cause=f"it changes the white space beside {START} or {END}",
            fix="choose another tokenizer",
        )
