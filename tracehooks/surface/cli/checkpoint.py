"""``tracehooks checkpoint inspect | diff | verify | first-bad``."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import click

from tracehooks import checkpoint
from tracehooks.core.errors import InvalidOptionError
from tracehooks.surface import terminal
from tracehooks.surface.plain import json_text

COLUMNS = ("name", "dtype", "shape", "rms", "absmax", "nonfinite", "zeros", "concern")
TEST_FAILED = 125
"""Exit statuses from here on say that the test could not be run, as with git bisect."""

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("checkpoint", short_help="Inspect, compare and verify checkpoints.")
def command() -> None:
    """Inspect, compare and verify checkpoints: .safetensors (single or sharded), what torch.save wrote, and directories of
    torch.distributed.checkpoint. Nothing in them is run, and tensors are read a stretch at a time.
    """


@command.command("inspect")
@click.argument("path")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Tensors to show; 0 for all.")
@_json
def inspect(path: str, limit: int, as_json: bool) -> int:
    """Every tensor of PATH, what looks wrong first. Exit status 1 when there is a concern about one."""
    found = checkpoint.inspect(path)
    if as_json:
        click.echo(json_text(found.to_json()))
        return 1 if found.suspects else 0
    terminal.line(str(found))
    shown = found.tensors[:limit] if limit else found.tensors
    rows = [
        {
            **{name: value for name, value in tensor.to_json().items() if name in COLUMNS},
            "shape": "×".join(map(str, tensor.shape)) or "scalar",
            "nonfinite": tensor.measured.nan + tensor.measured.posinf + tensor.measured.neginf,
            "zeros": tensor.measured.zeros / max(tensor.measured.count, 1),
            "concern": tensor.severity or "",
        }
        for tensor in shown
    ]
    terminal.line()
    terminal.table("tensors", COLUMNS, rows)
    if len(rows) < len(found.tensors):
        terminal.line(f"{len(rows)} of {len(found.tensors)} tensors; --limit 0 shows all")
    return 1 if found.suspects else 0


@command.command("diff")
@click.argument("a")
@click.argument("b")
@_json
def diff(a: str, b: str, as_json: bool) -> int:
    """Compare checkpoints A and B: names that do not meet and why, how far each tensor moved, layers by change.

    Exit status 0 when both hold the same tensors, 1 when they differ.
    """
    found = checkpoint.diff(a, b)
    click.echo(json_text(found.to_json()) if as_json else str(found))
    return 0 if found.identical else 1


@command.command("verify")
@click.argument("path")
@_json
def verify(path: str, as_json: bool) -> int:
    """Read every byte of PATH: exit status 0 when it is whole and its numbers are healthy, else 1."""
    found = checkpoint.verify(path)
    click.echo(json_text(found.to_json()) if as_json else str(found))
    return 0 if found.fine else 1


@command.command("first-bad")
@click.argument("paths", nargs=-1, required=True)
@click.option("--test", metavar="CMD", help="Exit status 0 says healthy; {} stands for the checkpoint's path.")
@_json
def first_bad(paths: tuple[str, ...], test: str | None, as_json: bool) -> int:
    """The first unhealthy one of PATHS, given in the order in which they were written, by binary search.

    Without --test the weights are looked at. Exit status 1 when there is one.
    """
    found = checkpoint.first_bad(paths, _tested_by(test) if test else None)
    click.echo(json_text(found.to_json()) if as_json else str(found))
    return 0 if found.path is None else 1


def _tested_by(test: str) -> Callable[[Path], str]:
    if "{}" not in test:
        raise InvalidOptionError("--test", test, "a command with {} where the checkpoint's path belongs")

    def wrong(path: Path) -> str:
        done = subprocess.run([part.replace("{}", str(path)) for part in shlex.split(test)], check=False)
        if done.returncode < 0 or done.returncode >= TEST_FAILED:
            raise InvalidOptionError("--test", test, f"a command that runs (it ended with {done.returncode} on {path})")
        return f"the test ended with {done.returncode}" if done.returncode else ""

    return wrong
