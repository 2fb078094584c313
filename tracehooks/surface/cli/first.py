"""``tracehooks first RUN``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tracehooks.core.records import FirstNonFinite
from tracehooks.surface import offline, terminal
from tracehooks.surface.plain import json_text


@click.command("first", short_help="The first non-finite value of a run.")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object, or null when all is finite.")
def command(run: str, as_json: bool) -> int:
    """The first non-finite value of RUN, with everything known about it.

    Exit status 1 when there is one, 0 when all is finite.
    """
    source = offline.open(run)
    found = offline.first(source)
    if as_json:
        click.echo(json_text(found.to_details() if found else None))
    else:
        for text in _told(found) if found else [f"{run}: every recorded value is finite"]:
            terminal.line(text)
    for problem in source.problems:
        click.echo(f"could not be read: {problem}", err=True)
    return 1 if found else 0


def _told(found: FirstNonFinite) -> Iterator[str]:
    yield found.message
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


def _statistics(tensor: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {terminal.number(value)}" for name, value in tensor.items() if value is not None)
