"""Threat: a model in a notebook that is not the one which was trained, or that has bytes which nobody has
verified; and a directory of somebody else whose files decide what is executed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import pages
from support.live_run import Run
from support.saved import make_digests_right, state_of

import forge as package
from forge.checkpoint import directory, storage
from forge.core import file_list
from forge.core.errors import ConfigError, DataError
from forge.core.files import read_json, write_json
from forge.core.paths import tokens_folder
from forge.data.loader import split
from forge.data.sources import open_tokens
from forge.data.windows import windows_by_source
from forge.trainer import export as export_module
from forge.trainer.models.decoder import Decoder
from forge.trainer.numerics import reference_batch

LOGITS = 1e-5  # equal formulas in another order of sums, fp32
SHARED = ("--train.lr=0.05", "--train.checkpoint_every=6")
SHAPES = {
    "llama": ("--model.heads=4", "--model.kv_heads=2", "--model.tie_embeddings=false"),
    "gpt2": ("--model.architecture=gpt2", "--model.positions=32"),
}


@pytest.fixture(scope="session")
def trained(session_runs) -> dict[str, Run]:
    made = {name: session_runs(f"load-{name}", *SHARED, *shape) for name, shape in SHAPES.items()}
    for started in [run.fork("train") for run in made.values()]:
        outcome = started.end()
        assert outcome.code == 0, outcome.text
    return made


@pytest.fixture(params=[*SHAPES])
def run(request, trained) -> Run:
    return trained[request.param]


@pytest.fixture
def llama(trained) -> Run:
    return trained["llama"]


@pytest.fixture
def own(llama, tmp_path) -> Run:
    """A copy of the run that a test may damage."""
    return llama.copy(tmp_path / "own")


def data_of(run: Run) -> str:
    return run.data.removeprefix("--data=")


def load(run: Run, place: Path | None = None, **options: Any) -> tuple[Decoder, Any]:
    return package.load(place or run.folder, data=data_of(run), **options)


def weights_at(run: Run, step: int) -> dict[str, torch.Tensor]:
    state = state_of(run.paths.checkpoints / f"step-{step:08d}")
    return {
        name.removeprefix("model."): tensor
        for name, tensor in state.items()
        if name.startswith("model.")
    }


def assert_equal(model: Decoder, weights: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def exported(run: Run, to: Path, dtype: str = "fp32") -> Path:
    return export_module.export(run.folder, to, dtype, {"data": data_of(run)})


# --- what is loaded -------------------------------------------------------------------------------


def test_newest_checkpoint_is_loaded_to_the_last_bit_and_another_step_where_it_is_named(run):
    model, tokenizer = load(run)
    assert not model.training and model.context == 16
    assert tokenizer.decode(tokenizer.encode("the word")) == "the word"
    assert_equal(model, weights_at(run, 12))
    older, _ = load(run, step=6)
    assert_equal(older, weights_at(run, 6))
    assert not torch.equal(older.embedding.weight, model.embedding.weight)


def test_checkpoint_may_be_named_by_its_directory_or_by_the_link(llama):
    places = llama.paths.checkpoints
    assert_equal(load(llama, places / "step-00000006")[0], weights_at(llama, 6))
    assert_equal(load(llama, str(places / "latest"))[0], weights_at(llama, 12))


def test_run_is_found_by_its_name_in_the_directory_of_the_project(llama, tmp_path, monkeypatch):
    project = tmp_path / "project"
    (project / "config").mkdir(parents=True)
    values = {"results": str(llama.folder.parent), "data": data_of(llama)}
    (project / "config/config.yaml").write_text(json.dumps(values))
    monkeypatch.chdir(project)
    assert_equal(package.load(llama.folder.name)[0], weights_at(llama, 12))


def test_block_of_the_page_runs_as_it_is_written(llama, tmp_path, monkeypatch, capsys):
    [block] = [b for b in pages.blocks() if (b.page, b.kind) == ("docs/commands.md", "python")]
    llama.copy(tmp_path / "results/base")
    (tmp_path / "data").symlink_to(data_of(llama))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block.text, names)
    assert capsys.readouterr().out.strip()
    assert names["logits"].shape[:2] == (1, len(names["ids"]))


def test_losses_are_those_that_training_recorded(run):
    checkpoint = directory.Checkpoint.open(run.paths.checkpoints / "step-00000012")
    model, _ = load(run)
    tokens = open_tokens(tokens_folder(data_of(run), checkpoint.manifest.lineage.tokens.id))
    inputs, targets = split(reference_batch(windows_by_source(tokens, "val", 16), 0))
    with torch.no_grad():
        loss = float(model(inputs, targets))
    assert loss == pytest.approx(checkpoint.manifest.reference.losses[0], abs=LOGITS)


def test_text_is_that_of_the_samples_of_validation(own):
    assert own.forge("validate").code == 0
    [sample] = read_json(own.paths.validation)["samples"]
    model, tokenizer = load(own)
    ids = model.generate(tokenizer.encode(sample["prompt"]), 4, seed=0)
    assert tokenizer.decode(ids) == sample["text"]


@torch.no_grad()
def test_export_gives_the_same_model_and_logits_of_transformers(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reason = "needs the extra: pip install -e '.[hf]'"
    transformers = pytest.importorskip("transformers", reason=reason)
    folder = exported(run, tmp_path / "out")
    model, tokenizer = package.load(folder)
    assert_equal(model, weights_at(run, 12))
    assert model.context == 16 and not model.training
    text = "12 times the word <|endoftext|> Grüße"
    assert tokenizer.encode(text) == load(run)[1].encode(text)
    assert tokenizer.eos_id == load(run)[1].eos_id
    ids = torch.tensor([tokenizer.encode("the word is 12 times")[:16]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours = model(ids)
    assert ours.abs().max() > 1  # else the tolerance would hold for anything
    assert float((theirs(ids).logits - ours).abs().max()) <= LOGITS


def test_export_of_many_files_in_bf16_is_loaded_with_its_rounded_weights(
    llama, tmp_path, monkeypatch
):
    monkeypatch.setattr(export_module, "FILE_BYTES", 30_000)
    folder = exported(llama, tmp_path / "out", "bf16")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    rounded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert_equal(package.load(folder)[0], {name: t.float() for name, t in rounded.items()})


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16])
def test_type_is_given_by_forges_name_by_torchs_or_as_torch_has_it(run, dtype):
    model, tokenizer = load(run, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    weights = weights_at(run, 12)
    assert_equal(model, {name: tensor.bfloat16() for name, tensor in weights.items()})
    assert len(model.generate(tokenizer.encode("the "), 3)) == 3


# --- what is refused ------------------------------------------------------------------------------


def flip(path: Path, place: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def weights_file(folder: Path) -> tuple[Path, int]:
    """The file and the byte where a matrix of the model begins."""
    index = read_json(folder / "index.json")
    name = next(name for name in index["tensors"] if name.startswith("model."))
    part = index["tensors"][name]["parts"][0]
    return folder / part["file"], part["start"]


def test_flipped_byte_of_the_weights_is_refused_by_name(own):
    path, start = weights_file(own.paths.checkpoints / "step-00000012")
    flip(path, start)
    with pytest.raises(DataError) as caught:
        load(own)
    assert caught.value.what.startswith(f"{path.resolve()} has digest ")
    assert "the manifest says" in caught.value.what
    assert_equal(load(own, step=6)[0], weights_at(own, 6))


def test_index_that_was_changed_is_refused_by_name(own):
    path = own.paths.checkpoints / "step-00000012/index.json"
    text = path.read_text()
    path.write_text(text[:-1] + " ")  # the same JSON, of the same size
    assert json.loads(path.read_text()) == json.loads(text)
    with pytest.raises(DataError, match=r"index\.json has digest"):
        load(own)


def test_bytes_that_change_after_the_first_look_at_the_file_do_not_reach_the_model(
    own, monkeypatch
):
    """A check of digests before reading would find nothing."""
    path, start = weights_file(own.paths.checkpoints / "step-00000012")
    check = file_list.FileList.check

    def then_changed(self: file_list.FileList, name: str, **options: Any) -> None:
        check(self, name, content=True)
        if name == path.name:
            flip(path, start)

    monkeypatch.setattr(file_list.FileList, "check", then_changed)
    with pytest.raises(DataError, match=f"{path.name} has digest"):
        load(own)


def test_weights_of_another_step_with_right_digests_are_refused(own):
    older, newest = directory.committed(own.paths.checkpoints)
    for path in older.glob("*.distcp"):
        (newest / path.name).write_bytes(path.read_bytes())
    make_digests_right(newest)
    with pytest.raises(DataError, match=r"trained\.json has"):
        load(own)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_changed_file_of_an_export_is_refused_by_name(llama, tmp_path, name):
    folder = exported(llama, tmp_path / "out")
    flip(folder / name)
    with pytest.raises(DataError, match=rf"{name} has digest \w+, forge.json says"):
        package.load(folder)


def test_names_in_forge_json_lead_to_no_other_directory(llama, tmp_path):
    folder = exported(llama, tmp_path / "out")
    facts = read_json(folder / "forge.json")
    for name in ("../model.safetensors", "/etc/passwd"):
        write_json(folder / "forge.json", {**facts, "files": {**facts["files"], name: "f" * 64}})
        with pytest.raises(DataError, match="is not a path below the directory"):
            package.load(folder)


def test_checkpoint_that_is_pruned_while_it_is_read_is_said_to_be_gone(own, monkeypatch):
    read = storage.read_tensors

    def prune_then_read(state: Any, folder: Path, *more: Any, **options: Any) -> None:
        shutil.rmtree(folder)
        read(state, folder, *more, **options)

    monkeypatch.setattr(storage, "read_tensors", prune_then_read)
    with pytest.raises(DataError, match="was removed while it was read"):
        load(own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 7}, r"has no checkpoint of step 7\b"),
        ({"dtype": "int8"}, "dtype is 'int8', which the model cannot have"),
        ({"device": "abacus"}, "device is 'abacus', which torch cannot use here"),
        ({"device": "cuda:99"}, "device is 'cuda:99', which torch cannot use here"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(llama, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(llama, **options)
    there = {"step": "the steps 6, 12", "dtype": "fp32, bf16, fp16", "device": "cpu"}
    assert there[next(iter(options))] in caught.value.fix


def test_step_of_an_export_and_run_without_a_checkpoint_are_refused(llama, tmp_path):
    with pytest.raises(ConfigError, match="is the export of one checkpoint, and step is 6"):
        package.load(exported(llama, tmp_path / "out"), step=6)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(llama.paths.config.read_text())
    with pytest.raises(DataError, match="has no checkpoint"):
        load(llama, empty)


def test_tokenizer_that_is_not_in_this_project_is_named_with_the_argument_that_says_where(
    llama, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        package.load(llama.folder)
    assert "is not in data/tokenizers/" in caught.value.what
    assert "data=FOLDER" in caught.value.fix


# --- what is imported -----------------------------------------------------------------------------

IMPORTED = """
import sys
import forge
assert "load" in dir(forge)
assert "torch" not in sys.modules
try:
    forge.load(sys.argv[1])
except forge.load.__globals__["ConfigError"] as err:
    print(err.what)
assert "torch" not in sys.modules
"""


def python(code: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_import_and_a_wrong_name_wait_for_no_torch(tmp_path):
    assert "there is no run nobody" in python(IMPORTED, "nobody", cwd=tmp_path)


def plant(run: Run) -> None:
    """Put Python files into the directories of a run, under names that a loader might import. Each would
    leave a file."""
    ran = run.folder / "RAN"
    names = ("evil", "forge_plugin", "modeling", "tasks", "sitecustomize", "conftest", "torch")
    for name in names:
        for folder in (run.folder, *directory.committed(run.paths.checkpoints)):
            (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\n")


LOADED = """
import sys
import forge
try:
    model, tokenizer = forge.load(sys.argv[1], data=sys.argv[2])
    print(len(model.generate(tokenizer.encode("the "), 2)), "ids")
except Exception as err:
    print(type(err).__name__, err)
"""


def test_directory_of_a_stranger_imports_nothing(own):
    plant(own)
    values = read_json(own.paths.config)
    tasks = {"tasks": ["evil"], "include_path": str(own.folder)}
    write_json(own.paths.config, {**values, "evaluate": tasks, "plugins": ["evil.py"]})
    said = python(LOADED, str(own.folder), data_of(own), cwd=own.folder.parent)
    assert "2 ids" in said, said
    assert not (own.folder / "RAN").exists()


def test_run_of_another_program_is_refused_by_name_and_nothing_of_it_is_run(own):
    plant(own)
    program = {"command": ["python", "evil.py"], "goal": 5, "checkpoints": {}}
    write_json(own.paths.config, {**read_json(own.paths.config), "program": program})
    said = python(LOADED, str(own.folder), data_of(own), cwd=own.folder.parent)
    assert said.startswith(f"ConfigError {own.folder} is a run of another program (`program`)")
    assert not (own.folder / "RAN").exists()


def test_export_of_a_stranger_imports_nothing(llama, tmp_path):
    folder = exported(llama, tmp_path / "out")
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w').close()\n")
    config = {**read_json(folder / "config.json"), "auto_map": {"AutoModel": "modeling_evil.M"}}
    write_json(folder / "config.json", config)
    facts = read_json(folder / "forge.json")
    digests = {name: file_list.digest_file(folder / name) for name in facts["files"]}
    write_json(folder / "forge.json", {**facts, "files": digests})
    assert "2 ids" in python(LOADED, str(folder), data_of(llama), cwd=tmp_path)
    assert not (tmp_path / "RAN").exists()


def test_export_of_another_program_is_refused(llama, tmp_path):
    folder = exported(llama, tmp_path / "out")
    facts = read_json(folder / "forge.json")
    kept = {name: digest for name, digest in facts["files"].items() if name != "config.json"}
    write_json(folder / "forge.json", {**facts, "files": kept})
    with pytest.raises(DataError, match="not an export of Forge's own trainer"):
        package.load(folder)
