"""config/sizes: each fits the nodes that it is meant for, does not wait for the network, and says what
`forge plan` says."""

from pathlib import Path

import pytest
from support.repository import REPOSITORY as ROOT

from forge import cli
from forge.core import memory
from forge.core.config import load_config, read_values
from forge.core.machine import load_machine
from forge.core.memory import GIB, Shape
from forge.core.sample_sheet import read_rows, run_configs
from forge.core.terminal import duration
from forge.hosts.placement import WorldLayout, check_layout
from forge.run.step_time import Speed, step_time

SIZES = ["124m", "1b", "7b", "13b", "70b"]
MACHINE = "profiles/kempner/machine.yaml"
RANKS = 4  # a node, in both profiles of Kempner


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def nodes_of(size):
    [row] = read_rows(f"config/sizes/{size}.tsv")
    return row.layout["nodes"]


def test_these_are_all_sizes():
    assert {path.stem for path in Path("config/sizes").iterdir()} == set(SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_size_means_the_same_to_a_command_and_beside_the_default_config(size):
    """Snakemake merges it into config/config.yaml, of which no key may be left."""
    path = f"config/sizes/{size}.yaml"
    own = read_values(path)
    merged = read_values("config/config.yaml")
    for section, values in own.items():
        merged[section] = (
            {**merged.get(section, {}), **values} if isinstance(values, dict) else values
        )
    [(name, config)] = run_configs(merged, merged.pop("runs")).items()
    assert name == size
    assert config == load_config(path, {})


@pytest.mark.parametrize("size", SIZES)
def test_size_fits_its_nodes_without_a_warning(size, capsys):
    config, machine, layout = (
        load_config(f"config/sizes/{size}.yaml", {}),
        load_machine(MACHINE),
        WorldLayout(nodes_of(size), RANKS),
    )
    check_layout(machine, layout, config)
    assert capsys.readouterr().err == ""
    ranks = (f"--nodes={layout.nodes}", f"--ranks-per-node={RANKS}", f"--machine={MACHINE}")
    assert cli.main(["plan", f"config/sizes/{size}.yaml", *ranks]) == 0
    printed = capsys.readouterr().out
    assert "warning" not in printed
    [own] = [line for line in printed.splitlines() if "(config)" in line]
    assert own.endswith(" yes")


@pytest.mark.parametrize("size", SIZES)
def test_first_lines_say_what_forge_plan_says(size):
    path = f"config/sizes/{size}.yaml"
    config, machine, nodes = load_config(path, {}), load_machine(MACHINE), nodes_of(size)
    shape = Shape.of(config, config.tokenizer.vocab_size, nodes * RANKS, RANKS)
    shape = memory.with_micro_batch(shape, machine.gpu_memory_gib * GIB)
    time = step_time(shape, Speed.of(machine, RANKS))
    tokens = config.train.max_steps * config.train.batch_size * config.train.seq_len
    said = (
        f"# {shape.num_parameters / 1e9:.3g} billion parameters, {tokens / 1e9:.0f} billion tokens on"
        f" {nodes} node{'s' * (nodes > 1)} of {RANKS} H100. By `forge plan`:"
        f" {duration(time.total * config.train.max_steps)}, {time.mfu:.0%} of the peak."
    )
    assert said == Path(path).read_text().splitlines()[1]
