"""What the lab bert-cpu downloads, small and of the same form: a vocabulary, and news with topics."""

import io
import random

import pyarrow
import pyarrow.parquet

WORDS = {
    0: "minister election treaty border parliament war peace vote embassy president",
    1: "match goal team season coach league striker final cup stadium",
    2: "shares profit market bank price oil merger stocks trade earnings",
    3: "software internet space chip satellite browser virus network laser probe",
}
COMMON = "the a of in said on to for new has after with"


def repositories(rows: int = 2000) -> dict[str, dict[str, bytes]]:
    """The two repositories that config/labs/bert-cpu names, for `support.hub.served`."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    words = " ".join([*WORDS.values(), COMMON]).split()
    vocabulary = "\n".join(dict.fromkeys([*special, *letters, *words])) + "\n"
    return {
        "google/bert_uncased_L-2_H-128_A-2": {"vocab.txt": vocabulary.encode()},
        "datasets/fancyzhx/ag_news": {"data/train-00000-of-00001.parquet": _news(rows)},
    }


def _news(rows: int) -> bytes:
    rng = random.Random(0)
    labels = [rng.randrange(4) for _ in range(rows)]
    texts = [" ".join(rng.choices(f"{WORDS[n]} {COMMON}".split(), k=30)) for n in labels]
    table = pyarrow.table({"text": texts, "label": labels})
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()
