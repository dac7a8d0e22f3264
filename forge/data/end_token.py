"""The token that ends a document, as the files beside a tokenizer.json name it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forge.core.errors import DataError
from forge.core.files import open_regular

TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
MODEL_CONFIG = "config.json"  # of the weights
# Read in this order. transformers takes special_tokens_map.json with a tokenizer_config.json of its
# earlier versions, and eos_token_id of config.json where it generates text.
FILES = (TOKENIZER_CONFIG, SPECIAL_TOKENS, MODEL_CONFIG)
TRAINED_EOS = "<|endoftext|>"
# Tried in this order where neither the config nor a file names the token.
COMMON_EOS = (TRAINED_EOS, "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>")
GUESS = "a guess"
MAX_BYTES = 2**28  # of a tokenizer's file; the largest known tokenizer has 2**25


class EndToken(NamedTuple):
    """A token, and the file that names it, or GUESS."""

    token: str
    named_by: str


def end_token(ids: Mapping[str, int], files: Mapping[str, bytes]) -> EndToken | None:
    """The end-of-text token by the files beside a tokenizer, else the first common one; None without any.

    ids: of all tokens. A token that only special_tokens_map.json or config.json names counts where the
    tokenizer has it; one of tokenizer_config.json always. DataError where that file is no JSON object.
    """
    if named := token_of_config(files.get(TOKENIZER_CONFIG)):
        return EndToken(named, TOKENIZER_CONFIG)
    named_by_others = _named_by_others(ids, files)
    guesses = (EndToken(token, GUESS) for token in COMMON_EOS if token in ids)
    return next(named_by_others, None) or next(guesses, None)


def token_not_guessed(tokenizer: Path, beside: Sequence[Path]) -> str | None:
    """The token that special_tokens_map.json or config.json names where earlier versions guessed another
    one; None where these guessed right. Raises DataError as `end_token`, OSError."""
    files = {file.name: content(file) for file in beside}
    if token_of_config(files.get(TOKENIZER_CONFIG)) or files.keys() <= {TOKENIZER_CONFIG}:
        return None
    ids = _ids(content(tokenizer))
    now, then = end_token(ids, files), end_token(ids, {})
    return now.token if now and now.token != (then and then.token) else None


def content(path: Path) -> bytes:
    """The bytes of a file of a tokenizer. Raises DataError for one that is none, OSError."""
    with open_regular(path, MAX_BYTES) as file:
        return file.read()


def token_of_config(tokenizer_config: bytes | None) -> str | None:
    """`eos_token` of a tokenizer_config.json: a string, or an object with `content`."""
    if tokenizer_config is None:
        return None
    try:
        return _content(json.loads(tokenizer_config).get("eos_token"))
    except (ValueError, AttributeError, RecursionError) as err:
        raise DataError(f"{TOKENIZER_CONFIG} is not a JSON object: {err}") from None


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def _named_by_others(ids: Mapping[str, int], files: Mapping[str, bytes]) -> Iterator[EndToken]:
    if (token := _content(_object(files.get(SPECIAL_TOKENS)).get("eos_token"))) in ids:
        yield EndToken(str(token), SPECIAL_TOKENS)
    numbers = _object(files.get(MODEL_CONFIG)).get("eos_token_id")
    tokens = {number: token for token, number in ids.items()}
    for number in numbers if isinstance(numbers, list) else [numbers]:
        if type(number) is int and number in tokens:
            yield EndToken(tokens[number], MODEL_CONFIG)


def _object(data: bytes | None) -> dict[str, Any]:
    """A JSON object; {} for anything else: a config.json beside a tokenizer may be of any program."""
    try:
        values = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _ids(tokenizer: bytes) -> dict[str, int]:
    """Token -> id of a tokenizer.json; {} where it is none."""
    parts = _object(tokenizer)
    try:
        vocab = parts["model"]["vocab"]
        pieces = [piece for piece, _ in vocab] if isinstance(vocab, list) else vocab
        ids = dict(vocab) if isinstance(vocab, dict) else {p: i for i, p in enumerate(pieces)}
        return ids | {token["content"]: token["id"] for token in parts.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError):
        return {}
