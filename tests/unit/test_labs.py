"""The configs in config/labs: they are valid, their READMEs name them, and start what they say."""

import importlib.util

import pytest
from support.repository import REPOSITORY as ROOT

from forge.core.config import load_config, read_values
from forge.core.program_settings import filled
from forge.core.sample_sheet import run_configs

LABS = sorted(path.name for path in (ROOT / "config/labs").iterdir())
VALUES = {"run": "/r/x", "checkpoints": "/r/x/checkpoints", "goal": 100, "resume": "/r/c"}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def runs(lab):
    values = read_values(f"config/labs/{lab}/config.yaml")
    return run_configs(values, values.pop("runs"))


@pytest.mark.parametrize("lab", LABS)
def test_config_is_valid_and_has_the_run_of_its_name(lab):
    [(name, config)] = runs(lab).items()
    assert (name, config.run) == (lab, lab)
    assert config.program.checkpoints and config.goal
    assert config == load_config(f"config/labs/{lab}/config.yaml", {"run": lab})


@pytest.mark.parametrize("lab", LABS)
def test_command_in_the_readme_names_this_config_and_a_profile(lab):
    lines = (ROOT / "config/labs" / lab / "README.md").read_text().splitlines()
    commands = [line.split() for line in lines if line.startswith("    snakemake")]
    assert commands
    for _, option, profile, target, *config in commands:
        assert option == "--profile"
        assert target in ("train", "export", f"results/{lab}/config.json")
        assert config == ["--configfile", f"config/labs/{lab}/config.yaml"]
        assert profile == "profiles/mine" or (ROOT / profile / "machine.yaml").is_file()


def started(lab):
    """The words that a rank starts when it resumes."""
    program = runs(lab)[lab].program
    return [filled(word, VALUES) for word in (*program.command, *program.resume)]


def test_command_of_kempnerforge():
    assert started("kempnerforge") == [
        *(".venv/bin/python", "scripts/train.py", "configs/train/debug.toml"),
        *("--train.max_steps=100", "--checkpoint.dir=/r/x/checkpoints"),
        *("--checkpoint.interval=20", "--checkpoint.keep_last_n=0"),
    ]


def test_command_of_torchtitan():
    assert started("torchtitan") == [
        *(".venv/bin/python", "-m", "torchtitan.train"),
        *("--module=llama3", "--config=llama3_debugmodel", "--training.steps=100"),
        *("--dump_folder=/r/x/torchtitan", "--checkpoint.enable"),
        *("--checkpoint.folder=/r/x/checkpoints", "--checkpoint.interval=20"),
        *("--checkpoint.keep_latest_k=0", "--checkpoint.no_last_save_model_only"),
    ]


@pytest.fixture(scope="module")
def six_nodes():
    """The module train.py of six-nodes."""
    path = ROOT / "config/labs/six-nodes/train.py"
    spec = importlib.util.spec_from_file_location("six_nodes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "backend"),
    [
        *[("auto", True, "nccl"), ("auto", False, "gloo"), ("nccl", True, "nccl")],
        *[("gloo", True, "gloo"), ("gloo", False, "gloo")],
    ],
)
def test_backend_of_six_nodes_is_the_one_of_its_command(six_nodes, wanted, on_gpu, backend):
    assert six_nodes.backend_of(wanted, on_gpu=on_gpu) == backend


def test_six_nodes_refuses_nccl_on_a_rank_without_gpu(six_nodes):
    with pytest.raises(SystemExit, match=r"torch sees no GPU on this node\. --backend gloo trains"):
        six_nodes.backend_of("nccl", on_gpu=False)
