"""`environment` in machine.yaml: variables that every rank gets."""

import pytest

from forge.core.errors import ConfigError
from forge.core.machine import load_machine


def machine_with(variables):
    return load_machine(None, {"environment": {"variables": variables}})


def test_numbers_and_texts_are_the_text_of_a_variable():
    variables = {"OMP_NUM_THREADS": 4, "NCCL_DEBUG": "WARN", "EMPTY": ""}
    texts = {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN", "EMPTY": ""}
    assert machine_with(variables).environment.values == texts


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "0", "RANK is set for each launch, or each rank, by its launcher"),
        ("MASTER_ADDR", "n1", "MASTER_ADDR .* set fabric.master_addr"),
        ("MASTER_PORT", 29500, "MASTER_PORT .* set fabric.master_port"),
        ("SLURM_PROCID", "0", "SLURM_PROCID is set for each launch"),
        ("FORGE_RUN", "x", "FORGE_RUN is set for each launch"),
        ("NCCL-DEBUG", "INFO", "'NCCL-DEBUG' is no name of a variable"),
        ("NCCL_DEBUG=INFO", "", "'NCCL_DEBUG=INFO' is no name of a variable"),
        ("A", True, r"A should be text: put the value in quotes \(A: 'True'\)"),
        ("A", 0.5, r"A should be text: put the value in quotes \(A: '0.5'\)"),
        ("A", "a\0b", "A holds a null byte"),
        ("A", None, "environment.variables.A"),
    ],
)
def test_variable_that_cannot_be_set_is_refused_by_name(name, value, said):
    with pytest.raises(ConfigError, match=said):
        machine_with({name: value})
