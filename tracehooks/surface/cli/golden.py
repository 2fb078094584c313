"""``tracehooks golden record | check``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tracehooks.core.errors import InvalidOptionError, TracehooksError
from tracehooks.surface import terminal
from tracehooks.surface.plain import json_text

CANNOT_RUN = 125
"""What git bisect run takes for a commit that cannot be tested."""

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_checkpoint = click.option("--checkpoint", metavar="FILE", help="Load these weights into the model first.")
_seed = click.option("--seed", default=0, show_default=True, help="Seed of every generator.")


@click.group("golden", short_help="Record and check golden batches.")
def command() -> None:
    """A golden batch is a directory that tracehooks.golden.save() wrote. TARGET is module:function or file.py:function; the
    function takes nothing and returns the model and the loss function, (model, batch) → loss.
    """


@command.command("record")
@click.argument("path")
@click.argument("target")
@click.option("--out", metavar="RUN", help="The run directory; by default the batch's own expected/.")
@_checkpoint
@_seed
@_json
def record(path: str, target: str, out: str | None, checkpoint: str | None, seed: int, as_json: bool) -> int:
    """Record what TARGET's model makes of the golden batch at PATH. Exit status 125 when its code is not there or
    does not run."""
    golden = _golden()
    try:
        run = _run(lambda: golden.record(path, out, *_built(target, checkpoint), seed=seed))
    except _DoesNotRunError as error:
        return _cannot(error)
    terminal.line(json_text({"run": str(run)}) if as_json else f"recorded into {run}")
    return 0


@command.command("check")
@click.argument("path")
@click.argument("target")
@click.option("--against", metavar="RUN", help="A run to compare with; by default the batch's own expected/.")
@_checkpoint
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Regular expression on module paths (repeatable).")
@click.option("--tolerance", default="auto", show_default=True, metavar="T", help="auto, a relative difference, or 0.")
@_seed
@_json
def check(
    path: str,
    target: str,
    against: str | None,
    checkpoint: str | None,
    rename: tuple[str, ...],
    tolerance: str,
    seed: int,
    as_json: bool,
) -> int:
    """Compare what TARGET's model makes of the golden batch at PATH with what was recorded.

    Exit status 0 when they are equal within tolerance, 1 when they differ, 125 when TARGET's code is not there or does not
    run: what git bisect run wants.
    """
    golden = _golden()
    settings: dict[str, Any] = {"seed": seed, "tolerance": tolerance, "rename": list(rename) or None}
    try:
        found = _run(lambda: golden.check(path, *_built(target, checkpoint), against, **settings))
    except _DoesNotRunError as error:
        return _cannot(error)
    click.echo(json_text(found.to_json()) if as_json else str(found))
    return 0 if found.within_tolerance else 1


class _DoesNotRunError(Exception):
    """The code under test raised."""


class _NotThereError(InvalidOptionError):
    """The code under test is not there: in a bisect, not in this commit."""


def _golden() -> Any:
    return importlib.import_module("tracehooks.experiments.golden")  # by name: the command line imports no torch


def _run(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except _NotThereError as error:
        raise _DoesNotRunError from error
    except (TracehooksError, KeyboardInterrupt):
        raise
    except Exception as error:  # whatever the user's own model and loss raise: the commit does not run
        raise _DoesNotRunError from error


def _cannot(error: Exception) -> int:
    if isinstance(error.__cause__, _NotThereError):
        click.echo(f"tracehooks: {error.__cause__}", err=True)
    else:
        traceback.print_exception(error.__cause__)
    return CANNOT_RUN


def _built(target: str, checkpoint: str | None) -> tuple[Any, Any]:
    """The model and the loss function."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise InvalidOptionError("TARGET", target, "module:function or file.py:function")
    sys.path.insert(0, str(Path.cwd()))
    module = _loaded(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    build = getattr(module, name, None)
    if not callable(build):
        raise _NotThereError("TARGET", target, f"a function of {place}, which has none named {name}")
    model, loss_fn = build()
    if checkpoint is not None:
        importlib.import_module("tracehooks.experiments.weights").load_weights(model, checkpoint)
    return model, loss_fn


def _loaded(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None or not path.exists():
        raise _NotThereError("TARGET", str(path), "a Python file that exists")
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module
