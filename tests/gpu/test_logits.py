"""Against an export that other software reads as another model: on a GPU both sides use other kernels."""

from __future__ import annotations

import pytest
import torch
from support.gpu import make_model, relative_error
from support.live_run import forge

from forge.checkpoint import resume, storage
from forge.core.config import Config
from forge.core.files import read_json

# Equal formulas in true fp32, in another order of sums: some 1e-7 for each layer.
LIMIT = 1e-5


def test_exported_weights_give_the_logits_of_transformers_llama(
    trained, device, measured, tmp_path
):
    transformers = pytest.importorskip("transformers")
    target = tmp_path / "exported"
    done = forge("export", str(trained.folder), f"--to={target}", trained.data)
    assert done.code == 0, done.text
    checkpoint = resume.latest(trained.paths)
    config = Config.model_validate(checkpoint.manifest.lineage.config.to_json())
    vocab_size = read_json(target / "config.json")["vocab_size"]
    ours = make_model(config.model, vocab_size, torch.device("cpu"))
    weights = ours.state_dict()
    storage.read_tensors({"model": weights}, checkpoint.folder, no_dist=True)
    ours.load_state_dict(weights)
    theirs = transformers.LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = torch.randint(vocab_size, (4, config.train.seq_len), device=device)
    with torch.no_grad():
        expected = theirs.to(device).eval()(tokens).logits
        found = ours.to(device).eval()(tokens)
    error = relative_error(found, expected)
    measured("relative error", error)
    assert error <= LIMIT
