"""Parameters of the rules: tracked ones (what a result is) and places (where files are, how it is computed).

The rules pass places through functions that take ``input``, ``output``, ``resources`` or ``threads``;
Snakemake does not
compare such parameters with those of the last run.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..config.schema import Config
from ..model.identity import PROCESSOR_FILES
from . import flags
from .code_version import code_version
from .paths import External, Paths, external_name, literal
from .records import RECORD

PROGRAMS = {
    "clone_dataset_builder": "clone_dataset_builder.py",
    "build_tmdb": "build_tmdb.py",
    "identify_tmdb": "identify_tmdb.py",
    "prepare_model": "prepare_model.py",
    "prepare_benchmark": "prepare_benchmark.py",
    "validate_tmdb": "validate_tmdb.py",
    "data_report": "data_report.py",
    "train": "train_accelerate.py",
    "valloss": "eval_valloss.py",
    "mmmu": "eval_benchmark.py",
    "compare": "compare.py",
    "inspect": "inspect_samples.py",
    "prefetch": "prefetch.py",
}
MERGED_CONFIG = "config.yaml"
MODEL_FILES = ("config.json", *PROCESSOR_FILES, "tokenizer_config.json", "chat_template.jinja")
"""Files of a local model that Snakemake compares by content: small ones, so that a copy reruns nothing."""


class Places:
    """Parameters of the rules; a part of ``Run``."""

    config: Config
    paths: Paths
    checkout: Path
    scripts: str
    python: str
    arms: list[str]
    baseline: list[str]
    external: External | None

    @staticmethod
    def literal(path: str) -> str:
        """A path as part of a Snakemake pattern."""
        return literal(path)

    def code(self, *stages: str) -> str:
        """Code versions of the programs of a stage: raising one reruns the stage."""
        return " ".join(f"{stage}={code_version(Path(self.scripts) / PROGRAMS[stage])}" for stage in stages)

    def program(self, stage: str) -> list[str]:
        """The command that starts the program of a stage."""
        return [self.python, f"{self.scripts}/{PROGRAMS[stage]}"]

    # Data ------------------------------------------------------------------------------------------------

    def clone_flags(self) -> list[str]:
        """Tracked flags of the checkout."""
        builder = self.config.builder
        return (
            flags.flag("kind", builder.kind)
            + flags.flag("repo", builder.repo)
            + flags.flag("ref", builder.ref)
        )

    def builder_inputs(self) -> list[str]:
        """The checkout's record, or the list of sources."""
        if self.config.builder.kind in {"embedded", "git"}:
            return [literal(self.paths.clone_record)]
        return []

    def builder_flags(self) -> list[str]:
        """Tracked flags of the build, with the content of the list of sources."""
        builder = self.config.builder
        content = (
            flags.content_of(builder.sources, self.checkout) if builder.kind in {"hub", "json"} else None
        )
        return flags.builder_flags(self.config) + ([f"--sources-sha256={content}"] if content else [])

    def builder_places(self) -> list[str]:
        """Places of the build, and the arguments that go to the builder as they are."""
        builder = self.config.builder
        made: list[str] = []
        if builder.kind in {"embedded", "git"}:
            made += ["--checkout", builder.checkout]
        elif builder.sources:
            made += ["--sources", str(flags.find_file(builder.sources, self.checkout))]
        return made

    def validation_flags(self) -> list[str]:
        """Tracked flags of the validation pass."""
        return flags.validation_flags(self.config)

    def validation_places(self, threads: int) -> list[str]:
        """Places of the validation pass."""
        return [
            *("--data", self.paths.data),
            *("--model", self.base_model),
            *("--output-dir", self.paths.validation),
            *("--workers", str(min(threads, self.config.data.workers))),
            *flags.base_model_flags(self.config),
        ]

    def split_flags(self) -> list[str]:
        """Tracked flags of the split."""
        return flags.split_flags(self.config)

    def report_places(self) -> list[str]:
        """Places of the data report."""
        return [
            *("--data", self.paths.data),
            *("--validation", self.paths.validation),
            *("--output-dir", f"{self.paths.output}/data_report"),
        ]

    def inspect_places(self) -> list[str]:
        """Flags of ``inspect_samples.py``."""
        return [
            *flags.sample_flags(self.config),
            *("--data", self.paths.data, "--model", self.base_model, "--validation", self.paths.validation),
            *("--output-dir", f"{self.paths.output}/inspect"),
            *flags.base_model_flags(self.config),
        ]

    def prefetch_places(self) -> list[str]:
        """Flags of ``prefetch.py``: what is embedded needs no fetching."""
        model, mmmu = self.config.model, self.config.evaluation.mmmu
        wanted: list[str] = []
        if model.path != "embedded":
            wanted += flags.flag("model", model.path) + flags.flag("revision", model.revision)
        if mmmu.dataset != "embedded":
            wanted += flags.flag("dataset", mmmu.dataset) + flags.flag("split", mmmu.split)
            wanted += flags.flag("subjects", mmmu.subjects)
        return wanted

    # Model and benchmark ---------------------------------------------------------------------------------

    @property
    def base_model(self) -> str:
        """The base model as the programs take it."""
        return (
            f"{self.paths.output}/base_model"
            if self.config.model.path == "embedded"
            else self.config.model.path
        )

    def model_inputs(self, tmdb: Callable[..., Any]) -> list[Any]:
        """The embedded tokenizer is trained on the data; other models need only themselves."""
        if self.config.model.path == "embedded":
            return [tmdb]
        folder = Path(self.config.model.path)
        return [literal(str(folder / name)) for name in MODEL_FILES if (folder / name).is_file()]

    def model_flags(self) -> list[str]:
        """Tracked flags of the base model."""
        return flags.model_flags(self.config)

    def model_places(self) -> list[str]:
        """Places of the base model."""
        return ["--output-dir", self.paths.output, "--data", self.paths.data, *flags.trust_flags(self.config)]

    @property
    def benchmark_folder(self) -> str:
        """Folder of the embedded benchmark."""
        return literal(self.paths.benchmark)

    def benchmark_flags(self) -> list[str]:
        """Tracked flags of the embedded benchmark."""
        return flags.flag("rows", self.config.evaluation.mmmu.rows)

    def benchmark_inputs(self) -> list[str]:
        """The embedded benchmark's summary, or nothing for a data set from elsewhere."""
        embedded = self.config.evaluation.mmmu.dataset == "embedded"
        return [f"{self.benchmark_folder}/benchmark.json"] if embedded else []

    # Training --------------------------------------------------------------------------------------------

    def seed(self, seed_part: str) -> int:
        """The seed of a folder part ``seed-N/``; of the only training where it is empty."""
        return int(seed_part.strip("/").removeprefix("seed-")) if seed_part else self.config.training_seeds[0]

    def train_flags(self, arm: str, seed_part: str) -> list[str]:
        """Tracked flags of a training."""
        return flags.training_flags(self.config, arm, self.seed(seed_part))

    def world(self) -> str:
        """Processes and machines: part of what a training is."""
        return flags.world(self.config)

    def deepspeed_content(self) -> str:
        """The content of the DeepSpeed file."""
        content = flags.content_of(self.config.training.deepspeed_config, self.checkout)
        return f"deepspeed {content}" if content else "no deepspeed"

    def saved(self, arm: str, seed_part: str) -> str:
        """``saved`` where the model is to be saved or was; switching saving off later costs no training."""
        if self.config.training.save_final_model:
            return "saved"
        file = Path(f"{self.paths.output}/{arm}/{seed_part}checkpoint.json")
        try:
            return "saved" if json.loads(file.read_text(encoding="utf-8")).get("saved") else "not saved"
        except (OSError, ValueError):
            return "not saved"

    def train_places(self, arm: str, seed_part: str) -> list[str]:
        """Places of a training and the flags that change nothing about it."""
        return [
            *("--data", self.paths.data),
            *("--validation", self.paths.validation),
            *("--model", self.base_model),
            *("--output-dir", f"{self.paths.output}/{arm}/{seed_part}".rstrip("/")),
            *("--save-final-model", "1" if self.saved(arm, seed_part) == "saved" else "0"),
            *flags.training_runtime_flags(self.config, arm, self.checkout),
        ]

    def record_command(self, arm: str, seed_part: str) -> list[str]:
        """The command that records what a training was made with: what the guard compares later, and the
        merged configuration."""
        # Only what differs from the schema's defaults: the command stays short enough to read in a log.
        changed = self.config.model_dump(mode="json", exclude_defaults=True)
        folder = f"{self.paths.output}/{arm}/{seed_part}"
        return [
            *(self.python, f"{self.scripts}/record_run.py"),
            *("--output", f"{folder}{RECORD}", "--arm", arm, "--seed", str(self.seed(seed_part))),
            *("--config", json.dumps(changed, ensure_ascii=False, separators=(",", ":"))),
            *("--include", f"data={self.paths.data_identity}"),
            *("--include", f"builder={self.paths.clone_record}"),
            *("--include", f"base_model={self.paths.output}/model.json"),
        ]

    # Evaluation ------------------------------------------------------------------------------------------

    def valloss_flags(self) -> list[str]:
        """Tracked flags of validation loss."""
        return flags.valloss_flags(self.config)

    def mmmu_flags(self) -> list[str]:
        """Tracked flags of MMMU-MC."""
        return flags.mmmu_flags(self.config)

    def valloss_places(self, checkpoint: str, output: Sequence[str]) -> list[str]:
        """Places of validation loss."""
        return [
            *("--data", self.paths.data, "--validation", self.paths.validation),
            *self._evaluation_places(checkpoint, output[0]),
            *flags.evaluation_runtime_flags(self.config, self.config.evaluation.valloss.token_budget),
        ]

    def mmmu_places(self, checkpoint: str, output: Sequence[str]) -> list[str]:
        """Places of MMMU-MC."""
        embedded = self.config.evaluation.mmmu.dataset == "embedded"
        return [
            *(("--dataset", self.paths.benchmark) if embedded else ()),
            *self._evaluation_places(checkpoint, output[0]),
            *flags.evaluation_runtime_flags(self.config, self.config.evaluation.mmmu.batch_token_budget),
        ]

    def _evaluation_places(self, checkpoint: str, output: str) -> list[str]:
        return [
            *("--checkpoint", checkpoint),
            *("--base-model", self.base_model),
            *flags.flag("base-model-revision", self.config.model.revision),
            *("--output-dir", posixpath.dirname(output)),
        ]

    @property
    def external_name(self) -> str:
        """Name of the external checkpoint in logs."""
        return literal(external_name(self.external.checkpoint)) if self.external else ""

    # Comparison ------------------------------------------------------------------------------------------

    def compare_flags(self) -> list[str]:
        """Tracked flags of the comparison."""
        return ["--arms", ",".join([*self.arms, *self.baseline]), *flags.compare_flags(self.config)]

    def compare_places(self) -> list[str]:
        """Places of the comparison."""
        return [
            *(
                "--arms-root",
                self.paths.output,
                "--output-dir",
                self.paths.results,
                "--run-name",
                self.config.run,
            ),
            *("--config", f"{self.paths.results}/{MERGED_CONFIG}"),
        ]

    def merged_config(self) -> str:
        """The merged configuration as YAML."""
        return yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
