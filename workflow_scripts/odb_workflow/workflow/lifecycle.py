"""What happens at the start of a run, after it, and after a failure."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

from ..config.load import Loaded
from ..config.schema import Config
from ..runtime.errors import UserError
from ..runtime.files import atomic_write_text
from ..training.finished import FINISHED_NAME
from .guard import write_last_run
from .paths import Paths
from .preflight import checks, uses_devices

LAST_LINES = 25
WAY_ON = (
    "Once the cause is mended, the same command goes on: finished stages stay, a training continues from "
    "its last resume point, an evaluation from what it has scored."
)
_LOG_LINE = re.compile(r"^\s*log: (?P<logs>.+) \(check log file\(s\) for error details\)", re.MULTILINE)


class Lifecycle:
    """Start, success and failure of a run; a part of ``Run``."""

    loaded: Loaded
    config: Config
    paths: Paths
    checkout: Path
    targets: list[str]
    stop_at_start: UserError | None

    def gpus(self, stage: str) -> int:
        """GPUs per machine of a job of a stage."""
        raise NotImplementedError

    def merged_config(self) -> str:
        """The merged configuration as YAML."""
        raise NotImplementedError

    def write_merged_config(self) -> None:
        """Write the merged configuration beside the outputs and beside the comparison."""
        text = "# Merged configuration of this run, written at its start.\n" + self.merged_config()
        for folder in (self.paths.output, self.paths.results):
            file = Path(folder) / "config.yaml"
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                atomic_write_text(file, text)

    def banner(self) -> str:
        """What will run with which configuration, in a few lines."""
        config = self.config
        arms = ", ".join(self._arm_text(name) for name in config.arms)
        seeds = f", seeds {', '.join(map(str, config.seeds))}" if len(config.seeds) > 1 else ""
        set_by = sorted({source for source in self.loaded.sources.values() if source != "config.yaml"})
        layers = " < ".join(
            ["config.yaml", *self.loaded.presets, *[s for s in set_by if s not in self.loaded.presets]]
        )
        training = config.training
        samples = f"at most {config.split.train_size}" if config.split.train_size else "all"
        return "\n".join(
            [
                f"run       {config.run}  ({self.paths.output}, {self.paths.results}, {self.paths.logs})",
                f"model     {config.model.path}",
                f"data      {self.paths.data}  (builder: {config.builder.kind})",
                f"arms      {arms}{seeds}",
                f"training  {samples} samples x {training.epochs:g} epochs, lr "
                f"{training.lr:g}, "
                f"{training.precision}, {training.num_machines} x {training.num_processes} process(es) on "
                f"{config.device}",
                f"config    {layers}",
            ]
        )

    def _arm_text(self, name: str) -> str:
        arm: Any = self.config.arms[name]
        size = getattr(arm, "token_budget", None)
        detail = f"budget {size}" if size else f"batch {arm.fixed_batch_size}"
        packed = ", packed" if arm.padding == "pack" else ""
        return f"{name} ({arm.loader}, {detail}{packed})"

    def start(self, workflow: Any) -> None:
        """Before the first job: banner, checks that stop the run, merged configuration.

        Raises:
            SystemExit: the run cannot work, or would overwrite another model's training.
        """
        print(self.banner(), file=sys.stderr, flush=True)
        jobs = list(workflow.dag.needrun_jobs())
        written = {file for job in jobs for file in job.output}
        used = {file for job in jobs for file in job.input} - written
        self.targets = [str(target) for target in workflow.dag_settings.targets]
        limit = getattr(workflow.global_resources.get("gpu"), "value", None)
        error = self.stop_at_start or checks(
            self.config,
            self.checkout,
            targets=self.targets,
            requests={stage: self.gpus(stage) for stage in ("train", "evaluate")},
            limit=limit,
            local=workflow.local_exec,
            written={os.path.dirname(file) for file in written},
            evaluated=sorted(file for file in used if os.path.basename(file) == "checkpoint.json"),
        )
        if error:
            refuse(error)
        for job in jobs:
            # Trained again although Snakemake saw the training end: what the last one left is not wanted.
            file = job.output.get("checkpoint")
            if file and os.path.exists(file) and not workflow.async_run(workflow.persistence.incomplete(job)):
                shutil.rmtree(Path(file).parent / FINISHED_NAME, ignore_errors=True)
        self.write_merged_config()
        if uses_devices(self.targets):
            write_last_run(self.paths.output)

    def succeeded(self) -> None:
        """After the last job: where to look."""
        page = Path(self.paths.results) / "comparison.html"
        if page.is_file():
            print(f"comparison: {page}", file=sys.stderr, flush=True)

    def failed(self, log: str | list[str]) -> None:
        """After a failure: each failed job's log and its last lines.

        Args:
            log: Snakemake's own log, or several of them.
        """
        files = [log] if isinstance(log, str) else log
        text = "\n".join(last_lines(file, count=100_000, size=10_000_000, indent="") for file in files)
        named = [file for line in _LOG_LINE.findall(text) for file in line.split(", ")]
        for file in dict.fromkeys(named):
            print(f"\nlast lines of {file}:", file=sys.stderr)
            print(last_lines(file), file=sys.stderr, flush=True)
        print(f"\n{WAY_ON}", file=sys.stderr, flush=True)


def refuse(error: UserError) -> NoReturn:
    """End this Snakemake with the message alone; it would frame an exception with places in the rules."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(1)


def last_lines(file: str, count: int = LAST_LINES, *, size: int = 64_000, indent: str = "    ") -> str:
    """The last lines of a log, indented, from its last ``size`` bytes; says so where there is none."""
    try:
        with open(file, "rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - size))
            lines = handle.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return f"{indent}(cannot be read: {error.strerror})"
    return "\n".join(f"{indent}{line}" for line in lines[-count:]) or f"{indent}(empty)"
