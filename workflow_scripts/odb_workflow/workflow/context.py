"""One run of the workflow: configuration, files, parameters and resources, in one object that the rules
use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.load import Loaded
from ..config.schema import BASELINE, Config
from ..runtime.errors import UserError
from .lifecycle import Lifecycle
from .paths import (
    MMMU_DIR,
    VALLOSS_DIR,
    External,
    Paths,
    arm_of_checkpoint,
    external_checkpoint,
    literal,
)
from .places import PROGRAMS, Places

RESULT_FILES = {
    "valloss": f"{VALLOSS_DIR}/eval_results.json",
    "mmmu": f"{MMMU_DIR}/mmmu_mc_likelihood_results.json",
}


class Run(Places, Lifecycle):
    """What the rules need to know, computed from the configuration."""

    def __init__(self, loaded: Loaded, checkout: Path, python: str = "python") -> None:
        """
        Args:
            loaded: The checked configuration.
            checkout: Folder of the Snakefile.
            python: Interpreter of the programs, as the shell finds it.
        """
        self.loaded = loaded
        self.config: Config = loaded.config
        self.paths = Paths(loaded.config)
        self.checkout = checkout
        self.scripts = str(checkout / "workflow_scripts")
        self.python = python
        self.out = literal(self.paths.output)
        self.results = literal(self.paths.results)
        self.logs = literal(self.paths.logs)
        self.arms = list(self.config.arms)
        self.targets: list[str] = []
        self.stop_at_start: UserError | None = None
        self.baseline = [BASELINE] if self.config.evaluation.untrained_baseline else []
        self.evaluated: tuple[str, str] | None = arm_of_checkpoint(self.paths, [*self.arms, BASELINE])
        self.external: External | None = None if self.evaluated else external_checkpoint(self.paths)

    # Files -----------------------------------------------------------------------------------------------

    def files(self, arm: str, name: str) -> list[str]:
        """A file of an arm, one per seed."""
        return [f"{self.paths.output}/{arm}/{part}{name}" for part in self.paths.seed_parts(arm)]

    def trained(self, arm: str) -> list[str]:
        """Files that say that an arm is trained."""
        return self.files(arm, "checkpoint.json")

    def evaluations(self, arm: str) -> list[str]:
        """Both evaluations of an arm."""
        return [file for name in RESULT_FILES.values() for file in self.files(arm, name)]

    def summaries(self) -> list[str]:
        """Summaries of all trainings."""
        return [file for arm in self.arms for file in self.files(arm, f"train_summary_{arm}.json")]

    def all_evaluations(self) -> list[str]:
        """Evaluations of all arms and of the untrained model."""
        return [file for arm in [*self.arms, *self.baseline] for file in self.evaluations(arm)]

    def comparison_files(self) -> list[str]:
        """Files of the comparison."""
        return [f"{self.paths.results}/comparison.{end}" for end in ("json", "html")]

    @property
    def default_arm(self) -> str:
        """The arm that `eval_valloss` and `benchmark` evaluate where no checkpoint is named."""
        return "odb" if "odb" in self.arms else self.arms[0]

    def checkpoint_evaluation(self, stage: str) -> list[str]:
        """What `eval_valloss` and `benchmark` make: of the named checkpoint, by default of the ODB arm."""
        name = RESULT_FILES[stage]
        if self.external:
            return [f"{self.external.folder}/{name}"]
        if self.evaluated:
            arm, part = self.evaluated
            return [f"{self.paths.output}/{arm}/{part}{name}"]
        return self.files(self.default_arm, name)

    # Resources -------------------------------------------------------------------------------------------

    def gpus(self, stage: str) -> int:
        """GPUs per machine of a job of ``stage`` (data, train, evaluate, compare)."""
        wanted = self.stage(stage).gpu
        if wanted != "auto":
            return int(wanted)
        return self.processes(stage) if self.config.device == "cuda" else 0

    def processes(self, stage: str) -> int:
        """Processes per machine of a job of ``stage``."""
        if stage == "train":
            return self.config.training.num_processes
        return self.config.evaluation.num_processes if stage == "evaluate" else 1

    def stage(self, stage: str) -> Any:
        """Threads, memory, time and GPUs of a stage."""
        return getattr(self.config.resources, stage)

    def device_resources(self) -> dict[str, Any]:
        """GPUs of a training, and on several machines one SLURM job whose nodes the rule itself starts."""
        machines, gpus = self.config.training.num_machines, self.gpus("train")
        if machines == 1:
            return {"gpu": gpus}
        # `gpu` would be counted over all nodes and could be spread unevenly; `gres` counts per node.
        per_node = {"gres": f"gpu:{gpus}"} if gpus else {}
        return {"gpu": 0, "mpi": "srun", "nodes": machines, "tasks": machines, "tasks_per_gpu": 0, **per_node}

    def launched(self, stage: str, threads: int) -> list[str]:
        """The command that starts the program of a stage (train, valloss, mmmu) on its devices."""
        kind = "train" if stage == "train" else "evaluate"
        made = ["--processes", self.processes(kind), "--gpus", self.gpus(kind), "--threads", threads]
        if stage == "train":
            training = self.config.training
            made += ["--machines", training.num_machines, "--port", training.master_port, "--accelerate"]
        launcher, program = f"{self.scripts}/launch.py", f"{self.scripts}/{PROGRAMS[stage]}"
        return [self.python, launcher, *map(str, made), "--", program]
