"""Every benchmark, one after another, each into benchmarks/results/<name>.jsonl."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = ("stats", "overhead", "hooks", "probes", "storage", "diff", "diagnose", "sketch", "wkv", "oracle", "training")


def main() -> int:
    """Run them; the number that failed."""
    results = Path(__file__).with_name("results")
    results.mkdir(exist_ok=True)
    failed = 0
    for name in NAMES:
        print(f"{name} …", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], capture_output=True, text=True, check=False)
        if done.returncode:
            failed += 1
            print(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed", file=sys.stderr)
        else:
            (results / f"{name}.jsonl").write_text(done.stdout)
    return failed


if __name__ == "__main__":
    sys.exit(main())
