"""The lab bert-cpu by the command of its README: hub, two ranks, validation, a model that others load."""

import subprocess
import sys

from support.bert_hub import repositories
from support.hub import served

CONFIG = "config/labs/bert-cpu/config.yaml"
LOAD = """
import sys
from transformers import pipeline
[found] = pipeline("text-classification", sys.argv[1])("the match and the goal of the season")
print(found["label"])
"""


def test_hugging_face_trainer_script_ends_as_a_model_that_transformers_loads(project, monkeypatch):
    with served(repositories()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(project.root / "hf"))
        code, output = project.snakemake("export", "--configfile", CONFIG)
        assert code == 0, output
        asked = len(hub.asked)
        code, output_again = project.snakemake("export", "--configfile", CONFIG)
        assert (code, "Nothing to be done" in output_again, len(hub.asked)) == (0, True, asked)
    assert "inputs: 1 files of datasets/fancyzhx/ag_news@main, commit" in output
    assert "sealed checkpoint-51" in output
    logs = [path.read_text() for path in project.path("logs", "bert-cpu").glob("*.1.log")]
    assert any("[RANK 1] step 50 of 51 loss" in log for log in logs)
    assert project.read("validated.json", "bert-cpu")["step"] == 51
    folder = project.path("export/checkpoint-51", "bert-cpu")
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)],
        env=project.environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    # 51 steps on 2000 texts of clearly different words; chance is one of four.
    assert loaded.stdout.strip() == "Sports"
