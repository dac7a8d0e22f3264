"""The lab bert-cpu by the command of its README: hub, two ranks, validation, a model that others load."""

import pytest
from support.bert_hub import repositories
from support.hub import served
from support.pages import commands_of

EXPORT, LOAD = (command.bare for command in commands_of("tests/workflow/test_lab_bert.py"))


@pytest.mark.weekly
def test_hugging_face_trainer_script_ends_as_a_model_that_transformers_loads(project, monkeypatch):
    project.with_make()
    with served(repositories()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(project.root / "hf"))
        code, output = project.shell(EXPORT)
        assert code == 0, output
        asked = len(hub.asked)
        code, output_again = project.shell(EXPORT)
        assert (code, "Nothing to be done" in output_again, len(hub.asked)) == (0, True, asked)
    assert "inputs: 1 files of datasets/fancyzhx/ag_news@main, commit" in output
    assert "sealed checkpoint-51" in output
    logs = [path.read_text() for path in project.path("logs", "bert-cpu").glob("*.1.log")]
    assert any("[RANK 1] step 50 of 51 loss" in log for log in logs)
    assert project.read("validated.json", "bert-cpu")["step"] == 51
    text = "match goal team season coach league striker final cup stadium"
    assert "Stocks fell as oil prices rose" in LOAD
    load = LOAD.replace("Stocks fell as oil prices rose", text)
    code, loaded = project.shell(load, HF_HUB_OFFLINE="1")
    assert code == 0, loaded
    # 51 steps on 2000 texts of clearly different words; chance is one of four.
    assert "'label': 'Sports'" in loaded.splitlines()[-1]
