"""By which weights a start draws. Threats: a resume by other weights than before, and a child that begins
somewhere else in the sources than its parent has ended."""

from __future__ import annotations

import pytest
from support.manifests import manifest_of, save

from forge.checkpoint import compatibility, parent
from forge.checkpoint.manifest import Manifest, RecordedMix, RecordedStage, SourceUse
from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError
from forge.core.mix import MixStage
from forge.core.paths import RunPaths
from forge.trainer.source_mix import MixAtStart

WINDOWS = {"code": 100, "web": 300}
USED = {name: SourceUse(tokens=9000, windows=n, samples=n + 7) for name, n in WINDOWS.items()}


def config_of(results, run="base", mix=None, sources=("code", "web"), tokens="b" * 12, **values):
    named = {name: f"{number:012x}" for number, name in enumerate(sorted(sources))}
    tokenize = {"sources": {name: {"inputs": [name]} for name in sources}} if sources else {}
    return ResolvedConfig(
        run=run,
        results=str(results),
        tokenize=tokenize,
        train={"mix": mix, "max_steps": 50, **values.pop("train", {})},
        ids={"tokenizer": "a" * 12, "tokens": tokens, "sources": named},
        **values,
    )


def trained(config, step=20, drawn_before=None):
    """A checkpoint of this config, whose stages are those of its mix."""
    found = MixAtStart.of(config, WINDOWS, None, None)
    mix = MixAtStart(found.stages, drawn_before or found.drawn_before).record(USED)
    return save(RunPaths.of(config), step, config=config, mix=mix)


def test_without_a_mix_the_proportion_is_that_of_the_windows(tmp_path):
    found = MixAtStart.of(config_of(tmp_path), WINDOWS, None, None)
    assert found == MixAtStart([MixStage(0, WINDOWS)], {"code": 0, "web": 0})


def test_resumed_run_keeps_the_mix_of_its_checkpoint(tmp_path):
    config = config_of(tmp_path, mix={"code": 1, "web": 3})
    own = trained(config, drawn_before={"code": 5, "web": 6})
    found = MixAtStart.of(config, {"code": 1, "web": 1}, own, None)
    assert found == MixAtStart([MixStage(0, {"code": 1, "web": 3})], {"code": 5, "web": 6})
    written = Manifest.read(own.folder)
    assert written == own.manifest


def test_child_with_other_weights_begins_with_what_its_parent_has_drawn(tmp_path):
    base = trained(config_of(tmp_path, mix={"code": 1, "web": 3}))
    mix = [{"step": 0, "code": 1, "web": 3}, {"step": 10, "code": 3, "web": 1}]
    child = config_of(
        tmp_path, "child", [*mix, {"step": 30, "code": 1, "web": 0}], parent="base@20"
    )
    found = MixAtStart.of(child, WINDOWS, None, base)
    assert found.stages == [
        MixStage(20, {"code": 3, "web": 1}),
        MixStage(30, {"code": 1, "web": 0}),
    ]
    assert found.drawn_before == {"code": 107, "web": 307}


def test_child_with_the_weights_and_the_seed_of_its_parent_continues_its_stage(tmp_path):
    stages = [{"step": 0, "code": 1, "web": 3}, {"step": 5, "code": 1, "web": 1}]
    base = trained(config_of(tmp_path, mix=stages))
    mix = [{"step": 20, "code": 2, "web": 2}, {"step": 40, "code": 1, "web": 0}]
    child = config_of(tmp_path, "child", mix, parent="base@20")
    found = MixAtStart.of(child, WINDOWS, None, base)
    assert [stage.step for stage in found.stages] == [0, 5, 40]
    assert found.drawn_before == {"code": 0, "web": 0}
    other_seed = config_of(tmp_path, "child", mix, parent="base@20", train={"seed": 9})
    found = MixAtStart.of(other_seed, WINDOWS, None, base)
    assert [stage.step for stage in found.stages] == [20, 40]
    assert found.drawn_before == {"code": 107, "web": 307}


@pytest.mark.parametrize(
    ("sources", "of_resume", "of_child"),
    [
        (("code", "web"), "", ""),
        (("code", "web", "zoo"), "ids.sources.zoo is '000000000002', the checkpoint has None", ""),
        (("code",), "ids.sources.web is None", "ids.sources.web is None"),
        ((), "ids.tokens is 'cccccccccccc'", "ids.tokens is 'cccccccccccc'"),
    ],
)
def test_child_may_add_sources_and_a_resumed_run_may_not(tmp_path, sources, of_resume, of_child):
    base = trained(config_of(tmp_path))
    tokens = "b" * 12 if sources == ("code", "web") else "c" * 12
    same = config_of(tmp_path, sources=sources, tokens=tokens)
    child = config_of(tmp_path, "child", sources=sources, tokens=tokens, parent="base@20")
    for told, check in (
        (of_resume, lambda: compatibility.check_compatible(same, base)),
        (of_child, lambda: parent.find(child)),
    ):
        if told:
            with pytest.raises(ConfigError) as refused:
                check()
            assert told in refused.value.what
        else:
            check()


def test_changed_mix_is_refused_by_key(tmp_path):
    base = trained(config_of(tmp_path, mix={"code": 1, "web": 3}))
    with pytest.raises(
        ConfigError, match=r"train\.mix is \{'code': 1, 'web': 4\}, the checkpoint has"
    ):
        compatibility.check_compatible(config_of(tmp_path, mix={"code": 1, "web": 4}), base)


def test_recorded_mix_has_a_digest_of_its_own_in_the_manifest():
    mix = RecordedMix(
        stages=[RecordedStage(step=0, weights={"a": 1.0})], drawn_before={}, sources={}
    )
    assert manifest_of(3, mix=mix).sealed().digest != manifest_of(3).sealed().digest
