"""The workflow as a module of a user's own Snakefile, in a project without Forge's files.

Threats: a config that is not written because Snakemake calls no `onstart` of a module, or is not read;
and rules under other names, of which no profile says that they need GPUs.
"""

from __future__ import annotations

import shutil

import pytest
import yaml
from support.clone import REPOSITORY, Project, started_rules
from support.user_snakefile import DEPLOYED, WITH_OWN_RULES

import forge


@pytest.fixture
def user(project: Project) -> Project:
    """A project of a user, of which one rank trains: a Snakefile, config, a profile, and text."""
    project.one_rank()
    shutil.rmtree(project.root / "workflow")
    write_snakefile(project, DEPLOYED)
    return project


def write_snakefile(project: Project, text: str) -> None:
    path = project.root / "workflow/Snakefile"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def planned(project: Project, *arguments: str) -> str:
    code, output = project.snakemake(*arguments, "-n")
    assert code == 0, output
    return output


def refused(project: Project, *arguments: str) -> str:
    code, output = project.snakemake(*arguments, "-n")
    assert code == 1 and "Traceback" not in output, output
    return output


def test_snakefile_of_snakedeploy_trains_and_calls_the_users_onstart_too(user: Project) -> None:
    write_snakefile(user, f'{DEPLOYED}\nonstart:\n    print("my own onstart")\n')
    code, output = user.snakemake()
    assert code == 0, output
    assert user.read("validated.json")["step"] == 12
    assert output.count("my own onstart") == 1
    assert output.splitlines()[-1].split()[:2] == ["base", "validated"], "the table of the end"
    code, output = user.snakemake()
    assert code == 0 and started_rules(output) == [], output


def test_onstart_before_the_module_is_called_and_a_changed_rule_starts_nothing_twice(
    user: Project,
) -> None:
    """Snakemake reads Forge's rules a second time for the rule that the user changes."""
    write_snakefile(
        user,
        'onstart:\n    print("my own onstart")\n\n\n'
        f"{DEPLOYED}\n\nuse rule report_run from forge with:\n    threads: 2\n",
    )
    code, output = user.snakemake("--until", "tokenizer")
    assert code == 0 and output.count("my own onstart") == 1, output
    assert output.count("run   state") == 1, "one table at the end"


@pytest.mark.parametrize(
    ("config", "section"), [("config", False), ('config["forge"]', True), ("", False)]
)
def test_config_is_read_as_forge_reads_it_whole_or_a_section(
    user: Project, config: str, section: bool
) -> None:
    """`010` is 10 for Forge and 8 for Snakemake. Without `config:` Forge reads config/config.yaml, and
    what the user's Snakefile reads is its own."""
    text = DEPLOYED.replace("    config:\n        config\n", f"    config:\n        {config}\n")
    if not config:
        (user.root / "mine.yaml").write_text("mine: 1\n")
        text = text.replace("    config:\n        \n", "").replace(
            "config/config.yaml", "mine.yaml"
        )
    write_snakefile(user, text)
    path = user.root / "config/config.yaml"
    values = yaml.safe_load(path.read_text().replace("max_steps: 12", "max_steps: 987654"))
    written = yaml.safe_dump({"forge": values, "mine": 1} if section else values)
    path.write_text(written.replace("987654", "010"))
    user.snakemake("--until", "config_run")
    assert user.read("config.json")["train"]["max_steps"] == 10


def test_config_that_is_the_name_of_a_file_is_refused(user: Project) -> None:
    write_snakefile(user, DEPLOYED.replace("        config\n", '        "config.yaml"\n'))
    said = refused(user)
    assert "`config:` of the module is 'config.yaml', not keys and values" in said


def test_config_of_python_is_taken_as_it_is_with_options_of_the_command(user: Project) -> None:
    own = 'config["train"]["max_steps"] = 5\n\n\n# declare'
    write_snakefile(user, DEPLOYED.replace("# declare", own))
    user.snakemake("--until", "config_run", "--config", "train={lr: 0.25}", "nodes=1")
    train = user.read("config.json")["train"]
    assert (train["max_steps"], train["lr"]) == (5, 0.25)


def test_other_file_of_the_user_and_the_options_of_a_command_are_read(user: Project) -> None:
    (user.root / "config/config.yaml").rename(user.root / "mine.yaml")
    (user.root / "more.yaml").write_text("train: {max_steps: 7, seed: 1}\n")
    write_snakefile(user, DEPLOYED.replace("config/config.yaml", "mine.yaml"))
    user.snakemake(
        "--until", "config_run", "--configfile", "more.yaml", "--config", "train={seed: 2}"
    )
    config = user.read("config.json")
    assert (config["train"]["max_steps"], config["model"]["dim"]) == (7, 32)


def test_first_rule_of_the_user_or_else_train_is_the_default_target(user: Project) -> None:
    own = '\n\nrule mine:\n    shell:\n        "true"\n\n\n'
    write_snakefile(user, DEPLOYED.replace("\n\n# declare", f"{own}# declare"))
    assert "rule train:" not in planned(user) and "rule mine:" in planned(user)
    write_snakefile(user, DEPLOYED + own)
    assert "rule train:" in planned(user) and "rule mine:" not in planned(user)


def test_rules_of_the_user_make_the_text_before_and_plot_after(user: Project) -> None:
    """In one command, although the text is not there when the workflow starts. Other text is never taken
    for that of the checkpoint, also where nothing is left to train."""
    raw = user.root / "raw/book.txt"
    raw.parent.mkdir()
    text = "\n\n\n".join(path.read_text() for path in (user.root / "corpus").iterdir())
    raw.write_text(text)
    user.write_config(tokenize={"inputs": ["rule:corpus/book.txt"]})
    write_snakefile(user, WITH_OWN_RULES)
    code, output = user.snakemake()
    assert code == 0 and "<svg" in (user.root / "plots/base.svg").read_text(), output
    order = started_rules(output)
    assert order.index("clean") < order.index("tokenizer") < order.index("plot")
    assert {"train_run", "report_run"} < set(order) and order[-1] == "all"
    code, output = user.snakemake()
    assert code == 0 and started_rules(output) == [], output

    raw.write_text(f"{text}another line\n")
    code, output = user.snakemake()
    assert code == 1 and "clean" in started_rules(output), output
    assert "the tokens of this run have digest" in output
    assert "restore the old input, or give the run a new name" in output
    raw.write_text(text)
    code, output = user.snakemake()
    assert code == 0 and "nothing to train" in output, output


def test_file_that_no_rule_makes_and_a_pattern_are_refused_by_name(user: Project) -> None:
    user.write_config(tokenize={"inputs": ["rule:corpus/none.txt"]})
    assert "corpus/none.txt" in refused(user)
    user.write_config(tokenize={"inputs": ["rule:corpus/*.txt"]})
    assert "'rule:corpus/*.txt' is not the path of one file" in refused(user)
    user.write_config(tokenize={"inputs": ["corpus/none.txt"]})
    assert "a file that a rule of your own makes is named rule:FILE" in refused(user)


def test_renamed_rules_and_paths_are_refused_by_name(user: Project) -> None:
    write_snakefile(user, f"{DEPLOYED} as forge_*\n".replace("forge\n as", "forge as"))
    said = refused(user)
    assert "train_run is used under the name forge_train_run" in said
    assert "write `use rule * from forge`" in said
    write_snakefile(
        user, DEPLOYED.replace("        config\n", '        config\n    prefix:\n        "x"\n')
    )
    assert "remove it, and set `results` and `data`" in refused(user)


def test_other_version_than_the_installed_one_is_refused_by_name(user: Project) -> None:
    """That of a Snakefile by `forge init`, and that of rules from elsewhere, such as a tag of a host."""
    assert user.forge("init", "made").returncode == 0
    made = user.root / "made/workflow/Snakefile"
    write_snakefile(user, made.read_text().replace(f'"{forge.__version__}"', '"9.9.9"'))
    said = refused(user)
    assert f"Forge 9.9.9, and Forge {forge.__version__} is installed" in said
    assert "forge-9.9.9-py3-none-any.whl" in said
    rules = user.root / "rules of 9.9.9"
    shutil.copytree(REPOSITORY / "workflow", rules)
    text = (rules / "Snakefile").read_text()
    (rules / "Snakefile").write_text(text.replace(f'"{forge.__version__}"', '"9.9.9"'))
    write_snakefile(user, DEPLOYED.replace(f"{REPOSITORY}/workflow", str(rules)))
    assert f"this workflow is for Forge 9.9.9, and Forge {forge.__version__} is" in refused(user)


def test_module_needs_no_profile(user: Project) -> None:
    """Else the machine file of Forge's own profile for this machine would be looked for beside the user's
    Snakefile."""
    shutil.rmtree(user.root / "profiles")
    code, output = user.snakemake("--cores=1", "-n", profile="none")
    assert code == 0 and "rule train_run:" in output, output
