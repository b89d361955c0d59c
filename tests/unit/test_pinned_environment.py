"""The pinned environments name the same packages everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

PIN = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)$")


def pins(file: Path) -> dict[str, str]:
    lines = [line.strip() for line in file.read_text().splitlines()]
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            match = PIN.match(line)
            assert match, f"{file.name}: {line!r} is not pinned with =="
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


def test_requirements_are_pinned_as_in_the_constraints(repository: Path) -> None:
    constraints = pins(repository / "envs" / "constraints.txt")
    for name in ("requirements.txt", "requirements-dev.txt"):
        for package, version in pins(repository / "envs" / name).items():
            assert constraints[package] == version, package


def test_conda_environment_holds_the_requirements(repository: Path) -> None:
    content = yaml.safe_load((repository / "envs" / "workflow.yaml").read_text())
    packages = content["dependencies"][-1]["pip"]
    wanted = [
        f"{name}=={version}" for name, version in pins(repository / "envs" / "requirements.txt").items()
    ]
    assert [
        re.sub(r"[-_.]+", "-", p.split("==")[0]).lower() + "==" + p.split("==")[1] for p in packages
    ] == wanted
