"""Event files for TensorBoard, written with its own writer, which needs neither torch nor TensorFlow."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from forge.core.files import disk_trouble, fsync_folder
from forge.plugins.tracking.places import tensorboard_folder
from forge.plugins.tracking.records import Sent
from forge.plugins.tracking.rows import StepRow
from forge.plugins.tracking.tracker import TrackedRun


class TensorBoard:
    """Each process that sends writes one file. It begins with a mark that voids what an earlier file has
    from the first step to be sent on, so that readers see no row twice."""

    def open(self, run: TrackedRun, sent: Sent) -> Sent:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._folder = tensorboard_folder(run.paths)
        # The writer's thread would print a traceback, and fail without a reason.
        with disk_trouble(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        if not any(self._folder.glob("events.out.tfevents.*")):
            sent = sent.model_copy(update={"step": -1})  # somebody has removed the files
        # Long: a full queue would block, and each `log` flushes.
        self._writer = EventFileWriter(str(self._folder), max_queue_size=10_000, flush_secs=3600)
        start = SessionLog(status=SessionLog.START)  # as torch's SummaryWriter(purge_step=...)
        self._add(step=sent.step + 1, wall_time=time.time(), session_log=start)
        if sent.step < 0:
            text = f"```\n{json.dumps(run.config, indent=2)}\n```"
            self._add(step=0, wall_time=time.time(), summary=text_pb("config", text))
        return sent

    def log(self, rows: Sequence[StepRow]) -> None:
        """Returns when the rows are on disk."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()
            ]
            self._add(step=row.step, wall_time=row.time, summary=Summary(value=values))
        self._writer.flush()
        fsync_file(self._writer._file_name)

    def finish(self, state: str) -> None:
        self._writer.close()
        fsync_folder(self._folder)

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._event(**fields))


def fsync_file(path: str) -> None:
    """Make a file of another writer survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
