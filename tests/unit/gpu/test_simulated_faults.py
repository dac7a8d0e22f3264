"""The simulated GPU finds faults: what it does not report is not there."""

import pytest

pytestmark = pytest.mark.all

STEP = [
    ("unpinned_batches", {}, "waits", "trainer/parallel.py"),
    ("unpinned_flags", {}, "waits", "trainer/step.py"),
    ("unpinned_positions", {"document_mask": True}, "waits", "trainer/documents.py"),
    ("loss_is_read", {}, "waits", "trainer/step.py"),
    ("device_is_synchronized", {}, "waits", "trainer/step.py"),
    ("results_without_event", {}, "races", "trainer/step.py"),
    ("rotary_on_the_cpu", {}, "wrong_devices", "trainer/models/llama_decoder.py"),
]
SAVE = [
    ("updates_not_held", "races", "optim"),
    ("writer_does_not_wait", "races", "the writer thread"),
    ("copy_does_not_wait", "races", "checkpoint/storage.py"),
    ("scalars_one_by_one", "waits", "of shape () into memory that is not pinned"),
    ("unpinned_copy", "waits", "(64, 128) into memory that is not pinned (checkpoint/storage.py"),
]


@pytest.mark.parametrize(("fault", "train", "kind", "where"), STEP, ids=[row[0] for row in STEP])
def test_fault_of_a_step_is_found_with_its_line(simulate, fault, train, kind, where):
    found = getattr(simulate(train={"shard": "all", **train}, fault=fault), kind)
    assert found
    assert any(where in text for text in found), found


@pytest.mark.parametrize(("fault", "kind", "where"), SAVE, ids=[row[0] for row in SAVE])
def test_fault_of_a_save_is_found(simulate, fault, kind, where):
    found = getattr(simulate(train={"shard": "all"}, saves=True, fault=fault), kind)
    assert found
    assert any(where in text for text in found), found
