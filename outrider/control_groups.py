"""The control groups of this process, by version 2 and 1: whatever limits one limits all that lie in it."""

from __future__ import annotations

from pathlib import Path

CONTAINER = Path("/sys/fs/cgroup")
"""Folder of all groups; a container's own is at its top."""
GROUPS = Path("/proc/self/cgroup")
"""Names the groups of this process."""


def control_groups(kind: str) -> set[Path]:
    """Folders of this process's groups for a `kind` of resources, such as cpu, and of those around them."""
    found = {CONTAINER, CONTAINER / kind}
    try:
        lines = GROUPS.read_text().splitlines()
    except OSError:
        return found
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if not kinds or kind in kinds.split(","):
            own = CONTAINER / (kind if kinds else "") / path.strip("/")
            found |= {own, *own.parents}
    return found
