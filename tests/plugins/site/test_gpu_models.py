"""Threat: a GPU taken for another one, whose memory or speed a run then counts on."""

import pytest

from forge.plugins.site.gpu_models import _MODELS, _WITHOUT_SPEED, is_slice, model_of
from forge.trainer.metrics import peak_flops


@pytest.mark.parametrize(
    ("kind", "features", "name", "memory_gib"),
    [
        ("h100", (), "H100", None),
        ("nvidia_h100_80gb_hbm3", (), "H100", 79),
        ("nvidia_h100_nvl", (), "H100 NVL", 93),
        ("nvidia_a100-sxm4-40gb", (), "A100", 39),
        ("nvidia_a100_80gb_pcie", (), "A100", 79),
        ("a100", (), "A100", None),
        ("", ("gpu", "a100", "hbm80g"), "A100", 79),
        ("", ("512G", "cell13", "a100_80"), "A100", 79),
        ("h100", ("genoa", "amd", "64gb"), "H100", 63),
        ("nvidia_rtx_pro_6000_blackwell_server_edition", (), "RTX PRO 6000", 95),
        ("gh200_120gb", (), "GH200", None),
        ("v100", ("v100-32g",), "V100", 31),
        ("tesla", (), "", None),
        ("nvidia_rtx_a1000", (), "", None),
        ("", (), "", None),
    ],
)
def test_model_and_memory_are_read_from_the_names_of_sites(kind, features, name, memory_gib):
    model = model_of(kind, features)
    assert (model.name, model.memory_gib, model.maker) == (name, memory_gib, "")


@pytest.mark.parametrize(
    ("kind", "features", "maker"),
    [("mi250", (), "AMD"), ("mi300a", (), "AMD"), ("", ("gfx90a",), "AMD"), ("pvc", (), "Intel")],
)
def test_gpus_of_other_makers_are_told(kind, features, maker):
    assert model_of(kind, features).maker == maker


def test_processors_of_amd_are_no_gpus_of_amd():
    assert model_of("h100", ("AMD_EPYC_7763", "amd")).maker == ""


def test_part_of_a_gpu_is_told_from_a_whole_one():
    assert all(map(is_slice, ("1g.10gb", "a100_3g.20gb", "nvidia_a100_mig_1g", "mig")))
    assert not any(map(is_slice, ("h100", "nvidia_a100-sxm4-40gb", "migraine", "")))


def test_forge_plan_knows_the_speed_of_each_model_but_those_that_are_named():
    unknown = {name for _, name, _ in _MODELS if peak_flops(name) is None}
    assert unknown == _WITHOUT_SPEED
