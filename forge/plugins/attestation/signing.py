"""Keys and signatures of statements: `forge key`, and `forge export --sign`.

A key is on the curve P-256, the smallest that model-signing knows. A signed export has two envelopes: the
statement in DSSE, and `model.sig` with the digests of all files in a bundle of sigstore, the format of
model-signing (https://github.com/sigstore/model-transparency, docs/model_signing_format.md).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from forge.attestation import verify
from forge.core.errors import ConfigError, DataError
from forge.core.files import atomic_open, disk_trouble, write_json
from forge.core.terminal import say

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MODEL_PREDICATE = "https://model_signing/signature/v1.0"


def make_key(path: Path) -> Path:
    """Write a new private key, which only its owner may read, and beside it FILE.pub; the latter.

    Raises ConfigError where one is there, or in a directory that is given away.
    """
    public = path.with_name(f"{path.name}.pub")
    _refuse_published(path)
    for there in (path, public):
        if os.path.lexists(there):
            raise ConfigError(
                f"{there} is already there",
                cause="what it has signed could not be verified any more",
                fix="name another file",
            )
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with disk_trouble(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_open(path, private=True) as file:
            file.write(pem)
        with atomic_open(public) as file:
            file.write(_public_pem(key))
    say(f"private key {path}: only you may read it, and who has it signs in your name")
    say(f"public key {public}: publish it elsewhere than beside the models that it verifies")
    say(f"fingerprint {fingerprint(key)}")
    return public


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Raises ConfigError where the file has no private key on the curve P-256, or would be given away."""
    _refuse_published(path)
    try:
        with disk_trouble(path, "read"):
            key = load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise ConfigError(f"there is no key {path}", fix=f"make one: forge key {path}") from None
    except (ValueError, TypeError) as err:  # TypeError: with a password
        raise ConfigError(
            f"{path} has no private key without a password: {err}",
            cause="the public key was named, or it is of another format than PEM",
            fix="make one: forge key FILE",
        ) from None
    except UnsupportedAlgorithm as err:
        raise ConfigError(
            f"{path} has no key on the curve P-256: {err}", fix="make one: forge key FILE"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
        raise ConfigError(f"{path} has no key on the curve P-256", fix="make one: forge key FILE")
    return key


def _refuse_published(path: Path) -> None:
    """ConfigError for a key in the directory of a run or of an export, which people copy and publish."""
    for folder in path.absolute().parents:
        marks = (verify.STATEMENT, "forge.json", "trained.json", "checkpoints")
        if any((folder / mark).exists() for mark in marks):
            raise ConfigError(
                f"the key {path} is in {folder}, the directory of a run or of an export",
                cause="it would be copied and published with them",
                fix="keep it in your home directory, such as ~/forge-key.pem",
            )


def sign(
    export: Path, key: ec.EllipticCurvePrivateKey, expected: dict[str, str] | None = None
) -> None:
    """Write both envelopes beside the statement of an export, unless this key has signed it already.
    expected: SHA-256 of each file that is signed; None where nobody else can have changed them.

    Raises DataError where they are others, UnfitError when the disk cannot be written.
    """
    own = fingerprint(key)
    with disk_trouble(export):
        statement = (export / verify.STATEMENT).read_bytes()
        _refuse_others(expected, verify.subjects_of(verify.read_statement(statement)))
        if _has_signed(export, statement, own):
            say(f"signature by {own[:12]}: nothing to do")
            return
        # Else one of another key would stand for this one where the command ends before the last line.
        (export / verify.MODEL_SIGNATURE).unlink(missing_ok=True)
        write_json(export / verify.ENVELOPE, signed_envelope(statement, key))
        of_model = _model_statement(export)
        resources = of_model["predicate"]["resources"]
        _refuse_others(expected, {one["name"]: one["digest"] for one in resources})
        model = json.dumps(of_model).encode()
        bundle = {
            "mediaType": BUNDLE,
            "verificationMaterial": {"publicKey": {"hint": own}, "tlogEntries": []},
            "dsseEnvelope": _envelope(model, key, ""),
        }
        write_json(export / verify.MODEL_SIGNATURE, bundle)
    say(f"signed by {own}: {verify.ENVELOPE}, {verify.MODEL_SIGNATURE} in {export}")


def _refuse_others(expected: dict[str, str] | None, listed: dict[str, str]) -> None:
    """DataError where other files are listed, the statement and its envelope aside."""
    files = {name: digest for name, digest in listed.items() if name not in verify.OURS}
    if expected is not None and files != expected:
        raise DataError(
            "the files of the export have changed while they were signed",
            cause="somebody else writes in its directory",
            fix="export to a directory in which you alone may write: --to DIR",
        )


def _has_signed(export: Path, statement: bytes, fingerprint: str) -> bool:
    """Return whether the envelopes are of this statement and key. `model.sig` is written last."""
    if not (export / verify.MODEL_SIGNATURE).exists():
        return False
    try:
        envelope = verify.read_envelope(export)
    except verify.VerificationError:
        return False
    return envelope is not None and envelope[::2] == (statement, fingerprint)


def signed_envelope(payload: bytes, key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
    """DSSE around the bytes of a statement or of a certificate."""
    return _envelope(payload, key, fingerprint(key))


def _envelope(payload: bytes, key: ec.EllipticCurvePrivateKey, keyid: str) -> dict[str, Any]:
    signature = key.sign(verify.to_sign(payload), ec.ECDSA(SHA256()))
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": verify.PAYLOAD_TYPE,
        "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": keyid}],
    }


def _model_statement(export: Path) -> dict[str, Any]:
    """The statement of model-signing: all files but model.sig itself. Its one subject has the SHA-256 of
    their digests, in the order of their names."""
    names = [name for name in verify.files_in(export) if name != verify.MODEL_SIGNATURE]
    digests = {name: verify.file_digest(export / name)[0] for name in names}
    root = hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests.values()))
    ignored = [verify.MODEL_SIGNATURE, *verify.OF_GIT]
    return {
        "_type": verify.IN_TOTO,
        "subject": [{"name": export.name, "digest": {"sha256": root.hexdigest()}}],
        "predicateType": MODEL_PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": ignored,
            },
            "resources": [
                {"name": name, "algorithm": "sha256", "digest": digest}
                for name, digest in digests.items()
            ],
        },
    }


def _public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: ec.EllipticCurvePrivateKey) -> str:
    """SHA-256 of the public key in PEM, as model-signing names it."""
    return verify.sha256(_public_pem(key))
