"""What a result was measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "numpy", "pyarrow", "duckdb", "tracehooks")


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    """Of a package; None where it is not installed, as on a machine that only has the sources."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
