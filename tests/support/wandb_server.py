"""A server that W&B's own client takes for W&B: it keeps the history of runs, and tells what it has."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY = "wandb-history.jsonl"


class Server(ThreadingHTTPServer):
    """runs: id -> rows of its history, in the order in which they came. upserted: variables of each
    mutation that makes or changes a run."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.upserted: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "RunResumeStatus":
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "e"}}
            return {"model": {**project, "bucket": self._bucket(variables["name"])}}
        if operation == "UpsertBucket":
            self.upserted.append(variables)
            self.runs.setdefault(variables["name"], [])
            return {"upsertBucket": {"bucket": self._bucket(variables["name"]), "inserted": False}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
        return {}

    def _bucket(self, run: str) -> dict[str, Any] | None:
        if run not in self.runs:
            return None
        rows = self.runs[run]
        tail = json.dumps([json.dumps(row) for row in rows[-1:]])
        project = {"id": "p", "name": "tests", "entity": {"id": "e", "name": "e"}}
        return {
            **{"id": run, "name": run, "displayName": run, "config": "{}", "tags": []},
            **{"summaryMetrics": json.dumps(rows[-1] if rows else {}), "project": project},
            **{"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]"},
            **{"historyLineCount": len(rows), "historyTail": tail},
            "wandbConfig": '{"t": 1}',
        }

    def take(self, run: str, lines: list[str]) -> None:
        self.runs.setdefault(run, []).extend(json.loads(line) for line in lines)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        data: dict[str, Any] = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            data = self.server.answer(asked["operationName"], asked.get("variables") or {})
        elif self.path.endswith("/file_stream"):
            files = json.loads(body).get("files") or {}
            self.server.take(self.path.split("/")[-2], files.get(HISTORY, {}).get("content", []))
        text = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing: it would be said among the output of the tests."""


@contextmanager
def wandb_server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
