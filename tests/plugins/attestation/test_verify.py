"""Nothing that was not compared may read as verified."""

from __future__ import annotations

import base64
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.live_run import forge
from support.statements import make_consistent, make_export

from forge.attestation import verify
from forge.core.errors import ConfigError, DataError
from forge.core.files import read_json, write_json
from forge.plugins.attestation.chain import (
    CheckpointsSaved,
    LaunchesMade,
    SavedStep,
    TextFile,
    Texts,
)
from forge.plugins.attestation.signing import load_key, make_key, sign
from forge.plugins.attestation.statement import statement_of

VERIFIER = Path(verify.__file__)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return make_export(tmp_path / "model")


@pytest.mark.parametrize("digest", ["", " ", "12ab", "0" * 63 + "g"])
def test_digest_that_is_no_sha256_is_a_usage_error_of_both_verifiers(export, digest, capsys):
    assert verify.main([str(export), f"--digest={digest}"]) == 78
    assert "is not a SHA-256 of 64 hexadecimal digits" in capsys.readouterr().err
    assert usage_error("verify", str(export), f"--digest={digest}") == 78
    with pytest.raises(verify.VerificationError):
        verify.verify(export, digest=digest)


def usage_error(*words: str) -> int:
    with pytest.raises(SystemExit) as refused:
        forge(*words)
    assert isinstance(refused.value.code, int)
    return refused.value.code


@pytest.mark.parametrize(
    "option", ["--key", "--data", "--checkpoints", "--certificate", "--certifier"]
)
def test_empty_option_is_a_usage_error_and_compares_not_nothing(export, option):
    assert usage_error("verify", str(export), f"{option}=") == 78


def test_digest_of_the_statement_is_accepted_in_upper_case_too(export):
    own = read_json(export / verify.STATEMENT)["predicate"]["sha256"]
    assert verify.main([str(export), f"--digest={own.upper()}"]) == 0
    assert verify.main([str(export), f"--digest={'0' * 64}"]) == 65


def test_key_id_that_anybody_can_write_is_not_shown_as_a_signer(export, tmp_path, capsys):
    public = make_key(tmp_path / "keys/known")
    make_key(tmp_path / "keys/strangers")
    sign(export, load_key(tmp_path / "keys/strangers"))
    known = verify.sha256(public.read_bytes())
    envelope = read_json(export / verify.ENVELOPE)
    envelope["signatures"][0]["keyid"] = known
    write_json(export / verify.ENVELOPE, envelope)
    capsys.readouterr()
    assert verify.main([str(export)]) == 0
    said = capsys.readouterr().out
    assert "signed by" not in said and known[:12] not in said
    assert "authorship NOT verified" in said
    assert verify.main([str(export), f"--key={public}"]) == 65


def on_a_curve_that_cryptography_lacks(pem: bytes) -> bytes:
    """The key with the identifier of prime192v2 where that of P-256 was (RFC 5480, section 2.1.1.1)."""
    begin, *body, end = pem.splitlines()
    der = base64.b64decode(b"".join(body))
    p256, prime192v2 = bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d030102")
    assert der.count(p256) == 1
    changed = base64.encodebytes(der.replace(p256, prime192v2))
    return b"\n".join([begin, changed.strip(), end, b""])


def test_key_on_another_curve_is_refused_by_verifier_and_signer(export, tmp_path, capsys):
    key = tmp_path / "keys/known"
    public = make_key(key)
    sign(export, load_key(key))
    for path in (public, key):
        path.write_bytes(on_a_curve_that_cryptography_lacks(path.read_bytes()))
    assert verify.main([str(export), f"--key={public}"]) == 65
    assert "the key is not on the curve P-256: Curve 1.2.840.10045.3.1.2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"has no key on the curve P-256: Curve 1\.2\.840"):
        load_key(key)


def test_statement_of_60_megabytes_is_refused_in_256_mebibytes(export):
    (export / verify.STATEMENT).write_bytes(b'{"a":[' + b"[]," * 20_000_000 + b"[]]}")
    done = subprocess.run(
        [sys.executable, "-I", "-S", VERIFIER, str(export)],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)),
    )
    assert done.returncode == 65, done.stderr
    assert "has more than 16,000,000 bytes" in done.stderr


def test_list_of_texts_that_is_too_large_for_verifiers_is_left_out_and_said(monkeypatch, capsys):
    monkeypatch.setattr(verify, "MOST_BYTES", 100_000)
    files = [TextFile(name=f"texts/{n:09}.txt", bytes=1, blake3="0" * 64) for n in range(1000)]
    steps = CheckpointsSaved(saved=[SavedStep(step=1, blake3="0" * 64, is_kept=True)])
    statement = statement_of([Texts(files={"": files}), steps], [])
    assert statement["predicate"]["chain"][0]["files"] is None
    assert statement["predicate"]["chain"][1]["saved"]
    assert "does not list the text files" in capsys.readouterr().err


def test_statement_that_verifiers_would_refuse_is_not_made(monkeypatch):
    monkeypatch.setattr(verify, "MOST_BYTES", 100_000)
    subjects = [{"name": f"{n:0100}", "digest": {"sha256": "0" * 64}} for n in range(1000)]
    with pytest.raises(DataError, match="verifiers read 100,000"):
        statement_of([Texts(files=None), LaunchesMade(launches=[])], subjects)


RIGHT: dict[str, Any] = {
    **{"format": 1, "result": "reproduced", "export": "same"},
    **{"steps": 10, "steps_coverable": 10, "steps_checked": 4},
    "intervals": [
        {"first": 6, "last": 10, "outcome": "bitwise", "began_with": None, "stated": "c1"}
    ],
}


def certificate_of(export: Path, /, **changes: Any) -> Path:
    statement = (export / verify.STATEMENT).read_bytes()
    predicate = {
        **RIGHT,
        "statement": read_json(export / verify.STATEMENT)["predicate"]["sha256"],
        **changes,
    }
    content = {
        "_type": verify.IN_TOTO,
        "predicateType": verify.REPRODUCTION,
        "subject": [{"name": verify.STATEMENT, "digest": {"sha256": verify.sha256(statement)}}],
        "predicate": predicate,
    }
    predicate["sha256"] = verify.statement_digest(content)
    write_json(path := export.with_name("certificate.json"), content)
    return path


INTERVAL = RIGHT["intervals"][0]


@pytest.mark.parametrize(
    "changes",
    [
        {"statement": "0" * 64},
        {"export": "other"},
        {"steps_checked": 10},
        {"steps_checked": 0, "intervals": []},
        {"steps_coverable": 3},
        {"steps": 1000, "steps_coverable": 1000},
        {"intervals": [{**INTERVAL, "outcome": "other"}]},
        {"intervals": [{**INTERVAL, "outcome": "unchecked"}]},
        {"intervals": [INTERVAL, INTERVAL], "steps_checked": 8},
        {"intervals": [{**INTERVAL, "stated": "c2"}]},
        {"intervals": [{**INTERVAL, "began_with": "c1"}]},
        {"intervals": [{**INTERVAL, "first": -4, "last": 0, "stated": None}]},
    ],
    ids=str,
)
def test_certificate_that_contradicts_itself_or_the_statement_is_refused(export, changes, capsys):
    assert verify.main([str(export), f"--certificate={certificate_of(export)}"]) == 0
    named = certificate_of(export, **changes)
    assert verify.main([str(export), f"--certificate={named}"]) == 65
    assert "contradicts" in capsys.readouterr().err


PARENTS = [
    {"step": 8, "digest": "c0", "weight": 0.5},
    {"step": 10, "digest": "c1", "weight": 0.5},
]


def of_merge(export: Path) -> dict[str, Any]:
    """The statement of the same directory, whose weights are a merge."""
    facts = {**read_json(export / "forge.json"), "checkpoint_digest": "m1"}
    facts["merged"] = {"form": "mean", "parents": PARENTS}
    write_json(export / "forge.json", facts)
    content = read_json(export / verify.STATEMENT)
    content["predicateType"] = verify.MERGE
    content["subject"] = [
        {"name": name, "digest": {"sha256": verify.file_digest(export / name)[0]}}
        for name in ("forge.json", "model.safetensors")
    ]
    chain = content["predicate"]["chain"]
    at = next(i for i, link in enumerate(chain) if link["link"] == "export")
    chain[at]["checkpoint"] = "m1"
    link_of(content, "checkpoints")["saved"].append({"step": 8, "blake3": "c0", "is_kept": True})
    chain.insert(at, {"link": "merge", "form": "mean", "parents": PARENTS})
    return content


def link_of(content: dict[str, Any], name: str) -> dict[str, Any]:
    return next(link for link in content["predicate"]["chain"] if link["link"] == name)


def ends_with(export: Path, content: dict[str, Any]) -> int:
    make_consistent(content)
    write_json(export / verify.STATEMENT, content)
    return verify.main([str(export)])


def test_merge_is_accepted_and_said_to_be_no_step(export, capsys):
    assert ends_with(export, of_merge(export)) == 0
    assert "the weights are no step's: they are a merge of steps 8, 10" in capsys.readouterr().out
    named = certificate_of(export)
    assert verify.main([str(export), f"--certificate={named}"]) == 65
    assert "is of a merge, which is not retrained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made.update(predicateType=verify.PREDICATE), "the chain has the links"),
        (lambda made: made["predicate"]["chain"].remove(link_of(made, "merge")), "the chain has"),
        (lambda made: link_of(made, "checkpoints").update(saved=[]), "not of checkpoints that"),
        (
            lambda made: link_of(made, "checkpoints")["saved"].append(
                {"step": 10, "blake3": "m1", "is_kept": True}
            ),
            "not of checkpoints that the run has saved",
        ),
        (lambda made: link_of(made, "merge").update(parents=[]), "not of checkpoints that"),
        (lambda made: link_of(made, "merge").update(parents=PARENTS[:1]), "not of checkpoints"),
        (lambda made: link_of(made, "merge").update(form="weights"), "merged is"),
        (lambda made: link_of(made, "merge").update(parents=PARENTS[1:]), "merged is"),
    ],
)
def test_merge_that_is_taken_for_training_or_for_another_merge_is_refused(
    export, capsys, change, message
):
    content = of_merge(export)
    change(content)
    assert ends_with(export, content) == 65
    assert message in capsys.readouterr().err


def test_statement_of_training_for_the_files_of_a_merge_is_refused(export, capsys):
    content = of_merge(export)
    content["predicateType"] = verify.PREDICATE
    content["predicate"]["chain"].remove(link_of(content, "merge"))
    saved = link_of(content, "checkpoints")["saved"]
    saved.append({"step": 10, "blake3": "m1", "is_kept": True})
    assert ends_with(export, content) == 65
    assert "is of another export: merged is None, in forge.json" in capsys.readouterr().err
