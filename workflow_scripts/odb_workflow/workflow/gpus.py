"""CUDA devices of this machine, found without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping


def visible_devices(environment: Mapping[str, str] | None = None) -> list[str]:
    """Devices a job may use: CUDA_VISIBLE_DEVICES where it is set, else all that the driver lists."""
    environment = os.environ if environment is None else environment
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        devices = []
        for part in (part.strip() for part in named.split(",")):
            if not part or part.startswith("-"):
                break  # CUDA itself stops reading at the first invalid entry
            devices.append(part)
        return devices
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listed = subprocess.run(
            [program, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip().isdigit()]
