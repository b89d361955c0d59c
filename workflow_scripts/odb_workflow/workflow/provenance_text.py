"""Where results come from, as a person reads it: a few lines a record, versions once where they agree."""

from __future__ import annotations

from typing import Any

COMMAND_CHARACTERS = 160
KEY_PACKAGES = ("python", "torch", "transformers", "accelerate", "deepspeed", "online-dynamic-batching")


def provenance_text(records: dict[str, Any]) -> str:
    """The records of ``status.records`` as text; ``--json`` has everything."""
    if not records:
        return "no result is there yet"
    found = {path: _facts(record) for path, record in records.items() if isinstance(record, dict)}
    versions = {facts["versions"] for facts in found.values() if facts.get("versions")}
    lines = []
    for path, facts in found.items():
        lines.append(path)
        for name, value in facts.items():
            if value and not (name == "versions" and len(versions) == 1):
                lines.append(f"  {name:<9}{value}")
    if len(versions) == 1:
        lines += ["", f"versions of all: {versions.pop()}"]
    return "\n".join([*lines, "", "./run.sh provenance --json shows the whole records"])


def _facts(record: dict[str, Any]) -> dict[str, str | None]:
    # A training writes its own; that of the program which completed the record is the second choice.
    made = record if record.get("git") else record.get("provenance") or {}
    git, data = made.get("git") or {}, record.get("data") or {}
    commit = str(git.get("commit") or "")[:10]
    checksum = data.get("records_sha256") if isinstance(data, dict) else None
    versions = made.get("versions") or {}
    device = record.get("device") or (record.get("config") or {}).get("device")
    return {
        "made": made.get("ended") or made.get("time"),
        "commit": f"{commit} (with uncommitted changes)" if commit and git.get("dirty") else commit,
        "device": device,
        "data": f"records.jsonl sha256 {checksum[:12]}" if checksum else None,
        "builder": _builder(record.get("builder")),
        "model": record.get("path") or (record.get("base_model") or {}).get("path"),
        "versions": ", ".join(f"{name} {versions[name]}" for name in KEY_PACKAGES if versions.get(name)),
        "command": _shortened(str(made.get("command") or "")),
    }


def _shortened(text: str) -> str:
    return text if len(text) <= COMMAND_CHARACTERS else text[: COMMAND_CHARACTERS - 1] + "…"


def _builder(builder: Any) -> str | None:
    if not isinstance(builder, dict):
        return None
    shown = ("kind", "repo", "ref", "commit")
    return ", ".join(f"{key} {builder[key]}" for key in shown if builder.get(key)) or None
