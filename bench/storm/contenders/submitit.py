"""submitit: a Python object is the job, and says how it starts again after a preemption or time limit."""

from __future__ import annotations

import shlex

from bench.storm import environments
from bench.storm.contender import SbatchContender


class Submitit(SbatchContender):
    """As research code does that uses submitit: the class has `checkpoint()`, which submits itself again,
    and the program resumes from its newest checkpoint. submitit calls `checkpoint()` in a signal handler
    of the first task only, so nothing is saved there. A job that failed stays failed."""

    name = "submitit"
    what = "submitit, `checkpoint()`, newest checkpoint"
    environment = "submitit"
    script_name = "submitit_paced.py"

    def script(self) -> str:
        """Run where people submit; submitit writes the script of the job."""
        python, own = environments.program(self.environment, "python"), self.layout
        words = [python, self.script_path, own.nodes, own.limit_minutes, "low", *self.options()]
        return shlex.join(map(str, words))

    def start(self) -> None:
        said = self.cluster.run("bash", "job.sh", cwd=self.folder).stdout
        self._job = said.split()[-1]

    def is_rank(self, words: list[str]) -> bool:
        return words[:2] == ["-m", "submitit.core._submit"] and str(self.folder) in words[2]

    def said(self) -> str:
        logs = sorted(self.folder.glob("submitit/*_log.*"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-800:]}" for log in logs)
