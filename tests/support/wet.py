"""Files of Common Crawl: WARC records, each a member of gzip by itself."""

from __future__ import annotations

import gzip
from collections.abc import Sequence

INFO = b"Software-Info: ia-web-commons\r\nExtracted-Date: Thu, 04 Apr 2024 12:00:00 GMT\r\n"


def record(kind: str, block: bytes, **more: str) -> bytes:
    """A record as Common Crawl writes it. more: further values of its header."""
    values = {
        "WARC-Type": kind,
        "WARC-Date": "2024-04-04T12:00:00Z",
        "Content-Type": "text/plain",
        "Content-Length": str(len(block)),
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in values.items())
    return b"WARC/1.0\r\n" + lines.encode() + b"\r\n" + block + b"\r\n\r\n"


def records(texts: Sequence[str | bytes]) -> list[bytes]:
    """The records of a WET file with these texts."""
    blocks = [text if isinstance(text, bytes) else text.encode() for text in texts]
    pages = [
        record("conversion", block, WARC_Target_URI=f"https://example.org/{number}")
        for number, block in enumerate(blocks)
    ]
    return [record("warcinfo", INFO), *pages]


def packed(parts: Sequence[bytes]) -> bytes:
    return b"".join(gzip.compress(part) for part in parts)


def wet_gz(texts: Sequence[str | bytes]) -> bytes:
    """A file NAME.warc.wet.gz."""
    return packed(records(texts))
