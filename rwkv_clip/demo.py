"""The whole thing once: train on the handwritten digits, traced, and show what was recorded.

``python -m rwkv_clip.demo [--output DIR] [flags of rwkv_clip.train]``. About two minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rwkv_clip import train

__all__ = ["main"]

DEFAULTS = ("--data", "digits", "--frequent", "40", "--trace-every", "1")


def main(argv: Sequence[str] | None = None) -> int:
    """Train with a trace in ``<output>/trace``, show the trace, say what to type next; return the exit status.

    The default output is a new directory under ``runs/``. 0 when all went well, else the status of what failed.
    """
    parser = argparse.ArgumentParser(prog="python -m rwkv_clip.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="directory to make (default: runs/demo-<UTC time>)")
    args, flags = parser.parse_known_args(argv)
    output = args.output or Path("runs") / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    output.parent.mkdir(parents=True, exist_ok=True)
    trace = output / "trace"
    status = train.main([*DEFAULTS, "--output", str(output), "--trace", str(trace), *flags])
    return status or _show(trace)


def _show(trace: Path) -> int:
    """Print what ``tracehooks show`` says of the trace, and the next commands."""
    sys.stdout.flush()
    shown = subprocess.run([sys.executable, "-m", "tracehooks", "show", str(trace)], check=False)
    if shown.returncode > 1:  # 1 is a finding, which is a fine thing to show
        return shown.returncode
    run = os.path.relpath(Path(sys.executable).with_name("tracehooks"))
    print(f"next: {run} show {trace} --module 'text_model.*' --sort absmax")
    print(f"      {run} first {trace}")
    print(f"      {run} query {trace} \"SELECT step, value FROM scalars WHERE name = 'loss'\"")
    print("      or train again with other flags, and compare both traces with its verb diff")
    return 0


if __name__ == "__main__":
    sys.exit(main())
