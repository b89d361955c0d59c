"""Files of a run, relative to the working directory."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..config.schema import BASELINE, Config

VALLOSS_DIR = "eval_out_accelerate_valloss"
MMMU_DIR = "mmmu_mc_likelihood_accelerate"


def literal(path: str) -> str:
    """A path as part of a Snakemake pattern: braces are not wildcards."""
    return path.replace("{", "{{").replace("}", "}}")


@dataclass(frozen=True)
class Paths:
    """All folders and files of a run."""

    config: Config

    @property
    def output(self) -> str:
        """Folder of the run."""
        return (self.config.output_root or f"outputs/{self.config.run}").rstrip("/")

    @property
    def results(self) -> str:
        """Folder of the comparison."""
        return (self.config.results_root or f"results/{self.config.run}").rstrip("/")

    @property
    def logs(self) -> str:
        """Folder of the logs."""
        return (self.config.log_root or f"logs/{self.config.run}").rstrip("/")

    @property
    def data(self) -> str:
        """Folder of the TMDB."""
        return (self.config.data.dir or f"data/{self.config.run}-tmdb").rstrip("/")

    @property
    def clone_record(self) -> str:
        """What was checked out: written beside the checkout."""
        return f"{self.config.builder.checkout.rstrip('/')}.json"

    @property
    def data_identity(self) -> str:
        """Checksum and size of the TMDB and nothing else, so that a rebuilt equal TMDB reruns nothing."""
        return f"{self.data}.identity.json"

    @property
    def validation(self) -> str:
        """Folder of the validation pass."""
        return f"{self.output}/tmdb_validation"

    @property
    def benchmark(self) -> str:
        """MMMU data set as the evaluation program takes it."""
        dataset = self.config.evaluation.mmmu.dataset
        return f"data/{self.config.run}-mmmu" if dataset == "embedded" else dataset

    def seed_part(self, seed: int | None) -> str:
        """``seed-N/`` where there are several seeds, else nothing."""
        return f"seed-{seed}/" if seed is not None and len(self.config.training_seeds) > 1 else ""

    def seed_parts(self, arm: str) -> list[str]:
        """The parts of all seeds of an arm; the base model has none."""
        return [""] if arm == BASELINE else [self.seed_part(seed) for seed in self.config.training_seeds]


@dataclass(frozen=True)
class External:
    """A checkpoint of another training, and where its results go."""

    checkpoint: str
    folder: str
    local: bool
    inputs: tuple[str, ...]


def external_name(checkpoint: str) -> str:
    """A folder name for a checkpoint: readable, and distinct for distinct checkpoints."""
    if not Path(checkpoint).is_dir():
        return re.sub(r"[^A-Za-z0-9._-]+", "--", checkpoint).strip("-.") or "checkpoint"
    full = os.path.realpath(checkpoint)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(full).name).strip("-.") or "checkpoint"
    return f"{name}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def external_checkpoint(paths: Paths) -> External | None:
    """The checkpoint that ODB_ACCEL_EVAL_CHECKPOINT names, or None where it is one of this run's arms or
    unset."""
    named = paths.config.evaluation.checkpoint
    if not named:
        return None
    folder = Path(named)
    local = folder.is_dir()
    root = paths.config.evaluation.output_root
    if root:
        place = root.rstrip("/")
    elif local and os.access(folder, os.W_OK):
        place = named.rstrip("/")
        if folder.name == "checkpoint" and (folder.parent / "checkpoint.json").is_file():
            place = str(folder.parent)
    else:
        place = f"{paths.output}/external/{external_name(named)}"
    inputs: tuple[str, ...] = ()
    if local:
        own = [folder / "checkpoint.json"] if (folder / "checkpoint.json").is_file() else []
        found = own or [
            path
            for pattern in ("config.json", "*.safetensors", "*.bin")
            for path in sorted(folder.glob(pattern))
        ]
        inputs = tuple(str(path) for path in found)
    return External(checkpoint=named, folder=place, local=local, inputs=inputs)


def arm_of_checkpoint(paths: Paths, arms: list[str]) -> tuple[str, str] | None:
    """(arm, seed part) when the named checkpoint is the folder of one of this run's arms, else None."""
    named = paths.config.evaluation.checkpoint
    if not named or paths.config.evaluation.output_root:
        return None
    real = os.path.realpath(named)
    for arm in arms:
        for part in paths.seed_parts(arm):
            folder = os.path.realpath(f"{paths.output}/{arm}/{part}")
            if real in {folder, os.path.join(folder, "checkpoint"), os.path.join(folder, "checkpoint.json")}:
                return arm, part
    return None
