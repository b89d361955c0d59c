"""A checkout whose programs only write their output files, so that a whole run takes seconds.

Snakefile, rules, configuration, flags and records are the real ones; what Snakemake records about the
finished run is therefore what it records about a real one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

STUB = '''\
"""Stand-in for {name}."""
import json, os, pathlib, sys, time
CODE_VERSION = {version}
arguments = sys.argv[1:]

def value(option, default=None):
    return arguments[arguments.index(option) + 1] if option in arguments else default

def write(path, content):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))

with open(os.environ.get("STUB_CALLS", os.devnull), "a") as calls:
    calls.write(json.dumps(["{name}", *arguments]) + "\\n")
if os.environ.get("STUB_FAIL") == "{name}":
    print("first line of the fault", file=sys.stderr)
    sys.exit("error: the stub was told to fail")
{body}
'''

BODIES = {
    "clone_dataset_builder": 'write(value("--record"), {"ref": value("--ref")})',
    "build_tmdb": (
        'data = pathlib.Path(value("--output"))\n'
        'sizes = value("--sizes", "default")\n'
        'write(data / "records.jsonl", f"records {sizes}\\n")\n'
        'write(data / "metadata.json", {"num_records": 3, "checksum": sizes, "flags": arguments})\n'
        'write(data / ".built-by-workflow", "")'
    ),
    "prepare_model": (
        'out = pathlib.Path(value("--output-dir"))\n'
        'write(out / "model.json", {"model": value("--model")})\n'
        'write(out / "untrained" / "checkpoint.json", {"model_dir": "../base_model", "saved": True})'
    ),
    "prepare_benchmark": (
        'write(pathlib.Path(value("--output")) / "benchmark.json", {"rows": value("--rows")})'
    ),
    "validate_tmdb": (
        'out = pathlib.Path(value("--output-dir"))\n'
        'for name in ("validation.json", "accepted.parquet", "rejects.jsonl"):\n'
        '    write(out / name, " ".join(arguments[:4]))'
    ),
    "data_report": (
        'for name in ("data_report.json", "data_report.html"):\n'
        '    write(pathlib.Path(value("--output-dir")) / name, "{}")'
    ),
    "train_accelerate": (
        'out = pathlib.Path(value("--output-dir"))\n'
        'write(out / f"train_summary_{value(\'--arm\')}.json", {"code_version": CODE_VERSION})\n'
        'write(out / "step_log.jsonl", "{}")\n'
        'saved = value("--save-final-model") == "1"\n'
        'write(out / "checkpoint" / "weights", "weights")\n'
        'files = [{"path": "weights", "bytes": 7}]\n'
        'record = {"model_dir": "checkpoint", "saved": saved, "files": files, "flags": arguments}\n'
        'write(out / "checkpoint.json", record)\n'
        'time.sleep(float(os.environ.get("STUB_SLEEP", "0")))'
    ),
    "eval_valloss": (
        'for name in ("eval_results.json", "all_results.json", "per_sample_losses.jsonl"):\n'
        '    write(pathlib.Path(value("--output-dir")) / name, {"code_version": CODE_VERSION})'
    ),
    "eval_benchmark": (
        'results = "mmmu_mc_likelihood_results.json"\n'
        'for name in (results, "predictions.jsonl", "excluded.jsonl", "score_audit.json"):\n'
        '    write(pathlib.Path(value("--output-dir")) / name, {"code_version": CODE_VERSION})'
    ),
    "compare": (
        'for end in ("json", "csv", "md", "html"):\n'
        '    write(pathlib.Path(value("--output-dir")) / f"comparison.{end}", "{}")'
    ),
    "launch": "os.execv(sys.executable, [sys.executable, *arguments[arguments.index('--') + 1 :]])",
}
FOLDERS = ("rules", "config", "profiles", "envs", "dataset_builder")


def write_program(scripts: Path, name: str, version: int = 1) -> None:
    """Write the stand-in of one program."""
    body = BODIES[name]
    (scripts / f"{name}.py").write_text(
        STUB.replace("{name}", name).replace("{version}", str(version)).replace("{body}", body)
    )


def stub_checkout(repository: Path, target: Path) -> Path:
    """Copy the workflow to ``target`` with its programs replaced; returns ``target``."""
    target.mkdir(parents=True)
    for name in ("Snakefile", "config.yaml", "run.sh"):
        shutil.copy(repository / name, target / name)
    for name in FOLDERS:
        shutil.copytree(repository / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    scripts = target / "workflow_scripts"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        repository / "workflow_scripts" / "odb_workflow", scripts / "odb_workflow", ignore=ignored
    )
    for name in ("identify_tmdb", "record_run", "run_status"):
        shutil.copy(repository / "workflow_scripts" / f"{name}.py", scripts / f"{name}.py")
    for name in BODIES:
        write_program(scripts, name)
    return target
