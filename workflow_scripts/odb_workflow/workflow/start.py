"""Make a ``Run`` from what Snakemake knows while it reads the Snakefile."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.load import Loaded, load_config, nearest
from ..config.schema import RULES, TARGETS
from ..runtime.errors import UserError
from .context import Run
from .guard import (
    checkpoint_findings,
    findings,
    guard_error,
    guard_mode,
    needed_arms,
    other_model_error,
    read_last_run,
    recorded_layers,
)
from .lifecycle import refuse
from .paths import Paths
from .signals import pass_on_sigterm

GONE = (
    "or its identity file is gone, and Snakemake does not compare settings with finished results without it: "
    "a changed setting may rerun nothing. `./run.sh data` makes it again"
)


def run_of(workflow: Any, config: Mapping[str, Any], checkout: Path) -> Run:
    """The run that this Snakemake process is about.

    Args:
        workflow: Snakemake's workflow object.
        config: Snakemake's ``config``: what was given on the command line, or by an enclosing workflow.
        checkout: Folder of the Snakefile.

    Raises:
        SystemExit: the configuration is wrong (lists every fault), or the guard stops the run.
    """
    if not workflow.is_main_process:
        pass_on_sigterm()
    settings = workflow.config_settings
    as_module = dict(config) != dict(settings.overwrite_config)

    def load(recorded: Any = None) -> Loaded:
        return load_config(
            checkout,
            environment=os.environ,
            configfiles=() if as_module else settings.configfiles,
            command_line=config if as_module else settings.config,
            recorded=recorded,
        )

    python = _python(workflow)
    try:
        run = Run(load(), checkout, python)
        if not workflow.is_main_process or as_module:
            return run
        run = _guarded(run, requested_targets(sys.argv[1:], run.arms), load)
    except UserError as error:
        refuse(error)
    if data_is_gone(run.paths):
        print(f"note: {run.paths.data} {GONE}", file=sys.stderr, flush=True)
    if workflow.output_settings.dryrun:  # Snakemake calls `onstart` in real runs only
        print(run.banner(), file=sys.stderr, flush=True)
    return run


def data_is_gone(paths: Paths) -> bool:
    """Whether results are there whose TMDB is not."""
    there = all(Path(file).is_file() for file in (paths.data_identity, f"{paths.data}/metadata.json"))
    return not there and Path(f"{paths.validation}/validation.json").is_file()


def requested_targets(arguments: Sequence[str], arms: Sequence[str]) -> list[str]:
    """Targets named on Snakemake's command line; it tells them to the workflow only after reading the
    Snakefile.

    Raises:
        UserError: ``train_ARM``, ``eval_ARM`` or ``all_ARM`` of an arm that the configuration does not have.
    """
    kinds = ("train", "eval", "all")
    known = {*TARGETS, *RULES, *(f"{kind}_{arm}" for kind in kinds for arm in arms)}
    counts = {"-c", "--cores", "-j", "--jobs"}  # `--cores all` is no target
    targets = []
    for option, name in zip(["", *arguments], arguments, strict=False):
        kind, _, arm = name.partition("_")
        if name in known:
            targets += [] if option in counts else [name]
        elif kind in kinds and arm.isidentifier():
            near = nearest(arm, arms)
            raise UserError(
                f"there is no arm {arm!r}" + (f"; did you mean {near!r}?" if near else ""),
                where=name.replace("_", "-", 1),
                fix=f"the arms of this configuration: {', '.join(arms)}; others are added under arms:",
            )
    return targets


def _guarded(run: Run, targets: list[str], load: Any) -> Run:
    run.targets = targets
    mode = guard_mode()
    evaluated = run.evaluated[0] if run.evaluated else ("" if run.external else run.default_arm)
    arms = needed_arms(targets, run.arms, evaluated)
    found = findings(run.config, arms, read_last_run())
    if run.external and {"eval_valloss", "benchmark"} & set(targets):
        found += checkpoint_findings(run.config)
    if mode == "recorded":
        if not found:
            return run
        run = Run(load(recorded_layers(found)), run.checkout, run.python)
        run.targets = targets
        return run
    if found and mode == "stop":
        error = guard_error(found)
        assert error is not None
        raise error
    if mode == "tell":
        for item in found:
            if not item.elsewhere:
                print(f"note: {item.text()}", file=sys.stderr, flush=True)
    run.stop_at_start = other_model_error(run.config, arms)
    return run


def _python(workflow: Any) -> str:
    """This interpreter, also where its environment is not activated; the one on PATH inside a conda
    environment."""
    methods = getattr(workflow.deployment_settings, "deployment_method", None) or ()
    return "python" if methods else sys.executable
