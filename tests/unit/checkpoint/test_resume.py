"""A node whose view of a network file system is some seconds old must not train from something else."""

import threading
from types import SimpleNamespace

import pytest
from support.manifests import manifest_of

from forge.checkpoint import directory, resume
from forge.core.errors import UnfitError
from forge.core.paths import RunPaths

STEP = "step-00000010"


def put_checkpoint(folder, **facts):
    folder.mkdir(parents=True, exist_ok=True)
    manifest_of(10, **facts).write(folder)


class Seen:
    """The ranks as one of them, not rank 0, meets them: rank 0 chose STEP and read `manifest`."""

    rank = SimpleNamespace(is_main=False)

    def __init__(self, digest):
        self.digest = digest

    def together(self, action, _what):
        return action()

    patiently = together

    def gather_objects(self, value, _what):
        return [STEP if value == "" else self.digest, value]


def test_checkpoint_that_this_node_does_not_see_yet_is_waited_for(tmp_path):
    folder = tmp_path / STEP
    later = threading.Timer(0.2, put_checkpoint, [folder])
    later.start()
    assert resume._open(folder).step == 10
    later.join()


def test_checkpoint_that_a_node_never_sees_is_unfit_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "NETWORK_CACHE_SEC", 0.0)
    with pytest.raises(UnfitError, match=f"does not see .*{STEP}.*which rank 0 goes on from"):
        resume._open(tmp_path / STEP)


def test_a_node_that_sees_an_older_checkpoint_of_that_name_does_not_train_on(tmp_path):
    paths = RunPaths(tmp_path)
    put_checkpoint(paths.checkpoints / STEP)
    mine = directory.Checkpoint.open(paths.checkpoints / STEP).manifest.digest
    assert resume._chosen(paths, Seen(mine)).step == 10
    with pytest.raises(UnfitError, match="is not the same checkpoint on all nodes"):
        resume._chosen(paths, Seen("another digest"))
