"""The documents say what is true: links lead somewhere, commands and rules exist, no machine is named."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/how-it-works.md",
    "docs/troubleshooting.md",
    "results/examples/README.md",
)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_relative_links_exist(repository: Path, name: str) -> None:
    text = (repository / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text)
    broken = [
        link for link in links if "://" not in link and not ((repository / name).parent / link).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_path_of_one_machine(repository: Path, name: str) -> None:
    text = (repository / name).read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(root|home|work|tmp|opt|mnt)/", text)


def test_commands_of_the_readme_are_those_of_run_sh(repository: Path) -> None:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| `./run.sh` |") :].split("\n\n")[0]
    in_table = {
        name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])
    }
    usage = subprocess.run(
        ["bash", str(repository / "run.sh"), "help"], capture_output=True, text=True, check=True
    ).stdout
    offered = set(re.findall(r"^  ([a-z][a-z-]*)(?:-ARM)?  ", usage, re.MULTILINE))
    concrete = {re.sub(r"^(train|eval|all)-(odb|standard)$", r"\1", name) for name in in_table}
    assert concrete == {re.sub(r"-ARM$", "", name).rstrip("-") for name in offered} | {"all"}
    used = set(re.findall(r"\./run\.sh ([a-z-]+)", readme))
    assert used <= in_table


def test_rules_in_the_graph_exist(repository: Path) -> None:
    rules = set()
    for path in (repository / "rules").glob("*.smk"):
        rules |= set(
            re.findall(r"^\s*(?:rule|checkpoint) (\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
    graph = re.search(
        r"```mermaid\n(.*?)```", (repository / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert graph
    named = set(re.findall(r'\[(?:")?(\w+)', graph.group(1))) | {"compare"}
    assert named <= rules
    described = re.findall(r"^\| (`.*?`) \|", (repository / "docs/how-it-works.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(described))) <= rules


def test_files_for_catalogs_are_valid(repository: Path) -> None:
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"
    catalog = yaml.safe_load((repository / ".snakemake-workflow-catalog.yml").read_text())
    assert catalog["usage"]["report"] is True
    assert "Apache License" in (repository / "LICENSE").read_text()
