"""Against a rule for loss spikes that forgets at a resume, learns from spikes, or raises false alarms."""

import math

import pytest
import torch
from support.manifests import IDS, manifest_of

from forge.core.config import ResolvedConfig
from forge.core.train_settings import Train
from forge.trainer.divergence import SkippedCounts, SpikeRule, ended_by_spike
from forge.trainer.step import LaunchedStep

CPU = torch.device("cpu")
SETTINGS = Train(spike="skip", spike_window=8, spike_factor=3)
CALM = [[2.0 + 0.13 * (n % 3), 1.0 + 0.05 * (n % 4)] for n in range(20)]


def rule_after(rows, settings=SETTINGS):
    """A rule that has seen steps with these losses and gradient norms, alike on two ranks."""
    rule = SpikeRule(settings, CPU)
    for row in rows:
        assert judged(rule, row) == ""
    return rule


def judged(rule, row, ranks=2):
    return rule.judge(torch.tensor([row] * ranks)).read()


def fp32(rows):
    return torch.tensor(rows, dtype=torch.float32).tolist()


@pytest.mark.parametrize(("row", "name"), [([9.0, 1.0], "loss 9"), ([2.0, 9.0], "gradient norm 9")])
def test_loss_or_gradient_norm_far_above_the_steps_before_is_a_spike(row, name):
    verdict = rule_after(CALM).judge(torch.tensor([row]))
    assert verdict.is_spike
    assert f"the {name} is a spike, above " in verdict.read()


def test_limit_is_the_mean_and_so_many_standard_deviations():
    losses = torch.tensor(CALM[-8:])[:, 0].double()
    deviation, mean = (float(number) for number in torch.std_mean(losses))
    limit = mean + 3 * deviation
    assert judged(rule_after(CALM), [limit - 1e-4, 1.0]) == ""
    said = judged(rule_after(CALM), [limit + 1e-4, 1.0])
    assert f"above {limit:.4g} (mean {mean:.4g} of the steps before" in said
    assert f"3 standard deviations of {deviation:.3g})" in said


def test_loss_is_the_mean_over_ranks_and_the_norm_the_largest():
    rule = rule_after(CALM)
    assert not rule.judge(torch.tensor([[1.6, 1.0], [2.4, 1.0]])).is_spike
    assert rule.judge(torch.tensor([[2.0, 1.0], [2.0, 9.0]])).is_spike


def test_drop_is_no_spike():
    assert judged(rule_after(CALM), [0.01, 0.01]) == ""


def test_only_accepted_steps_enter_the_window():
    rule = rule_after(CALM)
    assert rule.recorded() == fp32(CALM[-8:])
    for row in ([9.0, 1.0], [math.nan, 1.0], [2.0, math.inf]):
        rule.judge(torch.tensor([row]))
    assert rule.recorded() == fp32(CALM[-8:])
    assert "loss 9 is a spike" in judged(rule, [9.0, 1.0])


@pytest.mark.parametrize(
    "row", [[math.nan, 1.0], [math.inf, 1.0], [2.0, math.inf], [2.0, math.nan]]
)
def test_numbers_that_are_not_finite_are_no_spike(row):
    """train.on_nonfinite decides about them."""
    assert not rule_after(CALM).judge(torch.tensor([row, [2.0, 1.0]])).is_spike


@pytest.mark.parametrize("row", [[2.0, math.inf], [math.inf, 1.0], [9.0, math.inf]])
def test_step_with_a_number_that_is_not_finite_ends_by_on_nonfinite_whatever_the_rule_allows(row):
    table = torch.tensor([row, [2.0, 1.0]])
    result = LaunchedStep(0, 1e-3, table, rule_after(CALM).judge(table)).read()
    assert "are not finite" in result.trouble and not result.is_spike
    ends = Train(spike="skip", on_nonfinite="stop")
    said = SkippedCounts().count(result.trouble, ends, is_spike=result.is_spike)
    assert said.endswith("were not updated")
    goes_on = Train(spike="stop", on_nonfinite="skip")
    assert SkippedCounts().count(result.trouble, goes_on, is_spike=result.is_spike) == ""


@pytest.mark.parametrize(("accepted", "is_spike"), [(0, False), (1, False), (3, False), (4, True)])
def test_first_steps_are_never_spikes_and_half_a_window_is_enough(accepted, is_spike):
    assert bool(judged(rule_after(CALM[:accepted]), [1e6, 1.0])) == is_spike


def test_window_longer_than_the_run_keeps_all_steps_and_skips_none():
    rule = rule_after([*CALM, [1e6, 1.0]], Train(spike="skip", spike_window=1000))
    assert rule.recorded() == fp32([*CALM, [1e6, 1.0]])


@pytest.mark.parametrize("steps", [2, 6, 17])
def test_rule_resumed_from_a_manifest_judges_bit_by_bit_as_the_uninterrupted_one(steps, tmp_path):
    generator = torch.Generator().manual_seed(steps)
    rows = (2 + 0.1 * torch.randn(steps + 200, 2, generator=generator)).tolist()
    through, before = SpikeRule(SETTINGS, CPU), SpikeRule(SETTINGS, CPU)
    for row in rows[:steps]:
        assert judged(through, row) == judged(before, row)
    manifest = manifest_of(steps, spike_window=before.recorded()).write(tmp_path)
    resumed = SpikeRule.of(SETTINGS, CPU, manifest.read(tmp_path))
    said = [(judged(resumed, row, ranks=4), judged(through, row)) for row in rows[steps:]]
    assert all(mine == theirs for mine, theirs in said)
    assert 0 < sum(bool(mine) for mine, _ in said) < 100
    assert resumed.recorded() == through.recorded()


def test_shorter_window_takes_the_last_steps_of_a_checkpoint():
    manifest = manifest_of(20, spike_window=rule_after(CALM, Train(spike="skip")).recorded())
    assert SpikeRule.of(SETTINGS, CPU, manifest).recorded() == fp32(CALM[-8:])


def test_there_is_no_rule_by_default():
    assert SpikeRule.of(Train(), CPU, None) is None
    assert SpikeRule.of(Train(), CPU, manifest_of(1)) is None


def test_train_spike_decides_about_spikes_and_on_nonfinite_about_the_rest():
    settings = Train(spike="stop", on_nonfinite="skip")
    assert (
        SkippedCounts().count("9 is a spike", settings, is_spike=True).endswith("were not updated")
    )
    assert SkippedCounts().count("nan", settings) == ""
    settings = Train(spike="skip", on_nonfinite="stop", max_skipped_steps=1)
    skipped = SkippedCounts()
    assert skipped.count("9 is a spike", settings, is_spike=True) == ""
    assert "1 steps before it" in skipped.count("9 is a spike", settings, is_spike=True)
    assert skipped.count("nan", settings).endswith("were not updated")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_error_names_the_checkpoint_to_start_from_and_the_keys(policy):
    settings = Train(spike=policy, spike_factor=3)
    config = ResolvedConfig(ids=IDS, run="hot", train=settings)
    said = str(ended_by_spike(config, "what", step=9, lr=1e-3, saved_step=5))
    assert "step 9: what" in said and "parent: hot@5" in said
    assert ("train.spike=skip" in said) == (policy == "stop")
    assert "train.spike_factor above 3" in said
