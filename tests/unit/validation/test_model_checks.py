"""A manifest that nobody's run wrote must not pass because it records too little."""

from types import SimpleNamespace

import pytest
from support.manifests import manifest_of

from forge.checkpoint.manifest import MANIFEST, Manifest, ReferenceLosses
from forge.core.errors import DataError
from forge.core.files import write_json
from forge.validation.model_checks import ModelChecks


def test_manifest_without_losses_is_refused(tmp_path):
    none = ReferenceLosses.model_construct(samples=4, losses=[])
    write_json(tmp_path / MANIFEST, manifest_of(3, reference=none).sealed().to_json())
    with pytest.raises(DataError, match=r"cannot be read: reference\.losses"):
        Manifest.read(tmp_path)


def test_losses_of_fewer_ranks_than_trained_are_not_enough():
    found = manifest_of(3, reference=ReferenceLosses(samples=4, losses=[5.5]))
    with pytest.raises(DataError, match="1 losses are recorded of 2 ranks"):
        ModelChecks.probe(SimpleNamespace(_manifest=found))
