"""The profile of Snakemake in use: the machine.yaml beside it, and what a command has taken from it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.cluster import jobs
from forge.core.errors import ConfigError

MACHINE = "machine.yaml"


@dataclass(frozen=True)
class Profile:
    """What a Snakemake command reads from its profile; empty without a profile, and inside a job."""

    files: tuple[Path, ...] = ()  # config.yaml of each, of which the last wins
    replaced: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Rule -> resources that the profile sets for it, and the command line has removed."""
    named: str = ""  # the key `machine` of train_run

    @classmethod
    def of_command(
        cls, arguments: Sequence[str], resources: Mapping[str, Mapping[str, Any]]
    ) -> Profile:
        """arguments: of the command, without its name. resources: by rule, as Snakemake has them."""
        from snakemake.cli import parse_args

        def parse(words: Sequence[str]) -> tuple[list[Path], Any]:
            parser, values = parse_args(list(words))
            return [Path(file) for file in parser._default_config_files], values

        # It says again which profile it uses. SystemExit: --directory has led away from the profile.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
            files, _ = parse(arguments)
            own = [word for file in files for word in ("--profile", str(file))]
            given = parse(own)[1].set_resources if own else {}
            left = {rule: values.keys() - resources.get(rule, {}) for rule, values in given.items()}
            replaced = {rule: sorted(names) for rule, names in left.items() if names}
            # Resources.get() has no default.
            of_train = dict(given.get(jobs.TRAIN_RULE, {}))
            named = str(of_train["machine"].raw) if "machine" in of_train else ""
            return cls(tuple(files), replaced, named)
        return cls()

    @property
    def machine(self) -> str | None:
        """The machine.yaml beside the profile's config.yaml, if there is one."""
        beside = (file.with_name(MACHINE) for file in reversed(self.files))
        return next((str(path) for path in beside if path.exists()), None)

    def refuse_other_machine(self) -> None:
        """ConfigError where the profile names a machine.yaml other than that beside the profile."""
        beside = self.machine
        if self.named and beside and Path(self.named).resolve() != Path(beside).resolve():
            raise ConfigError(
                f"{self.files[-1]} says machine: {self.named}, and {beside} lies beside it",
                cause="a copy of another profile still names that one's file: what you change in"
                " the copy's own would not be read",
                fix=f"remove the line `machine: {self.named}` (the {MACHINE} beside it is then"
                f" read), or remove {beside}",
            )

    def refuse_replaced(self, due: Collection[str], words: str) -> None:
        """ConfigError where --set-resources has removed what the profile sets for a rule.

        due: rules that will run. words: what to give --config instead.
        """
        for rule in self.replaced.keys() & due:
            raise ConfigError(
                f"--set-resources leaves {rule} without {', '.join(self.replaced[rule])}, which"
                f" {self.files[-1]} sets",
                cause="Snakemake takes this option of the command line in place of all that the"
                " profile sets for all rules",
                fix=f"for another size in one command give `--config {words}` instead; for other"
                " resources edit a copy of the profile",
            )
