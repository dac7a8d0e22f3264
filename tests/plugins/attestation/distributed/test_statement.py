"""What a stranger gets with the weights must tell the truth of the run, and no change of it may pass."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import mutations
from support.live_run import TWO_RANKS, Run, forge
from support.statements import make_consistent

from forge.attestation import verify
from forge.core.errors import DataError
from forge.core.files import digest_bytes, digest_file, read_json, write_json
from forge.core.process import hostname
from forge.plugins.attestation.chain import Predicate

pytestmark = pytest.mark.all

VERIFIER = Path(verify.__file__)
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="session")
def trained(session_runs: Callable[..., Run]) -> Run:
    """12 steps in two launches of two ranks; checkpoints at 3, 6, 9 and 12, of which two are left."""
    run = session_runs("stated", "--train.checkpoint_every=3", "--train.keep_last=2")
    for goal in (6, 12):
        outcome = run.fork("train", f"--train.max_steps={goal}", *TWO_RANKS).end()
        assert outcome.code == 0, outcome.text
    assert run.forge("validate").code == 0
    return run


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("own", "other"):
        assert forge("key", str(folder / name)).code == 0
    return {name: folder / name for name in ("own", "other", "own.pub", "other.pub")}


@pytest.fixture(scope="session")
def signed(trained: Run, keys: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(trained, tmp_path_factory.mktemp("signed") / "model", f"--sign={keys['own']}")


@pytest.fixture
def export(signed: Path, tmp_path: Path) -> Path:
    """A copy of the signed export, to be damaged."""
    return Path(shutil.copytree(signed, tmp_path / "model"))


def exported(run: Run, to: Path, *more: str) -> Path:
    """An export with a full statement: the project of these tests has absolute paths."""
    outcome = forge("export", str(run.folder), f"--to={to}", "--full", run.data, *more)
    assert outcome.code == 0, outcome.text
    return to


def statement_of(folder: Path) -> dict[str, Any]:
    content = read_json(folder / verify.STATEMENT)
    assert isinstance(content, dict)
    return content


def links_of(folder: Path) -> dict[str, Any]:
    return {link["link"]: link for link in statement_of(folder)["predicate"]["chain"]}


def edit(folder: Path, change: Change, *, consistently: bool = False) -> None:
    """Change the statement. consistently: with right digests again, as somebody does who knows how they
    are made."""
    content = statement_of(folder)
    change(content)
    if consistently:
        make_consistent(content)
    write_json(folder / verify.STATEMENT, content)


def unsign(folder: Path) -> None:
    for name in verify.SIGNATURES:
        (folder / name).unlink()


def refusal(folder: Path, key: Path | None = None) -> str:
    with pytest.raises(verify.VerificationError) as refused:
        verify.verify(folder, key, say=lambda line: None)
    return str(refused.value)


# --- what it says -----------------------------------------------------------------------------------


def test_chain_goes_from_the_text_files_to_the_validation(trained, signed, tiny_project):
    links = links_of(signed)
    texts = {file["name"]: file["blake3"] for file in links["texts"]["files"][""]}
    assert texts == {str(p): digest_file(p) for p in sorted((tiny_project / "corpus").iterdir())}
    [source] = links["tokens"]["sources"].values()
    assert source["tokenizer"] == links["tokenizer"]["blake3"]
    values = json.dumps(links["config"]["values"], sort_keys=True, separators=(",", ":"))
    assert links["config"]["blake3"] == digest_bytes(values.encode())
    of_run = read_json(trained.paths.trained)
    assert links["config"]["blake3"] == of_run["config_digest"]
    assert links["export"]["weights"] == of_run["weights_digest"]
    validation = read_json(trained.paths.validation)
    assert links["validation"]["loss"] == validation["loss"]
    assert links["validation"]["status"] == "valid"
    assert links["code"]["forge"] == read_json(signed / "forge.json")["code"]


def test_pruned_checkpoints_are_listed_with_their_digests(trained, signed):
    saved = links_of(signed)["checkpoints"]["saved"]
    assert [(one["step"], one["is_kept"]) for one in saved] == [
        *((3, False), (6, False), (9, True), (12, True))
    ]
    assert all(one["blake3"] for one in saved)
    assert [save["digest"] for save in trained.events("save")] == [one["blake3"] for one in saved]


def test_each_launch_is_listed_with_its_end(signed):
    launches = links_of(signed)["launches"]["launches"]
    assert [(one["world_size"], one["resumed_from"], one["last_step"]) for one in launches] == [
        *((2, 0, 6), (2, 6, 12))
    ]
    assert all(one["outcome"] == "completed" for one in launches)


def test_config_has_no_directories_and_no_trackers(signed):
    values = links_of(signed)["config"]["values"]
    assert not {"run", "results", "data", "tracking"} & values.keys()
    assert values["train"]["max_steps"] == 12


def test_environment_has_every_installed_package(signed):
    packages = links_of(signed)["environment"]["packages"]
    # Of a new process: one that has imported setuptools finds the packages in its _vendor, too.
    found = (
        "import json, importlib.metadata as m\n"
        "print(json.dumps({one.name: one.version for one in m.distributions()}))"
    )
    done = subprocess.run([sys.executable, "-c", found], check=True, capture_output=True)
    assert packages == json.loads(done.stdout)


def test_subjects_are_all_other_files(signed):
    names = {subject["name"] for subject in statement_of(signed)["subject"]}
    assert names == {path.name for path in signed.iterdir()} - set(verify.OURS)


def test_statement_is_of_its_documented_classes(signed):
    Predicate.model_validate(statement_of(signed)["predicate"])


def test_statement_and_model_card_agree(signed):
    card, links = (signed / "README.md").read_text(), links_of(signed)
    for digest in (
        links["export"]["weights"],
        links["export"]["checkpoint"],
        links["config"]["blake3"],
        links["tokens"]["blake3"],
    ):
        assert digest[:12] in card
    assert f"{links['validation']['loss']:.4f}" in card


def test_same_export_again_has_the_same_statement_and_signature(trained, signed, keys):
    before = {path.name: path.read_bytes() for path in signed.iterdir()}
    exported(trained, signed, f"--sign={keys['own']}")
    assert {path.name: path.read_bytes() for path in signed.iterdir()} == before


def test_export_after_a_validation_renews_the_statement_and_drops_the_signature(
    trained, keys, tmp_path
):
    run = trained.copy(tmp_path / "own")
    run.paths.validation.unlink()
    folder = exported(run, tmp_path / "model", f"--sign={keys['own']}")
    assert links_of(folder)["validation"]["status"] is None
    assert run.forge("validate").code == 0
    exported(run, folder)
    assert links_of(folder)["validation"]["status"] == "valid"
    assert not any((folder / name).exists() for name in verify.SIGNATURES)
    verify.verify(folder)


@pytest.mark.parametrize("name", ["evil.py", ".github/run.yml"])
def test_files_that_others_put_into_an_export_are_not_signed(trained, keys, tmp_path, name):
    folder = exported(trained, tmp_path / "model")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("import os\n")
    done = forge(
        "export", str(trained.folder), f"--to={folder}", trained.data, f"--sign={keys['own']}"
    )
    assert done.code == 78, done.text
    assert f"'{name}'" in done.text
    assert not (folder / verify.ENVELOPE).exists()


def test_changed_config_with_a_right_digest_in_forge_json_is_not_signed(trained, keys, tmp_path):
    folder = exported(trained, tmp_path / "model")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "auto_map": {"AutoModel": "evil.Evil"}})
    facts = read_json(folder / "forge.json")
    facts["files"]["config.json"] = digest_file(folder / "config.json")
    write_json(folder / "forge.json", facts)
    done = forge(
        "export", str(trained.folder), f"--to={folder}", trained.data, f"--sign={keys['own']}"
    )
    assert done.code == 78, done.text
    assert "'config.json'" in done.text


def test_tokens_that_are_gone_are_said_to_be_and_their_digest_stays(trained, tmp_path):
    data = Path(trained.data.removeprefix("--data="))
    moved = shutil.copytree(data, tmp_path / "data")
    shutil.rmtree(moved / "tokens")
    outcome = forge("export", str(trained.folder), f"--to={tmp_path / 'model'}", f"--data={moved}")
    assert outcome.code == 0, outcome.text
    assert "is no longer there" in outcome.text
    links = links_of(tmp_path / "model")
    assert links["texts"]["files"] is None
    assert links["tokens"]["blake3"] == read_json(tmp_path / "model/forge.json")["tokens"]["digest"]
    verify.verify(tmp_path / "model")


def test_absolute_paths_that_a_full_statement_publishes_are_said(trained, tiny_project, tmp_path):
    outcome = forge(
        "export", str(trained.folder), f"--to={tmp_path / 'model'}", "--full", trained.data
    )
    assert outcome.code == 0, outcome.text
    [named] = re.findall(r"it has (\d+) absolute paths, such as (\S+), which", outcome.text)
    [files] = links_of(tmp_path / "model")["texts"]["files"].values()
    paths = {file["name"] for file in files}
    assert int(named[0]) >= len(paths)
    assert named[1].startswith(str(tiny_project.parent))


def test_export_publishes_no_path_host_user_package_or_time_of_the_clock(
    trained, tiny_project, tmp_path, capsys
):
    model = tmp_path / "model"
    outcome = forge("export", str(trained.folder), f"--to={model}", trained.data)
    assert outcome.code == 0, outcome.text
    assert re.search(r"of \d+ absolute paths, such as /\S+, it has the last names", outcome.text)
    published = b"\0".join(path.read_bytes() for path in model.iterdir())
    secrets = [str(tiny_project.parent), str(trained.folder.parent), hostname(), getpass.getuser()]
    assert not [
        one for one in secrets if re.search(rb"\b%s\b" % re.escape(one.encode()), published)
    ]
    links = links_of(model)
    assert links["environment"]["packages"] is None
    launches = links["launches"]["launches"]
    assert launches[0]["started"] == 0.0
    assert 0 < launches[0]["ended"] <= launches[1]["started"] < launches[1]["ended"] < 3600
    names = [file["name"] for file in links["texts"]["files"][""]]
    assert names[0] == ".../corpus/00.txt"
    assert links["config"]["values"] is None
    assert links["config"]["without_folders"]["tokenize"]["inputs"] == [".../corpus"]
    verified = forge("verify", str(model), f"--data={tiny_project / 'corpus'}")
    assert verified.code == 0, verified.text
    assert "give the tokenizer and 2 shards of the statement" in capsys.readouterr().out


def test_full_statement_that_is_there_stays(trained, keys, tmp_path):
    """Certificates are of it."""
    model = exported(trained, tmp_path / "model", f"--sign={keys['own']}")
    before = {path.name: digest_file(path) for path in model.iterdir()}
    outcome = forge("export", str(trained.folder), f"--to={model}", trained.data)
    assert outcome.code == 0, outcome.text
    assert "it stays, with packages, times and full paths" in outcome.text
    assert {path.name: digest_file(path) for path in model.iterdir()} == before


# --- who may believe it -----------------------------------------------------------------------------


def test_right_export_is_verified_and_authorship_only_by_a_key_that_is_named(signed, keys, capsys):
    verify.verify(signed)
    assert "you named no public key: authorship NOT verified" in capsys.readouterr().out
    verify.verify(signed, keys["own.pub"])
    said = capsys.readouterr().out
    assert "NOT" not in said
    assert f"the key in {keys['own.pub']}" in said


def test_verifier_runs_alone_in_an_empty_environment(signed, tmp_path):
    copy = shutil.copy(VERIFIER, tmp_path / "verify.py")
    # -I -S: neither this project nor any package can be imported.
    command = [sys.executable, "-I", "-S", copy, str(signed)]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert statement_of(signed)["predicate"]["sha256"] in done.stdout
    command += ["--key", copy]
    with_key = subprocess.run(command, check=False, capture_output=True, text=True)
    assert with_key.returncode == 65
    assert "pip install cryptography" in with_key.stderr
    assert "Traceback" not in with_key.stderr


@pytest.fixture(scope="session")
def model_signing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its command, in an environment of its own: it needs other packages than Forge."""
    environment = tmp_path_factory.mktemp("model-signing")
    uv = Path(sys.executable).with_name("uv")
    # Without pyopenssl model-signing 1.1.1 fails at import with sigstore 4.5.
    packages = ["model-signing==1.1.1", "pyopenssl"]
    commands = (
        [uv, "venv", "--quiet", "--python", sys.executable, environment],
        [uv, "pip", "install", "--quiet", "--python", environment / "bin/python", *packages],
    )
    for command in commands:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            pytest.skip(f"model-signing cannot be installed here: {done.stderr[-500:]}")
    return environment / "bin/model_signing"


def test_model_signing_verifies_the_files(signed, export, keys, model_signing):
    def verified(folder: Path) -> bool:
        command = [model_signing, "verify", "key", folder, "--signature", folder / "model.sig"]
        command += ["--public_key", keys["own.pub"]]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    assert verified(signed)
    (export / "config.json").write_text("{}")
    assert not verified(export)


@pytest.mark.parametrize("name", ["README.md", "config.json", "forge.json", "model.safetensors"])
def test_changed_byte_is_refused_with_the_name_of_its_file(export, name):
    data = bytearray((export / name).read_bytes())
    data[len(data) // 2] ^= 1
    (export / name).write_bytes(data)
    assert f"'{name}' has SHA-256" in refusal(export)


def test_changed_byte_of_the_statement_is_refused(export):
    path = export / verify.STATEMENT
    path.write_bytes(path.read_bytes().replace(b'"step": 12', b'"step": 13', 1))
    assert "is not what was signed" in refusal(export)
    unsign(export)
    assert "was edited" in refusal(export)


def test_swapped_tokenizer_is_refused(export, tiny_project):
    content = json.loads((export / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 299, "content": "<x>"})
    (export / "tokenizer.json").write_text(json.dumps(content))
    assert "'tokenizer.json' has SHA-256" in refusal(export)


def test_missing_and_added_files_are_refused(export):
    (export / "generation_config.json").unlink()
    (export / "modeling_llama.py").write_text("import os\n")
    said = refusal(export)
    assert "'generation_config.json' is missing" in said
    assert "'modeling_llama.py' is not in the statement" in said


def test_statement_of_another_run_is_refused(export, session_runs, keys, tmp_path):
    other = session_runs("stated-other", "--train.seed=5")
    assert other.fork("train", *TWO_RANKS).end().code == 0
    folder = exported(other, tmp_path / "other", f"--sign={keys['own']}")
    for name in verify.OURS:
        shutil.copy(folder / name, export / name)
    assert "'model.safetensors' has SHA-256" in refusal(export, keys["own.pub"])


def test_statement_made_to_fit_the_files_of_another_run_is_refused(export, trained, tmp_path):
    before = statement_of(export)
    unsign(export)

    def exchange(content: dict[str, Any]) -> None:
        links = {link["link"]: link for link in content["predicate"]["chain"]}
        links["config"]["blake3"] = "0" * 64

    edit(export, exchange, consistently=True)
    assert statement_of(export) != before
    assert "is of another export: config_digest" in refusal(export)


def test_removed_launch_is_refused(export, keys):
    def remove(content: dict[str, Any]) -> None:
        links = {link["link"]: link for link in content["predicate"]["chain"]}
        links["launches"]["launches"].pop(0)

    edit(export, remove)
    assert "is not what was signed" in refusal(export)
    unsign(export)
    assert "was edited" in refusal(export)
    edit(export, remove, consistently=True)  # what only a signature, or a printed digest, finds
    assert "not signed" in refusal(export, keys["own.pub"])


def test_link_that_is_removed_moved_or_changed_is_named(export):
    unsign(export)

    def chain_of(content: dict[str, Any]) -> list[dict[str, Any]]:
        chain: list[dict[str, Any]] = content["predicate"]["chain"]
        return chain

    def restate(change: Change) -> str:
        saved = (export / verify.STATEMENT).read_bytes()

        def with_digest(content: dict[str, Any]) -> None:
            change(content)
            content["predicate"]["sha256"] = verify.statement_digest(content)

        edit(export, with_digest)
        said = refusal(export)
        (export / verify.STATEMENT).write_bytes(saved)
        return said

    assert "the chain has the links" in restate(lambda c: chain_of(c).pop(3))
    assert "the chain has the links" in restate(lambda c: chain_of(c).reverse())
    said = restate(lambda c: chain_of(c)[3].update(blake3="0" * 64))
    assert "link code names" in said


def test_tokens_of_another_tokenizer_are_refused(export):
    unsign(export)

    def exchange(content: dict[str, Any]) -> None:
        links = {link["link"]: link for link in content["predicate"]["chain"]}
        links["tokens"]["sources"][""]["tokenizer"] = "0" * 64

    edit(export, exchange, consistently=True)
    assert "made by another tokenizer" in refusal(export)


def test_checkpoint_that_the_run_never_saved_is_refused(export):
    unsign(export)

    def forget(content: dict[str, Any]) -> None:
        links = {link["link"]: link for link in content["predicate"]["chain"]}
        links["checkpoints"]["saved"].pop()

    edit(export, forget, consistently=True)
    assert "not among those that the run has saved" in refusal(export)


def test_body_signed_again_with_another_key_is_refused(trained, export, keys, tmp_path):
    edit(export, lambda content: content["predicate"].update(forge="9"), consistently=True)
    from forge.plugins.attestation.signing import load_key, sign

    unsign(export)
    sign(export, load_key(keys["other"]))
    assert "not by your key" in refusal(export, keys["own.pub"])
    # And under the name of the right key.
    envelope = read_json(export / verify.ENVELOPE)
    right = verify.sha256(keys["own.pub"].read_bytes())
    envelope["signatures"][0]["keyid"] = right
    write_json(export / verify.ENVELOPE, envelope)
    assert "is not of this statement" in refusal(export, keys["own.pub"])


def test_export_that_another_key_has_signed_in_part_is_signed_by_a_rerun(export, keys):
    from forge.plugins.attestation.signing import fingerprint, load_key, sign

    other, card = load_key(keys["other"]), export / "README.md"
    expected = {one["name"]: one["digest"]["sha256"] for one in statement_of(export)["subject"]}
    text = card.read_bytes()
    card.write_bytes(text + b"x")
    with pytest.raises(DataError, match="have changed while they were signed"):
        sign(export, other, expected)
    card.write_bytes(text)
    sign(export, other, expected)
    bundle = read_json(export / verify.MODEL_SIGNATURE)
    assert bundle["verificationMaterial"]["publicKey"]["hint"] == fingerprint(other)
    verify.verify(export, keys["other.pub"])


def test_older_format_is_refused(export):
    unsign(export)
    edit(export, lambda content: content["predicate"].update(format=0), consistently=True)
    assert "format is 0" in refusal(export)
    edit(export, lambda content: content.update(predicateType="urn:forge:training:v0"))
    assert "predicateType is" in refusal(export)


def test_removed_signature_is_refused_where_a_key_is_named(export, keys):
    unsign(export)
    verify.verify(export)
    assert "not signed" in refusal(export, keys["own.pub"])


def test_printed_digest_must_be_that_of_the_statement(signed):
    own = statement_of(signed)["predicate"]["sha256"]
    verify.verify(signed, digest=own.upper())
    with pytest.raises(verify.VerificationError, match="you expect 123"):
        verify.verify(signed, digest="123")


def test_links_pipes_and_hidden_directories_are_refused(export, tmp_path):
    weights = export / "model.safetensors"
    outside = shutil.move(weights, tmp_path / "elsewhere")
    weights.symlink_to(outside)
    assert "'model.safetensors' is a symbolic link" in refusal(export)
    weights.unlink()
    os.mkfifo(weights)
    assert "'model.safetensors' is a pipe" in refusal(export)
    weights.unlink()
    shutil.move(outside, weights)
    (export / ".cache").mkdir()
    (export / ".cache/x").touch()
    assert "'.cache/x' is not in the statement" in refusal(export)


def test_files_of_git_are_said_to_be_unverified_and_of_no_other_folder_left_out(export, capsys):
    verify.verify(export)
    assert "git" not in capsys.readouterr().out
    (export / ".git").mkdir()
    (export / ".git/config").touch()
    (export / ".gitattributes").touch()
    verify.verify(export)
    said = capsys.readouterr().out
    assert "not verified, as files of git and no part of the model: .git, .gitattributes\n" in said
    (export / "more/.git").mkdir(parents=True)
    (export / "more/.git/x").touch()
    assert "'more/.git/x' is not in the statement" in refusal(export)


def test_statement_that_is_a_link_or_a_pipe_is_refused(export, tmp_path):
    path = export / verify.STATEMENT
    outside = shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(outside)
    assert "cannot be read" in refusal(export)
    path.unlink()
    os.mkfifo(path)
    assert "is not a regular file" in refusal(export)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"_type": 1, "_type": 2}', "has the key '_type' twice"),
        ("[" * 200_000, "is not JSON that can be read"),
        ('{"a": NaN}', "is not JSON that can be read"),
        ('{"a": 1e999}', "is not JSON that can be read"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON that can be read"),
        ("[]", "is not a JSON object"),
        ("\xff", "_type is None"),
        ("{}", "_type is None"),
    ],
    ids=["twice", "nested", "nan", "infinite", "long", "list", "bytes", "empty"],
)
def test_json_that_is_no_statement_is_refused(export, text, said):
    unsign(export)
    (export / verify.STATEMENT).write_text("{}" if text == "\xff" else text)
    assert said in refusal(export)


def test_statement_beyond_the_limit_is_refused_unread(export):
    unsign(export)
    with open(export / verify.STATEMENT, "wb") as file:
        file.truncate(verify.MOST_BYTES + 1)
    assert "has more than" in refusal(export)


def test_text_of_a_statement_cannot_control_the_terminal(export, capsys):
    unsign(export)

    def name(content: dict[str, Any]) -> None:
        links = {link["link"]: link for link in content["predicate"]["chain"]}
        links["export"]["run"] = "\x1b]0;x\x07"

    edit(export, name, consistently=True)
    verify.verify(export)
    assert "\x1b" not in capsys.readouterr().out


# --- the commands -----------------------------------------------------------------------------------


def test_checkpoints_of_the_run_are_compared(trained, signed, tmp_path, capsys):
    assert forge("verify", str(signed), f"--checkpoints={trained.folder}").code == 0
    assert "checkpoints: 2 of 4 are there" in capsys.readouterr().out
    run = trained.copy(tmp_path / "own")
    shutil.rmtree(run.paths.checkpoints / "step-00000009")
    shutil.copytree(
        run.paths.checkpoints / "step-00000012", run.paths.checkpoints / "step-00000009"
    )
    outcome = forge("verify", str(signed), f"--checkpoints={run.folder}")
    assert outcome.code == 65
    assert "step-00000009" in outcome.text
    weights = next((run.paths.checkpoints / "step-00000012").glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    outcome = forge("verify", str(signed), f"--checkpoints={run.folder}")
    assert "step-00000012" in outcome.text


@pytest.fixture
def texts(tiny_project: Path, tmp_path: Path) -> Path:
    """A copy of the corpus, in other order and with other names."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, path in enumerate(sorted((tiny_project / "corpus").iterdir(), reverse=True)):
        shutil.copy(path, folder / f"{number}.txt")
    return folder


def test_texts_give_the_tokens_again_whatever_their_names_are(signed, texts, capsys):
    outcome = forge("verify", str(signed), f"--data={texts}")
    assert outcome.code == 0, outcome.text
    assert "24 text files give the tokenizer and 2 shards" in capsys.readouterr().out


def test_text_that_differs_or_is_missing_is_named(signed, texts, tiny_project):
    (texts / "23.txt").write_text("another text")  # was 00.txt
    (texts / "01.txt").write_text("")
    (texts / "22.txt").unlink()  # was 01.txt
    outcome = forge("verify", str(signed), f"--data={texts}")
    assert outcome.code == 65
    corpus = tiny_project / "corpus"
    assert f"'{corpus / '00.txt'}' is not in" in outcome.text
    assert f"'{corpus / '01.txt'}' differs from" in outcome.text
    assert "02.txt" not in outcome.text
    assert forge("verify", str(signed), "--data=nowhere").code == 65


def of_link(name: str, change: Change) -> Change:
    """A change of one link of a statement."""

    def change_link(content: dict[str, Any]) -> None:
        links = {link["link"]: link for link in content["predicate"]["chain"]}
        change(links[name])

    return change_link


def test_tokens_that_the_texts_do_not_give_are_named(export, texts):
    unsign(export)

    def other_shard(link: dict[str, Any]) -> None:
        link["sources"][""]["splits"]["train"][0]["digest"] = "0" * 64

    edit(export, of_link("tokens", other_shard), consistently=True)
    outcome = forge("verify", str(export), f"--data={texts}")
    assert outcome.code == 65
    assert "train-00000-000.bin has" in outcome.text
    assert "000000000000" in outcome.text


def test_config_that_names_other_sources_than_the_texts_is_refused(export, texts):
    unsign(export)
    sources = {"web": {"inputs": ["corpus/*.txt"]}}
    change = of_link("config", lambda link: link["values"]["tokenize"].update(sources=sources))
    edit(export, change, consistently=True)
    outcome = forge("verify", str(export), f"--data={texts}")
    assert outcome.code == 65
    assert "other sources than its texts" in outcome.text


@pytest.mark.parametrize(
    ("link", "change", "code"),
    [
        ("texts", lambda link: link.update(files={"../../x": link["files"][""]}), 65),
        ("texts", lambda link: link["files"][""][0].update(name="x/.."), 65),
        ("texts", lambda link: link.update(files={"": "x"}), 65),
        ("config", lambda link: link["values"]["tokenize"].update(part_mib=-1), 65),
        # Not read: the export's own file is the tokenizer.
        ("config", lambda link: link["values"]["tokenizer"].update(source="path", path="/x"), 0),
    ],
    ids=["source", "name", "type", "value", "path"],
)
def test_no_path_of_a_statement_is_read_or_written(export, texts, link, change, code):
    unsign(export)
    edit(export, of_link(link, change), consistently=True)
    before = sorted(export.parent.rglob("*"))
    outcome = forge("verify", str(export), f"--data={texts}")
    assert outcome.code == code, outcome.text
    assert "Traceback" not in outcome.text
    assert sorted(export.parent.rglob("*")) == before


def test_wrong_paths_are_refused_before_anything_is_written(trained, signed, keys, tmp_path):
    assert forge("verify", str(tmp_path / "nowhere")).code == 78
    assert forge("verify", str(signed), f"--key={tmp_path / 'no.pub'}").code == 78
    for key in (keys["own.pub"], tmp_path / "nowhere"):
        to = tmp_path / "model"
        outcome = forge("export", str(trained.folder), f"--to={to}", trained.data, f"--sign={key}")
        assert outcome.code == 78, outcome.text
        assert not to.exists()


def test_key_is_private_never_replaced_and_never_in_a_run(trained, keys):
    assert keys["own"].stat().st_mode & 0o077 == 0
    outcome = forge("key", str(keys["own"]))
    assert (outcome.code, "is already there" in outcome.text) == (78, True)
    outcome = forge("key", str(trained.folder / "key"))
    assert (outcome.code, "published" in outcome.text) == (78, True)
    assert not (trained.folder / "key").exists()


def test_fuzzed_export_is_refused_or_as_it_was(signed, tmp_path):
    """tests/support/mutations.py: no traceback, no hang, no memory beyond 2 GiB; nothing that was changed
    is verified."""

    def read(folder):
        verify.verify(folder, say=lambda line: None)
        names = set(verify.files_in(signed)) - {*verify.SIGNATURES}
        assert [
            name for name in names if digest_file(folder / name) != digest_file(signed / name)
        ] == []

    ends = mutations.try_all(signed, tmp_path / "work", read, verify.VerificationError)
    assert ends["refused"] > mutations.COUNT / 2, ends
