"""Checks before the first job: each ends with one message in seconds what would fail after minutes or
hours."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..config.schema import Config
from ..runtime.errors import UserError, combine_errors
from ..runtime.lock import lock_holder
from ..tmdb.builders.program import foreign_folder_fault
from .flags import find_file
from .gpus import visible_devices
from .paths import Paths
from .ports import choose_port
from .status import checkpoint_fault

TORCH_FROM, TORCH_BELOW = (2, 9), (2, 15)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")
LIGHT_TARGETS = frozenset(
    {"data", "report", "inspect", "prefetch", "clone_dataset_builder", "build_tmdb", "data_report"}
)
"""Targets that need no GPU and train nothing."""


def uses_devices(targets: Iterable[str]) -> bool:
    """Whether any of the targets (none: the default one) trains or evaluates."""
    names = list(targets)
    return not names or any(name not in LIGHT_TARGETS for name in names)


def torch_fault(version: str | None) -> str | None:
    """Why this torch version cannot be used, or None."""
    span = f"{'.'.join(map(str, TORCH_FROM))} up to, not including, {'.'.join(map(str, TORCH_BELOW))}"
    if version is None:
        return f"torch is not installed in this environment; supported: {span}. Run ./run.sh install"
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in found.groups()) if found else (0, 0)
    if TORCH_FROM <= numbers < TORCH_BELOW:
        return None
    return f"torch {version} is outside the supported range ({span}). Install envs/requirements.txt"


def installed_torch() -> str | None:
    """The installed version, read without importing torch."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def model_fault(config: Config) -> str | None:
    """Why the model cannot be there, or None; a Hub id is looked up later, by its own rule."""
    path = config.model.path
    if path == "embedded":
        return None
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return None
        return f"model.path {path!r} is a folder without config.json, so not a Hugging Face model"
    if HUB_ID.match(path):
        return None
    return f"model.path {path!r} does not exist and is no Hub id (ODB_MM_MIX_MODEL)"


def gpu_fault(requests: dict[str, int], limit: int | None, devices: int | None) -> str | None:
    """Why the GPUs asked for cannot be had, or None.

    Args:
        requests: GPUs per job of each stage.
        limit: Snakemake's limit on the resource `gpu`; None: none.
        devices: Visible devices of this machine; None: jobs run elsewhere.
    """
    stage, most = max(requests.items(), key=lambda item: item[1])
    if most == 0:
        return None
    if devices is not None and most > devices:
        return (
            f"a job of {stage} needs {most} GPU(s), this machine shows {devices}. Lower "
            "training.num_processes or "
            "evaluation.num_processes, run where there are more, or set `device: cpu`"
        )
    if limit is not None and most > limit:
        return (
            f"a job of {stage} needs {most} GPU(s), but the limit is {limit} and Snakemake would cut the "
            "job down in "
            f"silence. Give --resources gpu={devices if devices else most}"
        )
    return None


def file_faults(config: Config, checkout: Path) -> list[str]:
    """Files named in the configuration that are not there."""
    faults = []
    if (
        config.training.deepspeed_config
        and not find_file(config.training.deepspeed_config, checkout).is_file()
    ):
        faults.append(f"training.deepspeed_config {config.training.deepspeed_config!r} does not exist")
    builder, data = config.builder, Paths(config).data
    if (
        builder.kind in {"hub", "json"}
        and builder.sources
        and not find_file(builder.sources, checkout).is_file()
    ):
        faults.append(f"builder.sources {builder.sources!r} does not exist")
    if builder.kind == "existing":
        for name in ("metadata.json", "records.jsonl"):
            if not (Path(data) / name).is_file():
                faults.append(f"builder.kind is existing, but data.dir {data!r} has no {name}")
    elif fault := foreign_folder_fault(Path(data)):
        # Snakemake deletes a rule's old outputs before the job that could refuse.
        faults.append(fault)
    return faults


def busy_faults(folders: Iterable[str]) -> list[str]:
    """Folders that another process writes to. Snakemake would delete the outputs there before the job that
    refuses, and with them what an orphan of a killed Snakemake has just finished.
    """
    return [
        f"{folder}: another process is writing there ({holder}). Wait until it has ended, or stop it (`kill` "
        "with that process id on that host lets a training write its resume point); then give the same "
        "command again"
        for folder in sorted(set(folders))
        if (holder := lock_holder(folder))
    ]


def checks(
    config: Config,
    checkout: Path,
    *,
    targets: Sequence[str],
    requests: dict[str, int],
    limit: int | None,
    local: bool,
    written: Iterable[str] = (),
    evaluated: Iterable[str] = (),
    devices: Callable[[], list[str]] = visible_devices,
    torch_version: Callable[[], str | None] = installed_torch,
) -> UserError | None:
    """All faults that can be seen before the first job, as one error; None when there are none.

    Args:
        targets: Of the command line.
        requests: GPUs per job of each stage.
        limit: Snakemake's limit on the resource `gpu`.
        local: Jobs run on this machine.
        written: Folders that jobs of this run write to.
        evaluated: ``checkpoint.json`` of finished trainings that jobs of this run evaluate.
    """
    faults = [*file_faults(config, checkout), *busy_faults(written)]
    faults += [fault for file in evaluated if (fault := checkpoint_fault(Path(file)))]
    found = [model_fault(config)]
    if uses_devices(targets):
        found.append(torch_fault(torch_version()))
        found.append(gpu_fault(requests, limit, len(devices()) if local else None))
        if local and config.training.num_machines > 1:
            found.append(
                f"training.num_machines is {config.training.num_machines}, which needs SLURM: "
                "run with --workflow-profile profiles/slurm"
            )
        elif local and config.training.num_processes > 1 and config.training.master_port:
            found.append(_port_fault(config.training.master_port))
    faults += [fault for fault in found if fault]
    return combine_errors(faults, "this run cannot work:") if faults else None


def _port_fault(port: int) -> str | None:
    try:
        choose_port(port)
    except UserError as error:
        return f"{error.what}; {error.fix} ({error.where})"
    return None
