"""The run's configuration, folders and helpers. Everything longer than a line lives in odb_workflow.workflow."""

import sys
from pathlib import Path

# `current_basedir` is right also where another workflow uses this one as a module.
CHECKOUT = Path(str(workflow.current_basedir.get_path_or_uri(secret_free=False))).parent
sys.path.insert(0, str(CHECKOUT / "workflow_scripts"))

from odb_workflow.workflow.start import run_of

RUN = run_of(workflow, config, CHECKOUT)
OUT, RESULTS, LOGS = RUN.out, RUN.results, RUN.logs


def tmdb(wildcards):
    """The identity of the built TMDB; while it is being built, Snakemake waits with what needs it."""
    return checkpoints.build_tmdb.get().output.identity


wildcard_constraints:
    arm="|".join([*RUN.arms, "untrained"]),
    seed="(seed-[0-9]+/)?",


def tmdb_of_checkpoint(wildcards):
    """The TMDB that a checkpoint comes from; a base model from elsewhere comes from none.

    Whatever stands behind the build in the graph names the build itself as an input: Snakemake looks again only at
    those after a rebuild, and would run the others whether the TMDB differs or not.
    """
    trained = wildcards.arm != "untrained" or RUN.config.model.path == "embedded"
    return tmdb(wildcards) if trained else []
