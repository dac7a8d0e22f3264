"""Threat: text that is found and is not there, or is there and is not found."""

from __future__ import annotations

import random

import numpy as np
import pytest

from forge.plugins.evaluation.sequences import THRESHOLDS, Item, Sequences, words

WORDS, CHARACTERS = THRESHOLDS["words"], THRESHOLDS["characters"]
LETTERS = "abcdefgh"


def plain_windows(question: str, answer: str) -> tuple[set[str], set[str]]:
    """Windows of question and answer, and those of them that end in the answer, by text alone."""
    split, given = (question + " " + answer).split(), len(question.split())
    length = min(WORDS, len(split))
    starts = range(len(split) - length + 1)
    windows = [" ".join(split[i : i + length]) for i in starts]
    return set(windows), {w for i, w in zip(starts, windows, strict=True) if i + length > given}


def test_random_texts_give_the_sequences_that_a_search_of_the_text_gives():
    rng = random.Random(0)
    text = [rng.choice(LETTERS) for _ in range(3000)]
    items = []
    for _ in range(200):
        start, size = rng.randrange(2900), rng.randrange(1, 60)
        part = text[start : start + size]
        if rng.random() < 0.5:
            part[rng.randrange(size)] = "zzz"
        cut = rng.randrange(size + 1)
        items.append(Item(" ".join(part[:cut]), " ".join(part[cut:])))
    sequences = Sequences(items)
    documents = [" ".join(text[:1500]), " ".join(text[1500:])]
    found = set().union(*map(sequences.found, documents))
    for item, numbers in zip(items, sequences.items, strict=True):
        windows, in_answer = plain_windows(*item)
        if numbers is None:
            assert len((item.question + " " + item.answer).split()) < 5
            continue
        there = {w for w in windows if any(f" {w} " in f" {d} " for d in documents)}
        assert len({*numbers.whole} & found) == len(there)
        expected = there & in_answer if item.answer else there
        assert len({*numbers.answer} & found) == len(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("“Ｗhat’s up?” he asked", ["what", "s", "up", "he", "asked"]),
        ("ﬁne\u00a0day\n3.14", ["fine", "day", "3", "14"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
    ],
)
def test_words_are_without_case_punctuation_and_variants_of_characters(text, expected):
    assert words(text) == expected


def test_script_without_blanks_is_looked_for_by_characters():
    text = "これは試験の問題であり、訓練の文章の中に、そのまま置かれているかどうかを調べます。"
    sequences = Sequences([Item(text, "はい"), Item("はい", "です")])
    whole, short = sequences.items
    assert short is None and len(whole.whole) == len("".join(words(text)) + "はい") - CHARACTERS + 1
    assert {*whole.question} <= sequences.found("前の文。" + text.replace("、", " ") + "後の文")
    assert not sequences.found(text.replace("問題", "設問")) & {whole.question[0]}
    assert not sequences.found("An English document, " * 20)


def test_collision_of_the_rolling_hash_is_not_found():
    sequences = Sequences([Item("one two three four five", "six")])
    sequences._table[:] = True  # every window passes the first look
    assert not sequences.found("six five four three two one " * 50)
    assert sequences.found("zero one two three four five six seven") == {
        *range(len(sequences._numbers))
    } - {
        number
        for number in range(len(sequences._numbers))
        if number not in sequences.items[0].whole
    } | {*sequences.items[0].question}


def test_hash_of_a_window_depends_on_its_words_alone():
    sequences = Sequences([Item("a b c d e f g h i j k l m", "n")])
    for before in (0, 1, 7, 70_000):
        part = ["x"] * before + list("abcdefghijklm")
        *_, (length, hashes) = sequences._hashes(part, {WORDS})
        assert length == WORDS
        first = np.asarray(hashes)[-1]
        assert first == [*sequences._hashes(list("abcdefghijklm"), {WORDS})][-1][1][-1]
