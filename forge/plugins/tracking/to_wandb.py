"""Metrics, config and state of a run for Weights & Biases, online or as offline files."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from forge.core.errors import UnfitError
from forge.plugins.tracking.places import wandb_folder
from forge.plugins.tracking.records import Sent
from forge.plugins.tracking.rows import StepRow
from forge.plugins.tracking.settings import Wandb
from forge.plugins.tracking.tracker import TrackedRun

REACH_SEC = 5.0
NO_KEY = "there is no API key (WANDB_API_KEY, or `wandb login`)"


class WeightsAndBiases:
    """The run keeps its id, and W&B resumes it.

    Online, the server tells the last step it has, and everything after that is sent again. Offline, W&B
    keeps most of what it was given in memory until the end: the directory of a process that was killed
    is removed, and its rows are recorded again.
    """

    def __init__(
        self, settings: Wandb, tell: Callable[[str], None], *, must_send: bool = False
    ) -> None:
        """must_send: online, whatever the settings say (`forge sync`)."""
        self._settings = settings
        self._tell = tell
        self._must_send = must_send

    def open(self, run: TrackedRun, sent: Sent) -> Sent:
        import wandb

        if wandb.run:  # of a first try, which failed later
            wandb.run.finish()
        self._id, self._folder = sent.id, wandb_folder(run.paths)
        self._offline = self._is_offline()
        self._run = wandb.init(
            dir=str(run.paths.root),
            id=sent.id,
            resume="allow",
            mode="offline" if self._offline else "online",
            name=self._settings.name or run.name,
            config=run.config,
            allow_val_change=True,
            **self._settings.model_dump(include={"project", "entity", "group", "tags"}),
            # The process that sends is not what should be measured or recorded.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        if not self._offline:
            return sent.model_copy(update={"step": self._run.starting_step - 1, "folder": ""})
        step, folder = sent.step, Path(self._run.dir).parent.name
        if sent.folder in self._offline_folders() and sent.folder != folder:
            shutil.rmtree(self._folder / sent.folder, ignore_errors=True)
            step = sent.before
        return sent.model_copy(update={"step": step, "folder": folder, "before": step})

    def _is_offline(self) -> bool:
        """Raises ConnectionError where the server is wanted and is not to be reached, and UnfitError in
        `forge sync` where a person must do something first."""
        import wandb

        if self._settings.mode == "offline" and not self._must_send:
            return True
        base_url = str(wandb.setup().settings.base_url)
        if self._must_send and not _has_key(base_url):
            raise UnfitError(
                NO_KEY, fix="run `wandb login` once, then forge sync again; nothing was lost"
            )
        reason = _why_offline(base_url)
        if reason and (self._must_send or self._settings.mode == "online"):
            raise ConnectionError(reason)
        if reason:
            self._tell(f"tracking.wandb: {reason}; recording offline, `forge sync` sends it later")
        return bool(reason)

    def log(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._run.log({**row.values, "_timestamp": row.time}, step=row.step)

    def finish(self, state: str) -> None:
        """Online, returns when the server has everything."""
        self._run.summary["state"] = state
        self._run.finish(exit_code=1 if state.startswith("failed") else 0)
        if not self._offline:
            # The server has their rows now. `wandb sync` would send them a second time.
            for name in self._offline_folders():
                shutil.rmtree(self._folder / name, ignore_errors=True)

    def _offline_folders(self) -> list[str]:
        """Names of the directories that offline processes of this run have left in `wandb/`, and that
        nobody has sent. The record of what was sent may come from somebody else, and links may lead
        anywhere: only such a directory is ever removed."""
        if self._folder.is_symlink():
            return []
        folders = self._folder.glob(f"offline-run-*-{self._id}")
        return [
            folder.name
            for folder in folders
            if folder.is_dir() and not folder.is_symlink() and not _is_synced(folder)
        ]


def _is_synced(folder: Path) -> bool:
    """Return whether somebody has sent an offline directory with `wandb sync`."""
    return any(folder.glob("*.wandb.synced"))


def _why_offline(base_url: str) -> str:
    """Why the server is not to be, or cannot be, reached from here; "" where it can."""
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
        return f"WANDB_MODE is {os.environ['WANDB_MODE']}"
    if not _has_key(base_url):
        return NO_KEY
    server = urlsplit(base_url)
    port = server.port or (443 if server.scheme == "https" else 80)
    try:
        socket.create_connection((server.hostname or "", port), REACH_SEC).close()
    except OSError as err:
        return f"{server.hostname}:{port} cannot be reached ({err})"
    return ""


def _has_key(base_url: str) -> bool:
    from requests.utils import get_netrc_auth

    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(base_url))
