"""What `forge samples` prints, against a broken window that looks like a good one."""

from types import SimpleNamespace

from forge import cli
from forge.plugins.samples import command


def test_a_window_whose_loss_is_not_finite_comes_first_and_says_so(monkeypatch, capsys):
    row = {"rank": None, "source": "", "window": 7, "epoch": 0, "documents": []}
    samples = SimpleNamespace(
        of_step=lambda step: [{"row": number, **row} for number in range(3)],
        losses=lambda step: [0.0, 2.5, None],
    )
    monkeypatch.setattr(command, "_samples_of", lambda options: samples)
    assert cli.main(["samples", "base", "--step", "5", "--losses"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "row 2: window 7, epoch 0, loss not finite",
        "row 1: window 7, epoch 0, loss 2.5000",
        "row 0: window 7, epoch 0, loss 0.0000",
    ]
