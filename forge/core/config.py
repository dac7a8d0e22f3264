"""Training config of a run: typed sections with units, defaults and limits, from files and overrides. The
only source of defaults. Large sections have modules of their own beside this one.

`python -m tools.config_docs` generates the JSON schema and the table in config/README.md from it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from forge.core import hooks, project_plugins
from forge.core.errors import ConfigError
from forge.core.files import read_json, write_json
from forge.core.key_docs import meaning
from forge.core.mix import require_sources
from forge.core.models import architectures
from forge.core.models.architectures import AnyModel
from forge.core.program_settings import Program
from forge.core.section import (
    FREE,
    AnySection,
    FilePath,
    Retired,
    Section,
    WithPlugins,
    expanded,
    section_of,
    section_of_entries,
    tagged_sections,
    with_retired,
    without_retired,
)
from forge.core.service_settings import Report, ValidateSettings
from forge.core.text_formats import TOKEN_FORMATS
from forge.core.tokenize_settings import SourceName, Tokenize, Tokenizer
from forge.core.train_settings import Train
from forge.core.values import describe, read_cell, read_text, read_yaml, shown

# Safe as a path, an option and a word of a shell; also the wildcard constraint of the workflow.
CONFIG = "config/config.yaml"  # of a project
RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
# RUN@STEP. 18 digits fit into 64 bits.
PARENT = rf"({RUN_NAME})@((merged-)?[1-9][0-9]{{0,17}}|latest|merged)"
HUB_PARENT = "hub:"
# Keys that do not change what is trained; the config digest leaves them out.
FOLDERS = ("run", "results", "data")
# Sections that training does not read, as those of plugins; a checkpoint knows nothing of them.
OUTSIDE_TRAINING = ("validate", "report")
# Sections that another program has no use for.
OF_FORGES_TRAINER = ("tokenizer", "tokenize", "model", "train")
# How torchtitan, transformers (configs and TrainingArguments) and nanoGPT call keys, and what people
# write for short. Only names that are not near the right one.
ALIASES = {
    **dict.fromkeys(("learning_rate", "max_lr", "peak_lr"), "train.lr"),
    **dict.fromkeys(("min_lr", "min_lr_factor"), "train.min_lr_ratio"),
    **dict.fromkeys(("bs", "global_batch_size"), "train.batch_size"),
    **dict.fromkeys(
        ("local_batch_size", "mbs", "per_device_train_batch_size"), "train.micro_batch_size"
    ),
    **dict.fromkeys(("wd", "decay"), "train.weight_decay"),
    **dict.fromkeys(("steps", "max_iters", "total_steps", "num_steps"), "train.max_steps"),
    **dict.fromkeys(("warmup", "warmup_iters", "num_warmup_steps"), "train.warmup_steps"),
    **dict.fromkeys(
        ("block_size", "context_length", "max_seq_len", "max_position_embeddings"), "train.seq_len"
    ),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "decay_type"), "train.schedule"),
    **dict.fromkeys(("max_norm", "max_grad_norm", "clip_grad"), "train.grad_clip"),
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    **dict.fromkeys(("dtype", "bf16", "mixed_precision"), "train.precision"),
    **dict.fromkeys(
        ("activation_checkpoint", "activation_checkpointing", "gradient_checkpointing"),
        "train.recompute",
    ),
    **dict.fromkeys(("log_freq", "logging_steps", "log_interval"), "train.log_every"),
    **dict.fromkeys(("eval_freq", "eval_steps", "eval_interval"), "train.eval_every"),
    **dict.fromkeys(("save_every", "save_steps", "save_interval"), "train.checkpoint_every"),
    **dict.fromkeys(("keep_latest_k", "save_total_limit"), "train.keep_last"),
    **dict.fromkeys(("hidden_size", "hidden_dim", "d_model", "n_embd"), "model.dim"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_hidden_layers"), "model.layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), "model.heads"),
    **dict.fromkeys(("n_kv_heads", "num_kv_heads", "num_key_value_heads"), "model.kv_heads"),
    **dict.fromkeys(("intermediate_size", "hidden_ffn", "d_ff"), "model.ffn_dim"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), "model.norm_eps"),
    "tie_word_embeddings": "model.tie_embeddings",
    **dict.fromkeys(("dataset", "data_files", "files"), "tokenize.inputs"),
}
MOST_KEYS_NAMED = 10  # of a section, in an error
MOST_EXPLAINED = 5  # keys whose meaning stands in an error


class Ids(Section):
    """Content ids of what a run reads; filled in when its config is resolved."""

    tokenizer: str = Field("", pattern=r"^([0-9a-f]{12})?$")
    """Name of the directory in `data/tokenizers/`; empty with `program`."""
    tokens: str = Field("", pattern=r"^([0-9a-f]{12})?$")
    """Name of the directory in `data/tokens/`, with sources of their list; empty with `program`."""
    sources: dict[SourceName, Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]] = Field(default={})
    """Name of the directory in `data/tokens/` of each source; `{}` without sources."""
    inputs: str = Field("", pattern=r"^([0-9a-f]{12})?$")
    """Name of the directory in `data/inputs/`, of `program.inputs` or of the files of a hub in
    `tokenize.inputs`; empty without them."""
    model: str = Field("", pattern=r"^([0-9a-f]{12})?$")
    """Name of the directory in `data/models/`, of `model.init`; empty without it."""
    plugins: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(
        default={}, exclude_if=lambda plugins: not plugins
    )
    """Digest of each plugin of the project that has the architecture or the optimizer."""
    plugins_before: dict[str, list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]] = Field(
        default={}, exclude_if=lambda plugins: not plugins
    )
    """Digests that these plugins had at earlier starts of the run, oldest first; where
    `plugins_may_change` was set."""


class Config(WithPlugins, Section):
    """Config of a run: data, model and hyperparameters, or a program. Nothing about machines."""

    RETIRED: ClassVar = {
        "certify": Retired(
            {"every": None},
            "`forge reproduce CHECKPOINT` retrains the steps up to a checkpoint",
        )
    }

    run: str = Field("base", pattern=rf"^{RUN_NAME}$")
    """Name of the run and of its directory in `results`."""
    results: FilePath = Field("results", min_length=1)
    """Directory with one directory per run. In every path of a config `~` and variables of the
    environment are expanded; config.json has the result."""
    data: FilePath = Field("data", min_length=1)
    """Directory of tokenizers and tokens, shared between runs."""
    parent: str | None = None
    """`RUN@STEP`, or `RUN@latest`: start from this checkpoint of another run in `results`, which may be
    on the same sample sheet. `RUN@merged`, or `RUN@merged-STEP`: from a merge of its checkpoints, with
    new moments of the optimizer. `hub:OWNER/NAME@REVISION`: as model.init.hub. null: start at step 0."""
    tokenizer: Tokenizer = Tokenizer()
    tokenize: Tokenize = Tokenize()
    model: AnyModel = architectures.DEFAULT
    train: Train = Train()
    program: Program | None = None
    # The key in the file is `validate`; a field of that name would hide a method of pydantic.
    validation: ValidateSettings = Field(ValidateSettings(), alias="validate")
    report: Report = Report()
    ids: Ids | None = None

    @field_validator("results", "data")
    @classmethod
    def _plain_folder(cls, folder: str) -> str:
        # In Snakemake, braces in a path are wildcards.
        if re.search(r"[{}\n]", folder):
            raise ValueError(
                f"{shown(folder)} has braces or line breaks, which Snakemake cannot have in a path"
            )
        return folder.rstrip("/") or "/"

    @model_validator(mode="before")
    @classmethod
    def _parent_on_a_hub(cls, values: Any) -> Any:
        """In the column `parent` a family may begin with pretrained weights, which are not a run."""
        name = values.get("parent") if isinstance(values, dict) else None
        if not isinstance(name, str) or not name.startswith(HUB_PARENT):
            return values
        model = values.get("model") or {}
        if not isinstance(model, dict) or model.get("init"):
            raise ValueError(
                f"parent is {name!r}, and model.init is set, too: leave one of them out"
            )
        init = {"hub": name.removeprefix(HUB_PARENT)}
        return {**values, "parent": None, "model": {**model, "init": init}}

    @field_validator("parent")
    @classmethod
    def _parent_has_a_step(cls, parent: str | None) -> str | None:
        if parent is not None and not re.fullmatch(PARENT, parent):
            raise ValueError(
                "must be RUN@STEP, such as base@5000: the name of a run and the step of one of its"
                " checkpoints (ls results/RUN/checkpoints); or RUN@latest, RUN@merged, or"
                " hub:OWNER/NAME@REVISION"
            )
        return parent

    @model_validator(mode="after")
    def _parent_is_another_run(self) -> Self:
        if self.parent and self.parent.partition("@")[0] == self.run:
            raise ValueError(
                f"parent is {self.parent!r}, a checkpoint of this run itself: a run resumes from its"
                " own checkpoints without it; give a new run a name of its own"
            )
        return self

    @model_validator(mode="after")
    def _ids_have_a_tokenizer(self) -> Self:
        formats = [corpus.format for corpus in self.tokenize.corpora.values()]
        of_ids = next((name for name in formats if name in TOKEN_FORMATS), None)
        if of_ids and self.tokenizer.source == "train":
            raise ValueError(
                f"tokenize.format is {of_ids}, whose files hold ids and no text, and"
                " tokenizer.source is train: set tokenizer.source to path or hub, to the tokenizer"
                " that made the ids"
            )
        return self

    @model_validator(mode="after")
    def _one_trainer(self) -> Self:
        given = [name for name in (*OF_FORGES_TRAINER, "parent") if name in self.model_fields_set]
        given = [name for name in given if getattr(self, name) is not None]
        if self.program and given:
            raise ValueError(
                f"program takes the place of Forge's own trainer, and {', '.join(given)} would have no"
                " effect: remove one or the other"
            )
        return self

    @model_validator(mode="after")
    def _model_reads_whole_samples(self) -> Self:
        longest, seq_len = self.model.longest_sample, self.train.seq_len
        if longest is not None and longest < seq_len and not self.model.waits_for_shape:
            raise ValueError(
                f"train.seq_len is {seq_len}, and the {self.model.architecture} has {longest} positions"
                " (model.positions): use shorter samples, or a larger table"
            )
        return self

    def _check_of_plugins(self) -> None:
        for key, section in self.of_plugins.items():
            if self.program and section.IS_OF_TRAINER and section != type(section)():
                raise ValueError(
                    f"{key} is set, and it is for checkpoints of Forge's own trainer: remove {key}, or"
                    " program"
                )
        hooks.check_config(self)

    @model_validator(mode="after")
    def _mix_fits_the_sources(self) -> Self:
        if self.train.mix is not None:
            step = self.parent.partition("@")[2].removeprefix("merged-") if self.parent else "0"
            if step.isdecimal():  # else checked when the step is known
                require_sources(self.train.mix, self.tokenize.sources or (), int(step))
        return self

    @property
    def literal_folders(self) -> list[str]:
        """Directories with an unexpanded `~` or variable, which are there by that name: an earlier
        version made them."""
        return [path for path in (self.results, self.data) if path[:1] == "~" or "$" in path]

    @property
    def starts_from(self) -> str | None:
        """Start of a run without a checkpoint, for people; None for weights that are drawn."""
        init = self.model.init
        return self.parent or (init.name if init else None)

    @property
    def folders(self) -> list[str]:
        """Directories that processes of this run read or write, beside the project's."""
        program = [self.program.source or ".", *self.program.local_inputs] if self.program else []
        return [self.results, self.data, *program]

    @property
    def own_folders(self) -> str:
        """Pattern of absolute paths of the directories in which Forge writes: `results`, and what Forge
        makes in `data`, where a user's own files may be, too."""
        results, data = Path(self.results), Path(self.data)
        if Path.cwd().is_relative_to(results.absolute()):
            results /= self.run  # around it is the project
        made = "(?:(?:tokenizers|tokens|inputs|models)/[0-9a-f]{12}|archives/forge-[0-9]+)"
        return rf"({_either(results)}|({_either(data)})/{made})(/|$)"

    @property
    def goal(self) -> int:
        """The step at which the run is complete; 0 for a program without checkpoints."""
        return self.program.goal_step if self.program else self.train.max_steps

    def to_json(self) -> dict[str, Any]:
        """All keys as plain JSON values, defaults filled in; without those that have no effect."""
        values = self.model_dump(mode="json", by_alias=True)
        unused = OF_FORGES_TRAINER if self.program else ("program",)
        if values["ids"]:
            values["ids"] = {
                name: content_id for name, content_id in values["ids"].items() if content_id
            }
        return {key: value for key, value in values.items() if key not in unused}

    @property
    def of_training(self) -> Self:
        """The same with the defaults of the sections that training does not read: equal for two configs
        that train the same."""
        return type(self)(**self.training_json())

    def training_json(self) -> dict[str, Any]:
        """Values of config.json: all but the sections that training does not read. With keys that were
        removed from the others: a run whose config.json says the same is not due again."""
        values = with_retired(type(self), self.to_json())
        left_out = (*OUTSIDE_TRAINING, *self.of_plugins, *self.RETIRED)
        return {key: value for key, value in values.items() if key not in left_out}


class ResolvedConfig(Config):
    """A config with its ids, as every step of a run takes it and config.json holds it.

    The command line and the workflow make it of a Config once, with `content_ids.resolve`.
    """

    ids: Ids

    def is_in(self, path: Path) -> bool:
        """Return whether config.json, which may be missing, holds this config. Raises DataError where it
        is not JSON."""
        return path.exists() and bool(read_json(path) == self.training_json())

    def write(self, path: Path) -> None:
        """Write config.json. Raises UnfitError when the disk cannot be written."""
        write_json(path, self.training_json())

    def validation_json(self) -> dict[str, Any]:
        """The sections that only validation reads."""
        values = self.to_json()
        return {key: values[key] for key in ("validate", "report")}


def as_recorded(values: Any) -> Any:
    """The JSON of a config that some version of Forge has recorded, without keys that were removed."""
    return without_retired(Config, values) if isinstance(values, dict) else values


def _either(path: Path) -> str:
    """Pattern of a path, as it is named and as links lead."""
    return f"{re.escape(str(path.absolute()))}|{re.escape(str(path.resolve()))}"


# --- reading ------------------------------------------------------------------------------------


def parse_override(argument: str) -> tuple[str, Any]:
    """`--train.max_steps=1000` to ("train.max_steps", 1000); the value is read as YAML."""
    match = re.fullmatch(r"--([A-Za-z_][\w.]*)=(.*)", argument, re.DOTALL)
    if not match:
        raise ConfigError(
            f"cannot read {shown(argument)}",
            fix="overrides look like --train.max_steps=1000; `forge SUBCOMMAND --help` lists the options",
        )
    return match[1], read_cell(match[2])


def apply_overrides(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A copy of the nested `values` with each dotted key set."""
    merged = json.loads(json.dumps(values))
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        parent = merged
        for section in sections:
            if parent.get(section) is None:
                parent[section] = {}
            parent = parent[section]
            if not isinstance(parent, dict):
                raise ConfigError(
                    f"cannot set {dotted}: {section} is not a section, but {shown(parent)}",
                    cause="a value, or JSON whose quotes or brackets do not match",
                )
        parent[key] = value
    return merged


def read_values(path: str | Path) -> dict[str, Any]:
    """The plain values in a YAML or JSON config file. Raises ConfigError."""
    text = read_text(path, "config file")
    try:
        values = read_yaml(text)
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        # The end of the text is on a line of its own.
        lines = text.split("\n")[mark.line : mark.line + 1] if mark else []
        raise ConfigError(
            f"cannot read config file {path}: {describe(err)}",
            cause="a tab in this line: YAML is indented by blanks"
            if "\t" in "".join(lines)
            else "",
            fix="config/README.md explains how values are written",
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} must hold keys and values, not {shown(values)}")
    return values


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> Config:
    """The config in a file, with overrides applied. Raises ConfigError that names every bad key.

    The file may be the workflow's: its key `runs` names the sample sheet, which no single run reads.
    """
    of_run = [folder / "config.json" for folder in (Path(path), Path("results", path))]
    if found := next((file for file in of_run if file.is_file()), None):
        raise ConfigError(
            f"{path} is a run, and this command takes a config", fix=f"name the run's: {found}"
        )
    values = read_values(path)
    values.pop("runs", None)
    use_plugins(values)
    return checked(Config, apply_overrides(values, overrides or {}), str(path))


def use_plugins(values: dict[str, Any]) -> None:
    """Take the keys `plugins` and `plugins_may_change` out of the values of a config that the user has
    named, and import what it names. Raises ConfigError."""
    paths = values.pop("plugins", None) or []
    may_change = values.pop("plugins_may_change", False)
    if not isinstance(may_change, bool):
        raise ConfigError(f"plugins_may_change is {shown(may_change)}: must be true or false")
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(
            f"plugins is {shown(paths)}: must be a list of files, directories and installed plugins",
            fix="plugins: [plugins/pythia]",
        )
    project_plugins.read([expanded(path) for path in paths], may_change=may_change)


def checked(model: type[AnySection], values: dict[str, Any], where: str) -> AnySection:
    """`values` as a section of type `model`. Raises ConfigError that names every bad key and value, with
    the meaning of the keys, or a plugin that the project does not have: those in `ids` of a recorded
    config are imported."""
    ids = values.get("ids") if issubclass(model, Config) else None
    if isinstance(ids, dict) and isinstance(plugins := ids.get("plugins"), dict):
        use_recorded(plugins, where)
    try:
        return model.model_validate(values)
    except ValidationError as err:
        problems = [_problem(model, detail) for detail in err.errors()]
        named = dict.fromkeys(key for _, keys in problems for key in keys)
        meanings = [text for key in named if (text := _place(model, key).meaning)][:MOST_EXPLAINED]
        raise ConfigError(
            f"{where}: " + "\n  ".join(text for text, _ in problems),
            fix="\n         ".join(meanings)
            or "config/README.md, profiles/README.md and docs/plugins list every key with its meaning",
        ) from None


def use_recorded(plugins: dict[str, Any], where: str) -> None:
    """Import the plugins that a record names. where: the record, for errors. The project may not have
    made their copies yet, as in a new clone. Raises ConfigError."""
    if not all(map(project_plugins.is_kept, plugins.values())) and Path(CONFIG).is_file():
        use_plugins(read_values(CONFIG))
    project_plugins.use(plugins, where)


def _problem(model: type[Section], detail: Any) -> tuple[str, list[tuple[str, ...]]]:
    """Message for one error, and the paths of the keys that it is about. detail: of an error of
    pydantic."""
    loc = tuple(str(part) for part in detail["loc"])
    place = _place(model, loc)
    dotted = ".".join(place.names)[:200]
    if detail["type"] == "extra_forbidden":
        *above, unknown = place.names
        where, fields = ".".join(above) or "the top level", _fields(place.section)
        valid = sorted(fields)
        close = _closest(unknown, where, fields)
        path = close.split(".") if "." in close else [*loc[:-1], close]
        return f"unknown key {dotted}{_hint(unknown, where, valid, close)}", [tuple(path)]
    message = detail["msg"].removeprefix("Value error, ")
    if not loc or isinstance(detail["input"], dict):
        named = [tuple(key.split(".")) for key in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", message)]
        if loc:  # at the top level a key without its section may be a word of the sentence
            named += [(*loc, word) for word in re.findall(r"[a-z_0-9]+", message)]
        return f"{dotted}: {message}" if dotted else message, named
    if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
        message += f'; put it in quotes: "{shown(detail["input"])}"'
    return f"{dotted} is {shown(detail['input'])}: {message}", [loc]


class _Place(NamedTuple):
    """Key that a path leads to. section: that holds the last name. names: of the keys on the path."""

    section: Any
    names: list[str]
    meaning: str
    """Of its last key; "" where that is none."""


def _place(model: type[Section], path: Sequence[str]) -> _Place:
    """path: as pydantic names it, which has tags where a key holds one of several sections, or without
    tags."""
    below: Any = model
    section, names, meant = below, [], ""
    for name in path:
        if isinstance(below, dict) and name in below:
            below = below[name]
            continue
        if isinstance(below, dict):
            below = next((one for one in below.values() if name in _fields(one)), below)
        section = below
        names.append(name)
        fields = _fields(section)
        if fields:  # not an entry of a list, which belongs to its key
            text = meaning(section, name) if name in fields else ""
            meant = f"{'.'.join(names)} {text}" if text else ""
        below = section_of_entries(section) or fields.get(name) or section
    return _Place(section, names, meant)


def _closest(unknown: str, where: str, fields: Mapping[str, Any]) -> str:
    """The key that was probably meant: its name among these fields, or the dotted name of one elsewhere;
    "" for none."""
    if alias := ALIASES.get(unknown):
        return alias.removeprefix(f"{where}.")
    if close := difflib.get_close_matches(unknown, fields, n=1):
        return close[0]
    below = (f"{name}.{unknown}" for name, one in fields.items() if unknown in _keys_of(one))
    return next(below, "")


def _keys_of(field: Any) -> set[str]:
    """Keys of a field that is a section, or of all that it may be."""
    sections = field.values() if isinstance(field, dict) else [field]
    return {key for section in sections for key in _fields(section)}


def _hint(unknown: str, where: str, valid: list[str], close: str) -> str:
    """Suggestion for a key that is unknown in a section, and some of its keys."""
    hint = f" (did you mean {close}?)" if close else ""
    if len(valid) <= MOST_KEYS_NAMED:
        return f"{hint}; valid keys of {where}: {', '.join(valid)}"
    near = difflib.get_close_matches(unknown, valid, n=MOST_KEYS_NAMED // 2, cutoff=0)
    return f"{hint}; the nearest of the {len(valid)} keys of {where}: {', '.join(near)}"


def _fields(section: type[BaseModel]) -> dict[str, Any]:
    """Type of each field by its key in files; a Section class for a section, by tag where there are
    several."""
    of_plugins: dict[str, Any] = getattr(section, "sections_of_plugins", dict)()
    return {
        field.alias or name: tagged_sections(field.annotation)
        or section_of(field.annotation)
        or field.annotation
        for name, field in getattr(section, "model_fields", {}).items()
    } | of_plugins


def is_boolean(section: type[Section], dotted: str) -> bool:
    """Return whether the key with this dotted name takes true or false."""
    first, _, rest = dotted.partition(".")
    below = _fields(section).get(first)
    if isinstance(below, dict):
        return any(is_boolean(nested, rest) for nested in below.values())
    return is_boolean(below, rest) if rest and below else bool in (below, *get_args(below))


def is_free(section: type[Section], key: str) -> bool:
    """Return whether this key may change when a run resumes."""
    if section.BOUND is not None:
        return key not in section.BOUND
    return section.model_fields[key].json_schema_extra == FREE
