"""`forge validate` of a program's run: which of its tensors are read, and what is said of them."""

import subprocess
import sys
import time
import warnings
from contextlib import nullcontext

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.manifests import MADE_BY

from forge.checkpoint.sealed import ProgramCheckpoints
from forge.core.config import Config, checked
from forge.core.errors import DataError
from forge.core.files import write_json
from forge.core.paths import RunPaths
from forge.core.program_settings import Program
from forge.core.records import Trained, Validation
from forge.data.content_ids import resolve
from forge.run.programs import program_of
from forge.validation import program_checks
from forge.validation.validate import validate, validate_all

NAN = float("nan")


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path)


def config_of(tmp_path, **checkpoints):
    program = {"command": ["python"], "goal": 5, "checkpoints": checkpoints}
    values = {"results": str(tmp_path), "run": "p", "program": program}
    return resolve(checked(Config, values, "the test"))


@pytest.fixture
def folder(config):
    """Of the checkpoint that is validated."""
    path = RunPaths.of(config).checkpoints / "checkpoint-5"
    path.mkdir(parents=True)
    return path


def save(folder, weights):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # saving in a single process is meant
        dcp.save({"model": weights, "lr": 0.1}, checkpoint_id=folder, no_dist=True)


def messages(config, name="checkpoint-5"):
    """Message by name of each check, of a checkpoint that is sealed as it is now."""
    paths = RunPaths.of(config)
    checkpoints = ProgramCheckpoints(paths, config.program.checkpoints, world_size=1)
    checkpoints.seal(paths.checkpoints / name, 5, MADE_BY)
    validate(program_of(config))
    return {check.name: check.message for check in Validation.read(paths.validation).checks}


def test_tensors_of_dcp_are_counted_in_every_directory_that_has_an_index(config, folder):
    """As KempnerForge saves them with pipeline stages."""
    save(folder / "pp0", {"w": torch.ones(3), "b": torch.ones(3)})
    save(folder / "pp1", {"w": torch.ones(3), "ids": torch.arange(3)})
    (folder / "train_state.pt").write_bytes(b"a pickle that nobody reads")
    found = messages(config)
    assert set(found) == {"digests", "tensors"}
    assert found["tensors"] == "3 tensors in 2 files, all finite"


def test_nan_in_a_tensor_of_dcp_names_tensor_and_file(config, folder):
    save(folder, {"w": torch.tensor([1.0, NAN]), "b": torch.ones(3)})
    with pytest.raises(DataError, match=r"not finite: model\.w in __0_0\.distcp \(1 parts"):
        messages(config)


def test_corrupt_index_is_invalid(config, folder):
    save(folder, {"w": torch.ones(3)})
    (folder / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(DataError, match="is not the index of a checkpoint"):
        messages(config)


def test_index_of_a_newer_torch_is_a_warning(config, folder):
    save(folder, {"w": torch.ones(3)})
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data.replace(b"TensorProperties", b"NewProperties___"))
    assert messages(config)["tensors"].startswith("not checked: its index names torch.distributed")


def test_weights_in_safetensors_files_are_checked(config, folder):
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    assert messages(config)["weights"] == "1 tensors in 1 files, all finite"
    save_file({"w": torch.tensor([NAN])}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"w in model\.safetensors has values that are not finite"):
        messages(config)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_8_bits_are_checked(config, folder, dtype):
    small = torch.ones(3).to(dtype)
    save_file({"w": small}, folder / "model.safetensors")
    assert messages(config)["weights"] == "1 tensors in 1 files, all finite"
    small[1] = NAN
    save_file({"w": small}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"w in model\.safetensors has values that are not finite"):
        messages(config)


def test_checkpoint_that_is_one_safetensors_file_is_checked(tmp_path):
    config = config_of(tmp_path, pattern="model-{step}.safetensors")
    file = RunPaths.of(config).checkpoints / "model-5.safetensors"
    file.parent.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, file)
    assert messages(config, file.name)["weights"] == "1 tensors in 1 files, all finite"


def test_torch_is_not_imported_where_no_tensors_are(config, folder):
    (folder / "model.pt").write_bytes(b"a pickle that nobody reads")
    assert set(messages(config)) == {"digests"}
    write_json(RunPaths.of(config).config, config.to_json())
    code = (
        "import sys\nfrom forge import cli\n"
        "assert cli.main(['validate', sys.argv[1]]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(RunPaths.of(config).config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def three(config):
    """The paths of a run that has ended, with sealed checkpoints of steps 3 to 5, the first and last
    corrupt, and a newer one whose save was interrupted."""
    checkpoints = program_of(config).checkpoints
    for step in (3, 4, 5, 6):
        folder = checkpoints.paths.checkpoints / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.pt").write_bytes(b"weights")
        if step < 6:
            checkpoints.seal(folder, step, MADE_BY)
    for step in (3, 5):
        (checkpoints.paths.checkpoints / f"checkpoint-{step}/model.pt").write_bytes(b"Weights")
    done = {"goal_step": 5, "step": 5, "checkpoint": "checkpoints/checkpoint-5"}
    Trained(run="p", weights_digest="", config_digest="", **done).write(checkpoints.paths.trained)
    return checkpoints.paths


def test_table_has_every_sealed_checkpoint_and_nothing_is_changed(config, three, capsys):
    with pytest.raises(
        DataError, match=r"2 of 3 checkpoints of .* invalid: checkpoint-5, checkpoint-3"
    ):
        validate_all(program_of(config), fix=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        ("5", "invalid"),
        ("4", "valid"),
        ("3", "invalid"),
    ]
    assert three.trained.exists() and not three.quarantine.exists()


def test_fix_moves_all_that_is_corrupt_or_not_sealed_and_the_run_trains_again(config, three):
    with pytest.raises(DataError) as caught:
        validate_all(program_of(config), fix=True)
    assert "`latest` is checkpoint-4" in caught.value.fix and "from step 4" in caught.value.fix
    left = sorted(path.name for path in three.checkpoints.glob("checkpoint-*"))
    assert left == ["checkpoint-4", "checkpoint-4.forge.json"]
    assert {"checkpoint-3", "checkpoint-5", "checkpoint-6"} <= {
        path.name for path in three.quarantine.iterdir()
    }
    assert not three.trained.exists()


def test_check_that_hangs_is_killed_with_all_that_it_has_started(config, tmp_path):
    pid = tmp_path / "pid"
    hangs = ["sh", "-c", f"echo begun; sleep 1000 & echo $! > {pid}; wait"]
    values = {"command": ["python"], "validate": hangs, "validate_timeout_sec": 1}
    program = Program.model_validate(values)
    check = program_checks._own_check(config, program, RunPaths.of(config), None)
    assert check.status == "fail" and "was killed after 1 s: begun" in check.message
    assert "program.validate_timeout_sec" in check.fix
    wait_until_gone(int(pid.read_text()))


@pytest.mark.parametrize(("done", "is_valid"), [(3, True), (5, True), (7, False)])
def test_a_record_of_an_earlier_goal_says_nothing_of_a_later_checkpoint(
    config, folder, done, is_valid
):
    (folder / "model.pt").write_bytes(b"weights")
    record = {"goal_step": done, "step": done, "checkpoint": "", "weights_digest": ""}
    Trained(run="p", config_digest="", **record).write(RunPaths.of(config).trained)
    with (
        nullcontext() if is_valid else pytest.raises(DataError, match=r"trained\.json says step 7")
    ):
        messages(config)


def test_model_that_the_own_check_refuses_is_invalid_also_without_checkpoints(tmp_path):
    program = {"command": ["python"], "validate": ["sh", "-c", "echo too poor; exit 1"]}
    values = {"results": str(tmp_path), "run": "p", "program": program}
    run = program_of(resolve(checked(Config, values, "the test")))
    with pytest.raises(DataError, match=r"p is invalid: program: .* too poor") as caught:
        validate(run)
    assert "program's own check refuses" in caught.value.cause
    assert "exit status 0 means valid" in caught.value.fix


def wait_until_gone(pid):
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, f"process {pid} is left"
        time.sleep(0.01)
