"""``tracehooks first RUN``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tracehooks.analysis.told import number
from tracehooks.core.records import FirstNonFinite
from tracehooks.surface import offline, terminal
from tracehooks.surface.plain import json_text


@click.command("first", short_help="The first non-finite value of a run.")
@click.argument("run")
@click.option("--replay", is_flag=True, help="Run the op again from its snapshot (needs torch and snapshot=True).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object, or null when all is finite.")
def command(run: str, replay: bool, as_json: bool) -> int:
    """The first non-finite value of RUN, with everything known about it.

    Exit status 1 when there is one, 0 when all is finite, 2 when none was found but part of the run cannot be read.
    """
    source = offline.open(run)
    found = offline.first(source)
    again = _replayed(source.path, found) if replay and found else None
    if as_json:
        details = found.to_details() if found else None
        click.echo(json_text(details if details is None or again is None else {**details, "replay": again}))
    else:
        fine = "every value that can be read is finite" if source.problems else "nothing that is not finite was found"
        for text in _told(found) if found else [f"{run}: {fine}"]:
            terminal.line(text)
        if again is not None:
            for text in _retold(again):
                terminal.line(text)
    for problem in source.problems:
        click.echo(f"could not be read: {problem}", err=True)
    return 1 if found else 2 if source.problems else 0


def _told(found: FirstNonFinite) -> Iterator[str]:
    yield from found.message.splitlines()
    if "\n" in found.message:  # the locator's own words say it all
        return
    known = {
        "step": found.step,
        "phase": found.phase,
        "module": "(outside the model)" if found.module is None else found.module or "(root)",
        "op": found.op,
        "value": found.value,
        "cause": found.cause,
        "line": f"{found.file}:{found.line}" if found.file else None,
        "code": found.code,
        "parameters": ", ".join(found.params) or None,
        "buffer": found.buffer,
    }
    yield from (f"  {name}: {value}" for name, value in known.items() if value is not None)
    yield from (f"  input {number}: {_statistics(item)}" for number, item in enumerate(found.inputs))
    if found.output is not None:
        yield f"  tensor: {_statistics(found.output)}"


def _replayed(path: Path | None, found: FirstNonFinite) -> dict[str, Any]:
    # by name: everything that is imported here works without torch
    snapshot = importlib.import_module("tracehooks.locate.snapshot")
    file = (path or Path()) / "snapshots" / f"step-{found.step:08d}" / snapshot.OP_FILE
    op, inputs, outputs = snapshot.rerun(file)
    return {"op": op, "inputs": inputs, "outputs": outputs}


def _retold(again: Mapping[str, Any]) -> Iterator[str]:
    yield f"run again: {again['op']}"
    yield from (f"  input   {_statistics(item)}" for item in again["inputs"])
    yield from (f"  output  {_statistics(item)}" for item in again["outputs"])


def _statistics(tensor: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in tensor.items() if value not in (None, []))
