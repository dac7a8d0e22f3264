"""A server on the loopback interface that speaks the Hugging Face hub's protocol for files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = re.compile(r"/(?P<repo>(?:datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
LIST = re.compile(
    r"/api/(?:models/)?(?P<repo>(?:datasets/)?[^/]+/[^/]+)/tree/(?P<revision>[^/?]+)(?:\?.*)?"
)


@dataclass
class Hub:
    """What the server has, by `owner/name` or `datasets/owner/name`, and what it was asked for."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def served(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A hub with these repositories, for HF_ENDPOINT."""
    hub = Hub(repos)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, body: bool) -> None:
            hub.asked.append(self.path)
            found = FILE.fullmatch(self.path) or LIST.fullmatch(self.path)
            files = hub.repos.get(found["repo"], {}) if found else {}
            if not found or not files:
                self._error(401, "RepoNotFound")  # the hub does not tell who has what
            elif found["revision"] not in ("main", COMMIT):
                self._error(404, "RevisionNotFound")
            elif found.re is LIST:
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                    for name, data in files.items()
                ]
                self._send(json.dumps(tree).encode(), "application/json", body)
            elif found["file"] not in files:
                self._error(404, "EntryNotFound")
            else:
                self._send(files[found["file"]], "application/octet-stream", body)

        def _send(self, data: bytes, kind: str, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{_oid(data)}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def _error(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Tests look at `asked` instead."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
