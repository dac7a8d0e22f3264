"""Whatever a tired person types is refused with key, file and value, before anything is made."""

from itertools import pairwise


def refused(project, *messages, target="train"):
    code, output = project.snakemake(target)
    assert code != 0
    for message in messages:
        assert message in output, output[-3000:]
    assert "Traceback" not in output
    assert not (project.root / "results").exists()


def test_unknown_key(project):
    project.write_config(train={"max_stepz": 5})
    refused(project, "unknown key train.max_stepz (did you mean max_steps?)")


def test_dotted_key_of_config_is_read_by_no_snakemake_and_its_section_is(project):
    code, output = project.snakemake("-n", "train", "--config", "train.max_steps=300")
    assert code == 1
    assert "Invalid config definition: Config entry must start with a valid identifier." in output
    code, output = project.snakemake("-n", "train", "--config", 'train={"max_stepz": 300}')
    assert code == 1 and "unknown key train.max_stepz (did you mean max_steps?)" in output
    code, output = project.snakemake("-n", "train", "--config", 'train={"max_steps": 300}')
    assert code == 0, output


def test_bad_cell_of_the_sample_sheet(project):
    project.write_runs("run\ttrain.lr\nbase\tfast\n")
    refused(project, "line 2 (run base), column train.lr: value 'fast'")


def test_double_and_illegal_run_names(project):
    project.write_runs("run\nbase\nbase\n")
    refused(project, "duplicate run name 'base'")
    project.write_runs("run\n$(reboot)\n")
    refused(project, "'$(reboot)' cannot name a run")


def test_parents_in_a_circle(project):
    project.write_runs("run\tparent\na\tb@4\nb\ta@4\n")
    refused(project, "the parents of these runs form a circle: a from b from a")


def test_misspelt_target_and_a_run_as_target(project):
    own = "\n         of one run: results/base/validated.json"
    refused(project, "there is no target trian (did you mean train?)", own, target="trian")
    refused(project, "there is no target base, which is a run", "train, resume, ", target="base")


def test_no_cores(project):
    code, output = project.snakemake("train", "--cores", "0", deadline_sec=100)
    assert code == 1 and "--cores is 0: no job would ever start" in output


def test_missing_corpus(project):
    project.write_config(tokenize={"inputs": ["nowhere/*.txt"]})
    refused(project, "nowhere/*.txt")


def test_command_without_hooks(project):
    code, output = project.snakemake("train", "--no-hooks")
    assert code != 0 and "--no-hooks leaves out what Forge does before the first job" in output
    assert "Traceback" not in output and not (project.root / "results").exists()


def test_resume_without_a_checkpoint(project):
    code, output = project.snakemake("resume")
    assert code != 0
    assert "nothing to resume: none of base has" in output and "Traceback" not in output
    assert "Start with the target `train`" in output


def test_event_log_of_another_version(project):
    log = project.path("events.jsonl")
    log.parent.mkdir(parents=True)
    log.write_text('{"event": "failed", "format": 9}\n')
    code, output = project.snakemake("-n", "train")
    assert code != 0
    assert f"event `failed` in {log.relative_to(project.root)} has format 9" in output
    assert "Traceback" not in output and 'File "' not in output


def test_errors_of_the_corpus_name_file_and_place(project):
    bad = project.root / "corpus" / "bad.txt"
    bad.write_bytes(b"fine so far \xff\xfe no more")
    code, output = project.snakemake("train")
    assert code != 0
    assert "bad.txt" in output and "12" in output and "invalid_utf8" in output


def test_corpus_without_held_out_documents(project):
    for file in sorted((project.root / "corpus").iterdir())[1:]:
        file.unlink()
    code, output = project.snakemake("train")
    assert code != 0
    assert "val" in output and "fix:" in output


def test_corpus_shorter_than_a_sample(project):
    project.one_rank()
    project.write_config(train={"seq_len": 100000})
    code, output = project.snakemake("train")
    assert code != 0
    assert "100000" in output and "Traceback" not in output


def test_ranks_that_cannot_share_the_batch(project):
    project.write_config(train={"batch_size": 7})
    code, output = project.snakemake("train")
    assert code != 0
    assert "batch_size 7 cannot be shared by a world of 2" in output


def test_config_that_is_no_plain_values_is_refused_at_once(project):
    """Snakemake's own reader took minutes and gigabytes for 300 bytes, and ended with tracebacks."""
    config = project.root / "config/config.yaml"
    names = "abcdefghi"
    config.write_text(
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{name}: &{name} [{','.join(['*' + below] * 9)}]\n" for below, name in pairwise(names)
        )
    )
    refused(project, "config file config/config.yaml: line 2: the alias *a is not supported")
    config.write_text(f"train: {{max_steps: {'9' * 5000}}}\n")
    refused(project, "train.max_steps is '999", "exceeded maximum size")


def test_words_of_the_config_mean_the_same_as_in_a_cell(project):
    """YAML 1.1 reads 010 as 8 and 1:30 as 90."""
    project.write_config()
    config = project.root / "config/config.yaml"
    config.write_text(config.read_text().replace("max_steps: 12", "max_steps: 1:30"))
    refused(project, "train.max_steps is '1:30': Input should be a valid integer")


def test_home_that_does_not_exist_stops_nothing(project, monkeypatch):
    """As on nodes that do not mount home directories: Snakemake keeps its source cache there."""
    monkeypatch.setenv("HOME", "/dev/null/home")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    code, output = project.snakemake("train", "-n")
    assert code == 0, output[-3000:]
    assert "train_run" in output
