"""Do a config and the data fit a checkpoint? And what its schedule will be. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Part, RecordedConfig, data_digests
from forge.core.config import Config, ResolvedConfig, is_free
from forge.core.errors import ConfigError, DataError
from forge.core.models.architectures import ARCHITECTURES, DEFAULT
from forge.core.section import Section, all_values
from forge.core.tokenize_settings import Tokenize, Tokenizer
from forge.core.values import shown

if TYPE_CHECKING:
    from forge.data.sources import Tokens


def frozen_decay_steps(config: ResolvedConfig, checkpoint: Checkpoint | None) -> int:
    """Length of the schedule: as the config says, else as at the run's first start."""
    if config.train.decay_steps is not None:
        return config.train.decay_steps
    if checkpoint is not None:
        return checkpoint.manifest.decay_steps
    # With an end before that of the warm-up the checkpoint could never be validated.
    return max(config.train.max_steps, config.train.warmup_steps)


def why_not_compiled(config: ResolvedConfig, checkpoint: Checkpoint | None) -> str | None:
    """Why the blocks are not compiled, as the launch that began the run has decided, "" where they are.
    None where this launch decides: that one, and the first after train.compile was changed."""
    if checkpoint is None:
        return None
    manifest = checkpoint.manifest
    is_as_then = manifest.lineage.config.train.compile == config.train.compile
    return manifest.why_not_compiled if is_as_then else None


def check_compatible(config: ResolvedConfig, checkpoint: Checkpoint) -> None:
    """ConfigError that names each key by which the config no longer fits the checkpoint."""
    made_by = checkpoint.manifest.lineage.config
    problems = [
        *_changed("model", config.model, made_by.model),
        *_changed("train", config.train, made_by.train),
    ]
    decay_steps = frozen_decay_steps(config, checkpoint)
    if decay_steps != checkpoint.manifest.decay_steps:
        problems.append(differs("train.decay_steps", decay_steps, checkpoint.manifest.decay_steps))
    problems += changed_ids(config, made_by)
    problems += added_sources(config, made_by)
    if config.ids.model != made_by.ids.model:
        problems.append(differs("ids.model", config.ids.model, made_by.ids.model))
    problems += [
        f"the plugin {name} has digest {digest[:12]}, the checkpoint's had {then[:12]}"
        for name, digest in config.ids.plugins.items()
        if (then := made_by.ids.plugins.get(name, "none"))
        not in (digest, *config.ids.plugins_before.get(name, ()))
    ]
    if config.parent != made_by.parent:
        problems.append(differs("parent", config.parent, made_by.parent))
    if problems:
        raise ConfigError(
            f"the config does not fit {checkpoint.folder}: " + "; ".join(problems),
            cause="it was edited after the run had begun, or corpus files have other names or sizes",
            fix="restore these values, or give the changed run a new name",
        )
    if config.train.max_steps < checkpoint.step:
        raise ConfigError(
            f"train.max_steps is {config.train.max_steps}, but {checkpoint.folder} is at step"
            f" {checkpoint.step} already",
            fix=f"set train.max_steps to {checkpoint.step} or more, or give the run a new name",
        )


def _changed(section: str, now: Section, then: Part) -> Iterator[str]:
    for key, current in all_values(now).items():
        if key == "decay_steps" or is_free(type(now), key):
            continue
        if current != (value := recorded_value(section, then, key)):
            yield differs(f"{section}.{key}", current, value)


def recorded_value(section: str, recorded: Part, key: str) -> object:
    """The value of a key in a section of a recorded config; where its version of Forge had no such key,
    the default, which stands for what Forge did before. None for a key of another architecture."""
    kind: type[Section] | None = type(Config.model_fields[section].default)
    if section == "model":
        kind = ARCHITECTURES.get(getattr(recorded, "architecture", DEFAULT.architecture))
    field = kind.model_fields.get(key) if kind else None
    return getattr(recorded, key, None if field is None else field.default)


def changed_ids(config: ResolvedConfig, made_by: RecordedConfig) -> Iterator[str]:
    """One sentence for each key that made other tokens or another tokenizer than those of a checkpoint,
    or for the artefact where no key did; of sources for each that the checkpoint has."""
    ours, theirs = config.ids.sources, made_by.ids.sources
    now, then = config.ids, made_by.ids
    changed = [] if now.tokenizer == then.tokenizer else ["tokenizer"]
    if not (ours and theirs) and now.tokens != then.tokens:
        changed.append("tokens")
    keys = list(_changed_keys_of_data(config, made_by)) if changed else []
    yield from keys or (
        differs(f"ids.{name}", getattr(now, name), getattr(then, name)) for name in changed
    )
    for name in theirs if ours else ():
        if ours.get(name) != theirs[name]:
            yield differs(f"ids.sources.{name}", ours.get(name), theirs[name])


def _changed_keys_of_data(config: ResolvedConfig, made_by: RecordedConfig) -> Iterator[str]:
    """The keys that name other data than the checkpoint's; empty where equal settings name other
    files."""
    sections = config.to_json()
    for section, model in (("tokenizer", Tokenizer), ("tokenize", Tokenize)):
        then = getattr(made_by, section, {})
        for key, value in sections[section].items():
            if key in then and value != then[key] and not is_free(model, key):
                yield f"{section}.{key} is {shown(value)}, the checkpoint has {shown(then[key])}"


def added_sources(config: ResolvedConfig, made_by: RecordedConfig) -> Iterator[str]:
    """One sentence for each source that the config of a checkpoint does not have."""
    if made_by.ids.sources:
        for name in config.ids.sources.keys() - made_by.ids.sources.keys():
            yield differs(f"ids.sources.{name}", config.ids.sources[name], None)


def check_same_tokens(checkpoint: Checkpoint, tokens: Tokens) -> None:
    """DataError when a checkpoint was trained on other tokens, or on those of another tokenizer."""
    from forge.data.sources import (
        digests_by_source,  # imports NumPy, and `forge status` this module
    )

    by_source = digests_by_source(tokens)
    check_same_data(checkpoint, data_digests(tokens.digest, by_source, tokens.tokenizer_digest))


def check_same_data(checkpoint: Checkpoint, digests: Mapping[str, str]) -> None:
    """DataError when a checkpoint was trained on other data than what there is. digests: of that, as
    `manifest.data_digests` has them. Sources that the checkpoint does not have may be there."""
    for name, then in checkpoint.manifest.lineage.data_digests.items():
        now = digests.get(name, "none")
        if then != now:
            raise DataError(
                f"the {name} of this run have digest {now[:12]}, {checkpoint.folder} was trained"
                f" with {then[:12]}",
                cause="the corpus or the tokenizer was edited in place and rebuilt",
                fix="restore the old input, or give the run a new name",
            )


def differs(key: str, now: object, then: object) -> str:
    """The sentence for a key that the config has changed since a checkpoint was made."""
    return f"{key} is {now!r}, the checkpoint has {then!r}"


def schedule_warnings(config: ResolvedConfig, checkpoint: Checkpoint | None) -> list[str]:
    """Warnings about the learning rate before a start: no peak, or no rate left."""
    train, decay_steps = config.train, frozen_decay_steps(config, checkpoint)
    goal, warmup = train.max_steps, train.warmup_steps
    warnings: list[str] = []
    if checkpoint is not None and checkpoint.step == goal:
        return warnings  # nothing is left to train
    if warmup > goal:
        warnings.append(
            f"warning: train.warmup_steps {warmup} is beyond max_steps {goal}: the learning rate reaches"
            f" {train.lr * goal / warmup:.3g}, never {train.lr:.3g} (train.lr)"
        )
    if checkpoint is not None and goal > decay_steps:
        warnings.append(
            f"warning: train.max_steps {goal} is beyond decay_steps {decay_steps}:"
            f" steps after {decay_steps} run at the minimum learning rate"
        )
    return warnings
