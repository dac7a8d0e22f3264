"""Verify a model that comes with a statement of Forge: python3 verify.py FOLDER [--key PUBLIC_KEY]
[--certificate FILE [--certifier PUBLIC_KEY]]

This one file needs Python 3.11, for --key also its package `cryptography`, and no Forge. Keep a copy of
your own, and never run one that comes with a model. docs/plugins/attestation.md describes the format.
Exit codes: 0 all that was checked is right, 65 something is not, 78 bad command line.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

IN_TOTO = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
PREDICATE, REPRODUCTION = "urn:forge:training:v1", "urn:forge:reproduction:v1"
MERGE = "urn:forge:merge:v1"  # of a mean of checkpoints, which no training has made
FORMAT = 1  # of all
STATEMENT, ENVELOPE, MODEL_SIGNATURE = "statement.json", "statement.dsse.json", "model.sig"
SIGNATURES = (ENVELOPE, MODEL_SIGNATURE)
OURS = (STATEMENT, *SIGNATURES)
# By which git and hubs keep a repository, no part of the model.
OF_GIT = (".git", ".gitattributes", ".gitignore", ".github")
# Of a statement, which lists every text file: JSON takes up to 30 times its size in memory. In an
# envelope each 3 bytes of the statement are 4.
MOST_BYTES = 16 * 10**6
MOST_ENVELOPE_BYTES = MOST_BYTES // 3 * 4 + 10_000
MOST_NAMED = 20  # bad files in one message
_OF_RUN = ("config", "code", "environment", "parents", "checkpoints", "launches", "export")
_RESULTS = ("validation", "scores")
CHAINS = (
    ("texts", "tokenizer", "tokens", *_OF_RUN, *_RESULTS),  # of Forge's own trainer
    ("texts", "program", *_OF_RUN, *_RESULTS),  # of another program
)
OF_MERGE = ("texts", "tokenizer", "tokens", *_OF_RUN[:-1], "merge", _OF_RUN[-1], *_RESULTS)

Kind = TypeVar("Kind")
Links = dict[str, dict[str, Any]]


class VerificationError(Exception):
    """Refusal: something is not as the statement, or the person who verifies, says."""


# --- reading ----------------------------------------------------------------------------------------


def files_in(folder: Path, *, of_git: bool = False) -> list[str]:
    """Names of all files below a directory, sorted; but for those of git at its top, unless `of_git`.
    Refused for a link, a pipe or a device."""
    names, folders = [], [""]
    while folders:
        below = folders.pop()
        for entry in os.scandir(folder / below):
            name = f"{below}/{entry.name}" if below else entry.name
            if name in OF_GIT and not of_git:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(name)
            elif entry.is_file(follow_symlinks=False):
                names.append(name)
            else:
                what = "symbolic link" if entry.is_symlink() else "pipe, a socket or a device"
                raise VerificationError(f"{name!r} is a {what}, not a file")
    return sorted(names)


def open_regular(path: Path) -> IO[bytes]:
    """A regular file for reading, never through a link, and without waiting for a pipe."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        raise VerificationError(f"{path} cannot be read: {err.strerror}") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise VerificationError(f"{path} is not a regular file")
    return os.fdopen(number, "rb")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file of at most so many bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise VerificationError(f"{path} has more than {most:,} bytes, the most that is read")
    return data


def parsed(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object in these bytes. Refused for what two readers could read in two ways."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise VerificationError(f"{name} has the key {key!r:.60} twice")
            found[key] = value
        return found

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
        canonical(value)  # refuses NaN and infinity
    except (ValueError, RecursionError) as err:
        raise VerificationError(f"{name} is not JSON that can be read: {str(err)[:200]}") from None
    if not isinstance(value, dict):
        raise VerificationError(f"{name} is not a JSON object")
    return value


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no blanks and no characters beyond ASCII: equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def part(of: Any, key: str, kind: type[Kind], name: str = STATEMENT) -> Kind:
    """A value of an object in a file. Refused where it is missing or of another type."""
    value = of.get(key) if isinstance(of, dict) else None
    if not isinstance(value, kind):
        raise VerificationError(f"{name} has no {key} that can be read")
    return value


# --- the statement ----------------------------------------------------------------------------------


def statement_digest(statement: dict[str, Any]) -> str:
    """SHA-256 of the canonical form of a statement, without the key that holds it."""
    rest = {key: value for key, value in statement["predicate"].items() if key != "sha256"}
    return sha256(canonical({**statement, "predicate": rest}))


def read_statement(data: bytes) -> dict[str, Any]:
    """The statement in these bytes. Refused where it is of another format, or was edited."""
    return read_predicate(data, STATEMENT, PREDICATE, MERGE)


def read_predicate(data: bytes, name: str, *kinds: str) -> dict[str, Any]:
    """The in-toto statement in the bytes of a file, with a predicate of such a type. Refused as above."""
    statement = parsed(data, name)
    for key, expected in (("_type", (IN_TOTO,)), ("predicateType", kinds)):
        if statement.get(key) not in expected:
            raise VerificationError(
                f"{key} is {statement.get(key)!r:.80}, this verifier reads {' or '.join(expected)}"
            )
    predicate = part(statement, "predicate", dict, name)
    if predicate.get("format") != FORMAT:
        raise VerificationError(
            f"format is {predicate.get('format')!r:.20}, this verifier reads {FORMAT}"
        )
    if predicate.get("sha256") != statement_digest(statement):
        raise VerificationError(f"{name} was edited: its SHA-256 is not the one that it states")
    return statement


def check_files(folder: Path, statement: dict[str, Any]) -> tuple[int, int]:
    """Number and bytes of the files. Refused unless they are those of the statement, and no others."""
    expected = subjects_of(statement)
    there = set(files_in(folder)) - set(OURS)
    wrong = [f"{name!r} is missing" for name in sorted(expected.keys() - there)]
    wrong += [f"{name!r} is not in the statement" for name in sorted(there - expected.keys())]
    total = 0
    for name in sorted(there & expected.keys()):
        digest, size = file_digest(folder / name)
        total += size
        if digest != expected[name]:
            wrong.append(f"{name!r} has SHA-256 {digest[:12]}, not {expected[name]:.12}")
    if wrong:
        more = f"; {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise VerificationError("; ".join(wrong[:MOST_NAMED]) + more)
    return len(expected), total


def subjects_of(statement: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of each file of the model."""
    digests: dict[str, str] = {}
    for subject in part(statement, "subject", list):
        name = part(subject, "name", str)
        if name in digests:
            raise VerificationError(f"{STATEMENT} lists {name!r:.80} twice")
        digests[name] = part(part(subject, "digest", dict), "sha256", str)
    return digests


def file_digest(path: Path) -> tuple[str, int]:
    """SHA-256 and bytes of a file."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while block := file.read(2**22):
            digest.update(block)
            size += len(block)
    return digest.hexdigest(), size


# --- the chain --------------------------------------------------------------------------------------


def check_chain(statement: dict[str, Any]) -> Links:
    """The links by name. Refused unless each has the digest of the one before, and they agree."""
    chain = part(part(statement, "predicate", dict), "chain", list)
    names = tuple(part(link, "link", str) for link in chain)
    chains = (OF_MERGE,) if statement.get("predicateType") == MERGE else CHAINS
    if names not in chains:
        known = " or ".join(", ".join(links) for links in chains)
        raise VerificationError(f"the chain has the links {', '.join(names):.300}, not {known}")
    previous, before = "", "nothing"
    for link in chain:
        if link.get("previous") != previous:
            raise VerificationError(
                f"link {link['link']} names {link.get('previous')!r:.14} as the one before it,"
                f" which is {before}, {previous!r:.14}"
            )
        previous, before = sha256(canonical(link)), link["link"]
    links = dict(zip(names, chain, strict=True))
    _check_agreement(links)
    return links


def _check_agreement(links: Links) -> None:
    """Refuse two links that say different things of the same."""
    export = links["export"]
    exported = (part(export, "step", int), part(export, "checkpoint", str))
    saves = part(links["checkpoints"], "saved", list)
    saved = [(part(one, "step", int), one.get("blake3")) for one in saves]
    if "merge" in links:
        _check_merge(part(links["merge"], "parents", list), exported, saved)
    elif exported not in saved:
        raise VerificationError("the exported checkpoint is not among those that the run has saved")
    sources = links["tokens"].get("sources") if "tokens" in links else None
    for name, tokens in sources.items() if isinstance(sources, dict) else ():
        if part(tokens, "tokenizer", str) != links["tokenizer"].get("blake3"):
            raise VerificationError(f"the tokens {name!r:.60} were made by another tokenizer")


def _check_merge(
    parents: list[Any], exported: tuple[int, str], saved: list[tuple[int, Any]]
) -> None:
    """Refuse a merge of other checkpoints than the run has saved up to its step."""
    merged = [(part(one, "step", int), part(one, "digest", str)) for one in parents]
    newest = max((step for step, _ in merged), default=None)
    if exported in saved or not {*merged} <= {*saved} or newest != exported[0]:
        raise VerificationError("the merge is not of checkpoints that the run has saved")


def check_export(folder: Path, links: Links) -> None:
    """Refused unless forge.json, a file of the export, names the same checkpoint as the statement."""
    facts = parsed(read_bytes(folder / "forge.json"), "forge.json")
    export = links["export"]
    stated = {
        "step": export.get("step"),
        "checkpoint_digest": export.get("checkpoint"),
        "weights_digest": export.get("weights"),
        "config_digest": links["config"].get("blake3"),
        "merged": None,
    }
    if "merge" in links:
        stated["merged"] = {key: links["merge"].get(key) for key in ("form", "parents")}
    for name in ("tokenizer", "tokens"):
        if name in links:
            stated[name] = {"id": links[name].get("id"), "digest": links[name].get("blake3")}
    for key, value in stated.items():
        if facts.get(key) != value:
            raise VerificationError(
                f"{STATEMENT} is of another export: {key} is {value!r:.60}, in forge.json"
                f" {facts.get(key)!r:.60}"
            )


# --- signatures -------------------------------------------------------------------------------------


class Envelope(NamedTuple):
    """Signed bytes, signature, and the SHA-256 of the public key in PEM that verifies it."""

    payload: bytes
    signature: bytes
    fingerprint: str


def to_sign(payload: bytes) -> bytes:
    """The bytes that are signed: DSSE's pre-authentication encoding, version 1
    (https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md)."""
    return b"DSSEv1 %d %b %d %b" % (
        len(PAYLOAD_TYPE),
        PAYLOAD_TYPE.encode(),
        len(payload),
        payload,
    )


def read_envelope(folder: Path, name: str = ENVELOPE) -> Envelope | None:
    """The envelope beside a statement, or of a certificate; None where it is not signed."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    envelope = parsed(read_bytes(path, MOST_ENVELOPE_BYTES), name)
    signatures = envelope.get("signatures")
    if envelope.get("payloadType") != PAYLOAD_TYPE or not isinstance(signatures, list):
        raise VerificationError(f"{name} is not an envelope with {PAYLOAD_TYPE}")
    if len(signatures) != 1:
        raise VerificationError(f"{name} has {len(signatures)} signatures, not one")
    try:
        payload = base64.b64decode(part(envelope, "payload", str), validate=True)
        signature = base64.b64decode(part(signatures[0], "sig", str), validate=True)
    except ValueError:
        raise VerificationError(f"{name} has no base64") from None
    return Envelope(payload, signature, part(signatures[0], "keyid", str))


def check_signature(folder: Path, data: bytes, key: Path | None) -> str:
    """Sentence about the signature. data: statement.json. key: file with the author's public key.

    Refused where the signed statement is another one, and with a key also where the signature is missing
    or not by that key.
    """
    envelope = read_envelope(folder)
    if envelope is None:
        if key is not None:
            raise VerificationError(f"not signed: there is no {ENVELOPE}, and you named a key")
        return "not signed: authorship NOT verified"
    if envelope.payload != data:
        raise VerificationError(f"{STATEMENT} is not what was signed")
    if key is None:
        # Anybody can write the id of any key into an envelope: without the key the id says nothing.
        return "not checked, since you named no public key: authorship NOT verified"
    check_by_key(envelope, read_bytes(key))
    return f"signed by {envelope.fingerprint}, the key in {key}"


def check_by_key(envelope: Envelope, pem: bytes) -> None:
    """Refused unless the signature is by this public key, on the curve P-256."""
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            PublicFormat,
            load_pem_public_key,
        )
    except ImportError:
        raise VerificationError(
            "a key needs the package cryptography: pip install cryptography"
        ) from None
    try:
        key = load_pem_public_key(pem)
    except ValueError:
        raise VerificationError("the file of the key has no public key in PEM") from None
    except UnsupportedAlgorithm as err:
        raise VerificationError(f"the key is not on the curve P-256: {err}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise VerificationError("the key is not on the curve P-256")
    fingerprint = sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    if envelope.fingerprint != fingerprint:
        raise VerificationError(
            f"the signature is not by your key, {fingerprint}: the envelope names"
            f" {envelope.fingerprint!r:.66}"
        )
    try:
        key.verify(envelope.signature, to_sign(envelope.payload), ec.ECDSA(SHA256()))
    except InvalidSignature:
        raise VerificationError("the signature in the envelope is not of this statement") from None


# --- certificates -----------------------------------------------------------------------------------


def envelope_name(certificate: str) -> str:
    """Name of the file that has the signature of a certificate, beside it."""
    return f"{certificate.removesuffix('.json')}.dsse.json"


def check_certificate(path: Path, statement: bytes, key: Path | None) -> str:
    """Sentence about a certificate of `forge reproduce`. statement: the bytes of statement.json. key: a
    file with the public key of who certifies.

    Refused where it is of another statement, was edited, says that the run was not reproduced, or with a
    key is not signed by that.
    """
    data, name = read_bytes(path), path.name
    content = read_predicate(data, name, REPRODUCTION)
    subjects, made = part(content, "subject", list, name), part(content, "predicate", dict, name)
    if [part(one, "digest", dict, name).get("sha256") for one in subjects] != [sha256(statement)]:
        raise VerificationError(f"{name} certifies another statement")
    if made.get("result") != "reproduced":
        raise VerificationError(f"{name} says {made.get('result')!r:.20}")
    ends = [part(one, "outcome", str, name) for one in part(made, "intervals", list, name)]
    checked, steps = (part(made, key, int, name) for key in ("steps_checked", "steps"))
    certified = read_statement(statement)
    if certified["predicateType"] == MERGE:
        raise VerificationError(f"{name} is of a merge, which is not retrained")
    if why := "; ".join(_contradictions(made, name, certified)):
        raise VerificationError(f"{name} contradicts itself or the statement: {why}")
    equal = f"{ends.count('bitwise')} of {len(ends)} intervals bitwise equal"
    text = f"{checked:,} of {steps:,} steps retrained, {equal}"
    envelope = read_envelope(path.parent, envelope_name(name))
    if key is None:
        return f"{text}; by whom: NOT verified"
    if envelope is None or envelope.payload != data:
        raise VerificationError(f"{name} is not what was signed, or it is not signed")
    check_by_key(envelope, read_bytes(key))
    return f"{text}; signed by {envelope.fingerprint}, the key in {key}"


def _contradictions(made: dict[str, Any], name: str, statement: dict[str, Any]) -> Iterator[str]:
    """A sentence for each thing that cannot be, in the predicate of a positive certificate."""
    if made.get("statement") != statement["predicate"]["sha256"]:
        yield "it names the digest of another statement"
    if made.get("export") not in ("same", "unchecked"):
        yield f"the export is {made.get('export')!r:.20}"
    intervals = part(made, "intervals", list, name)
    if bad := {one["outcome"] for one in intervals} - {"bitwise", "within tolerance"}:
        yield f"an interval is {min(bad)!r:.20}"
    ends = sorted(
        tuple(part(one, key, int, name) for key in ("first", "last")) for one in intervals
    )
    last = part(check_chain(statement)["export"], "step", int)
    if any(not 0 <= first < end <= last for first, end in ends):
        yield f"an interval is not within steps 0 to {last}"
    if any(after[0] < before[1] for before, after in pairwise(ends)):
        yield "two intervals have steps in common"
    checked, coverable, steps = (
        part(made, key, int, name) for key in ("steps_checked", "steps_coverable", "steps")
    )
    if checked != sum(end - first for first, end in ends) or checked < 1:
        yield "steps_checked is not the sum of its intervals"
    if not checked <= coverable <= steps <= last:
        yield "more steps are checked than there are"
    saved = part(check_chain(statement)["checkpoints"], "saved", list)
    listed = {(part(one, "step", int), one.get("blake3")) for one in saved}
    for key, step in (("stated", "last"), ("began_with", "first")):
        named = [(one[step], one.get(key)) for one in intervals if one.get(key) is not None]
        if any(not isinstance(digest, str) or (at, digest) not in listed for at, digest in named):
            yield "an interval has a checkpoint that the statement does not list"


# --- the command ------------------------------------------------------------------------------------


def verify(
    folder: Path,
    key: Path | None = None,
    digest: str | None = None,
    say: Callable[[str], None] = print,
    *,
    certificate: Path | None = None,
    certifier: Path | None = None,
    statement_bytes: bytes | None = None,
) -> Links:
    """Check signature, files and chain of an export, with a line for each; the links by name.

    key: file with the author's public key. digest: SHA-256 that the statement must have. certificate: of
    `forge reproduce`. certifier: file with the public key of who certifies. statement_bytes: of
    statement.json, where the caller has read that already, to use the bytes that are verified. Raises
    VerificationError at the first check that fails.
    """
    if certifier and not certificate:
        raise VerificationError("a certifier was named, and no certificate")
    path = folder / STATEMENT
    if not os.path.lexists(path):
        raise VerificationError(f"{folder} has no {STATEMENT}")
    data = read_bytes(path) if statement_bytes is None else statement_bytes
    signature = check_signature(folder, data, key)
    statement = read_statement(data)
    own = str(statement["predicate"]["sha256"])
    if digest is not None and own != digest.lower():
        raise VerificationError(f"the statement has SHA-256 {own}, you expect {digest}")
    files, size = check_files(folder, statement)
    links = check_chain(statement)
    check_export(folder, links)
    certified = check_certificate(certificate, data, certifier) if certificate else ""
    say(f"  ok    files: {files}, {size / 1e6:,.1f} MB, as the statement says")
    if of_git := [name for name in OF_GIT if os.path.lexists(folder / name)]:
        say(f"  note  not verified, as files of git and no part of the model: {', '.join(of_git)}")
    say(f"  ok    chain: {' > '.join(links)}")
    if "merge" in links:
        steps = ", ".join(str(one["step"]) for one in links["merge"]["parents"])
        say(f"  note  the weights are no step's: they are a merge of steps {steps}")
    say(f"  {'ok  ' if key else 'note'}  signature: {printable(signature)}")
    if certified:
        say(f"  {'ok  ' if certifier else 'note'}  certificate: {printable(certified)}")
    run, step = links["export"].get("run"), links["export"]["step"]
    say(f"{printable(str(run))}, step {step}: statement {own}")
    return links


def printable(text: str) -> str:
    """Text of a statement, which must not control the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def sha256_option(text: str) -> str:
    """The value of --digest. An unset variable of a script gives an empty one, which would compare
    nothing."""
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a SHA-256 of 64 hexadecimal digits")
    return text


def path_option(text: str) -> Path:
    """The value of an option that names a file or a directory; "" would be the current directory. A shell
    leaves the `~` of --to=~/model as it is."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: a variable that is not set?")
    return Path(os.path.expanduser(text))  # noqa: PTH111 (of an unknown user it stays)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="verify.py", description="verify a model that comes with a statement of Forge"
    )
    option = parser.add_argument
    option("folder", metavar="FOLDER", type=path_option, help="directory of the model")
    option("--key", metavar="FILE", type=path_option, help="public key of the author, in PEM")
    option("--digest", metavar="SHA256", type=sha256_option, help="that the statement must have")
    option("--certificate", metavar="FILE", type=path_option, help="of forge reproduce")
    option("--certifier", metavar="FILE", type=path_option, help="its public key, in PEM")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as err:
        return 78 if err.code else 0
    try:
        verify(
            options.folder,
            options.key,
            options.digest,
            certificate=options.certificate,
            certifier=options.certifier,
        )
    except VerificationError as err:
        print(f"refused: {printable(str(err))}", file=sys.stderr)
        return 65
    return 0


if __name__ == "__main__":
    sys.exit(main())
