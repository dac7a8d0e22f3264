"""An export must be the model that was trained: a wrong rotary convention, epsilon or head count, or
a tokenizer that adds a token, loads without a word and only writes worse text.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from support.live_run import Outcome, Run, forge
from support.manifests import write_as_another_program
from support.saved import make_digests_right
from tokenizers import Tokenizer

from forge.attestation.verify import STATEMENT
from forge.checkpoint import directory, resume, storage
from forge.checkpoint.manifest import MANIFEST
from forge.core.config import Config
from forge.core.files import digest_file, read_json, write_json
from forge.core.paths import tokenizer_folder
from forge.data.tokenizer import LoadedTokenizer, load_tokenizer
from forge.trainer import export as verb
from forge.trainer.models.decoder import Decoder, make_decoder

# A rate that makes weights large within 12 steps, so that logits differ where anything does.
GROUPED = ("--model.heads=4", "--model.kv_heads=2", "--train.lr=0.05", "--train.checkpoint_every=6")
UNTIED = (
    *GROUPED,
    "--model.tie_embeddings=false",
    "--model.rope_theta=500",
    "--model.norm_eps=1e-3",
)
# Equal formulas in another order of sums, fp32; logits are of size 10.
LOGITS = 1e-5

TEXTS = ("the word is 12 times the word", "", "Grüße,\n\t世界 🙂  twice", "times times", " x")


@pytest.fixture(scope="session")
def trained(session_runs) -> dict[str, Run]:
    made = {"tied": session_runs("tied", *GROUPED), "untied": session_runs("untied", *UNTIED)}
    for started in [run.fork("train") for run in made.values()]:
        outcome = started.end()
        assert outcome.code == 0, outcome.text
    return made


@pytest.fixture(params=["tied", "untied"])
def run(request, trained) -> Run:
    return trained[request.param]


@pytest.fixture
def tied(trained) -> Run:
    return trained["tied"]


@pytest.fixture
def own(tied, tmp_path) -> Run:
    """A copy of the tied run that a test may damage."""
    return tied.copy(tmp_path / "own")


def export(run: Run, target: Path, *more: str) -> Outcome:
    return forge("export", str(run.folder), f"--to={target}", run.data, *more)


def exported(run: Run, target: Path, *more: str) -> Path:
    outcome = export(run, target, *more)
    assert outcome.code == 0, outcome.text
    return target


def stored(checkpoint: directory.Checkpoint) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint by its name in the model."""
    index = storage.SafeReader(checkpoint.folder).read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if name.startswith("model.")
    }
    storage.read_tensors(state, checkpoint.folder, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def latest(run: Run) -> directory.Checkpoint:
    found = resume.latest(run.paths)
    assert found
    return found


def config_of(run: Run) -> Config:
    return Config.model_validate(latest(run).manifest.lineage.config.to_json())


def tokenizer_of(run: Run) -> LoadedTokenizer:
    config = config_of(run)
    return load_tokenizer(tokenizer_folder(config.data, config.ids.tokenizer))


def ours(run: Run) -> Decoder:
    model = make_decoder(config_of(run).model, tokenizer_of(run).vocab_size).to_empty(device="cpu")
    model.load_state_dict(stored(latest(run)))
    return model.eval()


# --- the files ------------------------------------------------------------------------------------


def test_every_weight_is_the_checkpoints_to_the_last_bit(run, tmp_path):
    found = load_file(exported(run, tmp_path / "out") / "model.safetensors")
    wanted = stored(latest(run))
    assert sorted(found) == sorted(wanted)
    assert ("lm_head.weight" in found) == (run.folder.name == "untied")
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)), name


def test_bf16_is_each_weight_rounded(tied, tmp_path):
    folder = exported(tied, tmp_path / "out", "--dtype=bf16")
    found = load_file(folder / "model.safetensors")
    for name, tensor in stored(latest(tied)).items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name
    assert read_json(folder / "config.json")["dtype"] == "bfloat16"


def test_many_files_hold_each_weight_once_and_their_index_says_where(tied, tmp_path, monkeypatch):
    monkeypatch.setattr(verb, "FILE_BYTES", 30_000)
    folder = exported(tied, tmp_path / "out")
    index = read_json(folder / "model.safetensors.index.json")
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    wanted = stored(latest(tied))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        content = load_file(folder / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == set(
            content
        )
        size = sum(tensor.nbytes for tensor in content.values())
        assert size <= 30_000 or len(content) == 1
        assert not found.keys() & content.keys()
        found |= content
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    total = sum(tensor.numel() for tensor in wanted.values())
    assert index["metadata"] == {"total_parameters": total, "total_size": 4 * total}


def test_export_names_its_lineage_and_every_file(tied, tmp_path):
    folder = exported(tied, tmp_path / "out")
    facts = read_json(folder / verb.MANIFEST)
    lineage = latest(tied).manifest.lineage
    assert facts["weights_digest"] == tied.weights_digest()
    assert facts["checkpoint_digest"] == digest_file(latest(tied).folder / MANIFEST)
    assert (facts["run"], facts["step"], facts["dtype"]) == ("tied", 12, "fp32")
    assert facts["config_digest"] == lineage.config_digest
    assert facts["tokens"] == lineage.tokens.to_json()
    assert facts["files"] == {
        path.name: digest_file(path)
        for path in folder.iterdir()
        if path.name not in (verb.MANIFEST, verb.CARD, STATEMENT)
    }


def test_equal_checkpoints_give_equal_bytes(tied, tmp_path):
    first, second = exported(tied, tmp_path / "one"), exported(tied, tmp_path / "two")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_group_may_read_what_the_umask_lets_it(tied, tmp_path):
    folder = exported(tied, tmp_path / "out")
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(modes.values()) == {folder.stat().st_mode & 0o666}, modes


def test_card_has_the_validation_loss_of_this_checkpoint_only(own, tmp_path):
    card = (exported(own, tmp_path / "before") / verb.CARD).read_text()
    assert "# tied, step 12" in card and "not validated" in card
    outcome = own.forge("validate")
    assert outcome.code == 0, outcome.text
    verdict = read_json(own.paths.validation)
    card = (exported(own, tmp_path / "after") / verb.CARD).read_text()
    assert f"{verdict['loss']:.4f} nats" in card
    for changed in ({"status": "invalid"}, {"checkpoint_digest": "another"}):
        write_json(own.paths.validation, {**verdict, **changed})
        folder = exported(own, tmp_path / "-".join(changed))
        assert "not validated" in (folder / verb.CARD).read_text()


# --- where it goes --------------------------------------------------------------------------------


def test_export_goes_into_the_runs_folder_and_again_there_is_nothing_to_do(own):
    folder = own.folder / "export" / "step-00000012"
    outcome = forge("export", str(own.folder), own.data)
    assert outcome.code == 0 and str(folder) in outcome.text
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(path.name for path in (own.folder / "export").iterdir()) == [folder.name]
    again = forge("export", str(own.folder), own.data)
    assert again.code == 0 and "nothing to do" in again.text
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_named_checkpoint_is_exported_beside_the_newest(own):
    older = directory.committed(own.paths.checkpoints)[0]
    assert forge("export", str(older), own.data).code == 0
    assert forge("export", str(own.folder), own.data).code == 0
    steps = [
        read_json(folder / verb.MANIFEST)["step"]
        for folder in sorted((own.folder / "export").iterdir())
    ]
    assert steps == [6, 12]


def test_record_of_the_export_stays_that_of_the_newest_checkpoint(own):
    assert forge("export", str(own.folder), own.data).code == 0
    of_newest = read_json(own.paths.exported)
    assert of_newest["step"] == 12
    older, newest = directory.committed(own.paths.checkpoints)
    assert forge("export", str(older), own.data).code == 0
    assert read_json(own.paths.exported) == of_newest
    own.paths.exported.unlink()
    assert forge("export", str(newest), own.data).code == 0
    assert read_json(own.paths.exported) == of_newest


def test_checkpoint_copied_out_of_its_run_needs_a_place_to_go(tied, tmp_path):
    alone = tmp_path / "alone"
    shutil.copytree(latest(tied).folder, alone)
    outcome = forge("export", str(alone), tied.data)
    assert outcome.code == 78 and "--to FOLDER" in outcome.text
    assert forge("export", str(alone), f"--to={tmp_path / 'out'}", tied.data).code == 0
    weights = "model.safetensors"
    wanted = exported(tied, tmp_path / "wanted") / weights
    assert (tmp_path / "out" / weights).read_bytes() == wanted.read_bytes()


def test_what_a_killed_export_left_is_replaced(tied, tmp_path):
    left = tmp_path / f"{directory.TEMPORARY}out"
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    exported(tied, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


# --- errors ---------------------------------------------------------------------------------------


def flip_a_byte(run: Run) -> None:
    path = next(latest(run).folder.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_all_checkpoints(run: Run) -> None:
    shutil.rmtree(run.paths.checkpoints)


def mix_in_another_step(run: Run) -> None:
    """With the right digests: only trained.json knows better."""
    older, newest = directory.committed(run.paths.checkpoints)
    for path in older.glob("*.distcp"):
        shutil.copy(path, newest)
    make_digests_right(newest)


def claim_another_shape(run: Run) -> None:
    lineage = latest(run).manifest.lineage.to_json()
    lineage["config"]["model"]["ffn_dim"] = 128
    write_as_another_program(latest(run).folder, lineage=lineage)


def name_another_tokenizer(run: Run) -> None:
    lineage = latest(run).manifest.lineage.to_json()
    lineage["tokenizer"]["digest"] = "f" * 64
    write_as_another_program(latest(run).folder, lineage=lineage)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, "has digest"),
        (lose_all_checkpoints, "has no checkpoint"),
        (mix_in_another_step, "trained.json has"),
        (claim_another_shape, "are not those of its config"),
        (name_another_tokenizer, "was trained with ffffffffffff"),
    ],
)
def test_what_is_corrupt_or_missing_is_refused_and_leaves_nothing(own, tmp_path, damage, message):
    damage(own)
    outcome = export(own, tmp_path / "place" / "out")
    assert outcome.code == 65, outcome.text
    assert message in outcome.text
    assert list((tmp_path / "place").glob("*")) == []


def test_run_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = forge("export", "nobody")
    assert outcome.code == 78 and "there is no run nobody" in outcome.text


def test_data_that_was_moved_is_named_and_found_where_the_user_says(tied, tmp_path):
    config = config_of(tied)
    outcome = export(tied, tmp_path / "out", f"--data={tmp_path}")
    assert outcome.code == 65 and "--data=FOLDER" in outcome.text
    name = f"tokenizers/{config.ids.tokenizer}"
    shutil.copytree(Path(config.data) / name, tmp_path / name)
    assert export(tied, tmp_path / "out", f"--data={tmp_path}").code == 0


def test_override_that_changes_the_model_is_refused(tied, tmp_path):
    outcome = export(tied, tmp_path / "out", "--model.rope_theta=77")
    assert outcome.code == 78 and "model.rope_theta" in outcome.text


def a_folder_of_others(target: Path, _run: Run) -> None:
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")


def a_file(target: Path, _run: Run) -> None:
    target.write_text("years of work")


def another_steps_export(target: Path, run: Run) -> None:
    older = directory.committed(run.paths.checkpoints)[0]
    assert forge("export", str(older), f"--to={target}", run.data).code == 0


def this_export_in_bf16(target: Path, run: Run) -> None:
    exported(run, target, "--dtype=bf16")


def this_export_damaged(target: Path, run: Run) -> None:
    with open(exported(run, target) / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")


@pytest.mark.parametrize(
    "obstacle",
    [a_folder_of_others, a_file, another_steps_export, this_export_in_bf16, this_export_damaged],
)
def test_target_in_the_way_is_refused_and_left_as_it_is(tied, tmp_path, obstacle):
    target = tmp_path / "out"
    obstacle(target, tied)
    before = content_of(tmp_path)
    outcome = export(tied, target)
    assert outcome.code == 78, outcome.text
    assert str(target) in outcome.text and "--to" in outcome.text
    assert content_of(tmp_path) == before


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_target_below_a_file_is_unfit(tied, tmp_path):
    (tmp_path / "file").write_text("in the way")
    outcome = export(tied, tmp_path / "file" / "out")
    assert outcome.code == 69 and "a file is where a directory is expected" in outcome.text


def test_disk_that_takes_no_more_is_unfit_and_nothing_is_left_of_the_export(tied, tmp_path):
    # A limit on the size of files stands for the full disk: the write really fails.
    code = (
        "import resource, sys; from forge.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "raise SystemExit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "export",
            str(tied.folder),
            f"--to={tmp_path / 'out'}",
            tied.data,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 69, done.stderr
    assert "cannot write model.safetensors" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_pruned_while_it_is_read_is_said_to_be_gone(own, tmp_path, monkeypatch):
    read = storage.read_tensors

    def prune_then_read(state: dict[str, Any], folder: Path, **options: Any) -> None:
        shutil.rmtree(folder)
        read(state, folder, **options)

    monkeypatch.setattr(storage, "read_tensors", prune_then_read)
    outcome = export(own, tmp_path / "out")
    assert outcome.code == 65, outcome.text
    assert "was removed while it was read" in outcome.text
    assert "train.keep_last" in outcome.text


# --- as transformers reads it ---------------------------------------------------------------------


@pytest.fixture
def transformers(monkeypatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[hf]'")


@torch.no_grad()
def test_logits_of_transformers_are_ours(run, tmp_path, transformers, monkeypatch):
    ids = torch.randint(
        tokenizer_of(run).vocab_size, (3, 16), generator=torch.Generator().manual_seed(1)
    )
    wanted = ours(run)(ids)
    assert wanted.abs().max() > 1  # else the tolerance would hold for anything
    monkeypatch.setattr(verb, "FILE_BYTES", 30_000)  # so that the index is read, too
    folder = exported(run, tmp_path / "out")
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert not any(said.values()), said
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.float32}
    assert theirs.config.tie_word_embeddings == (run.folder.name == "tied")
    assert float((theirs(ids).logits - wanted).abs().max()) <= LOGITS


@torch.no_grad()
def test_bf16_export_is_loaded_as_bf16(tied, tmp_path, transformers):
    folder = exported(tied, tmp_path / "out", "--dtype=bf16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.bfloat16}


def test_generated_text_ends_where_the_tokenizer_says(tied, tmp_path, transformers):
    folder = exported(tied, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = tokenizer_of(tied)
    eos_ids = (model.generation_config.eos_token_id, model.config.eos_token_id)
    assert eos_ids == (tokenizer.eos_id, tokenizer.eos_id)
    assert model.config.bos_token_id is None  # Llama's default is an id of ours that means another
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == tokenizer.eos_token


def test_ids_of_transformers_are_ours(tied, tmp_path, transformers):
    theirs = transformers.AutoTokenizer.from_pretrained(exported(tied, tmp_path / "out"))
    tokenizer = tokenizer_of(tied)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs(tokenizer.eos_token)["input_ids"] == [tokenizer.eos_id]  # as its users expect


def foreign_tokenizer(own_tokenizer: LoadedTokenizer, folder: Path) -> Path:
    """Ours as others publish theirs: cuts and pads, begins every text with a token, names a class."""
    parts = json.loads(own_tokenizer.tokenizer.to_str())
    start = {"id": own_tokenizer.eos_id, "type_id": 0}
    parts["truncation"] = {
        **{"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    }
    parts["padding"] = {
        **{"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": start["id"], "pad_type_id": 0, "pad_token": own_tokenizer.eos_token},
    }
    first = {"SpecialToken": {"id": own_tokenizer.eos_token, "type_id": 0}}
    second = {"Sequence": {"id": "A", "type_id": 0}}
    parts["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, second],
        "pair": [first, second, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            own_tokenizer.eos_token: {
                "id": own_tokenizer.eos_token,
                "ids": [own_tokenizer.eos_id],
                "tokens": [own_tokenizer.eos_token],
            }
        },
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    settings = {"tokenizer_class": "LlamaTokenizerFast", "eos_token": own_tokenizer.eos_token}
    write_json(folder / "tokenizer_config.json", {**settings, "add_bos_token": True})
    return folder / "tokenizer.json"


def test_foreign_tokenizer_gives_the_ids_of_training(tied, tiny_project, tmp_path, transformers):
    """It adds a token to each text and cuts it; training asked for neither."""
    path = foreign_tokenizer(tokenizer_of(tied), tmp_path / "foreign")
    values = yaml.safe_load((tiny_project / "config.yaml").read_text())
    values["tokenizer"] = {"source": "path", "path": str(path)}
    values["data"] = str(tmp_path / "data")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    overrides = (f"--results={tmp_path / 'results'}", "--run=foreign", "--train.max_steps=1")
    run = replace(tied, config=config, folder=tmp_path / "results/foreign", overrides=overrides)
    for step in ("tokenizer", "tokenize", "train"):
        outcome = run.forge(step)
        assert outcome.code == 0, outcome.text
    folder = exported(run, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))  # as other programs read it
    for text in TEXTS:
        ids = tokenizer_of(run).encode(text)
        assert theirs(text)["input_ids"] == plain.encode(text).ids == ids
    # transformers 4 takes a class of its own for Llama where another is not named.
    settings = read_json(folder / "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_files_say_that_they_hold_torch_weights(tied, tmp_path):
    """Older releases of transformers refuse a file without it."""
    folder = exported(tied, tmp_path / "out")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
