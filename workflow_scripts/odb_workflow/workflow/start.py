"""Make a ``Run`` from what Snakemake knows while it reads the Snakefile."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.load import load_config
from ..runtime.errors import UserError
from .context import Run


def run_of(workflow: Any, config: Mapping[str, Any], checkout: Path) -> Run:
    """The run that this Snakemake process is about.

    Args:
        workflow: Snakemake's workflow object.
        config: Snakemake's ``config``: what was given on the command line, or by an enclosing workflow.
        checkout: Folder of the Snakefile.

    Raises:
        snakemake.exceptions.WorkflowError: the configuration is wrong; lists every fault.
    """
    from snakemake.exceptions import WorkflowError

    settings = workflow.config_settings
    as_module = dict(config) != dict(settings.overwrite_config)
    try:
        loaded = load_config(
            checkout,
            environment=os.environ,
            configfiles=() if as_module else settings.configfiles,
            command_line=config if as_module else settings.config,
        )
        return Run(loaded, checkout, _python(workflow))
    except UserError as error:
        raise WorkflowError(f"\n{error}") from None


def _python(workflow: Any) -> str:
    """This interpreter, also where its environment is not activated; the one on PATH inside a conda environment."""
    methods = getattr(workflow.deployment_settings, "deployment_method", None) or ()
    return "python" if methods else sys.executable
