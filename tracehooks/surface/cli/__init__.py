"""``tracehooks``: one verb a file. Exit status 0 fine or equal, 1 a difference or a finding, 2 an error."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

from tracehooks.core.errors import TracehooksError, UnknownNameError

VERBS: Mapping[str, str] = MappingProxyType(
    {
        "show": "What a run recorded, at a glance.",
        "first": "The first non-finite value of a run.",
        "diagnose": "What is wrong with a run, and what to check next.",
        "diff": "Where two runs part, and what made them.",
        "verify-fix": "Whether a fix solved the right problem.",
        "golden": "Record and check golden batches.",
        "bisect": "The commit that changed the numbers.",
        "checkpoint": "Inspect, compare and verify checkpoints.",
        "query": "SQL over a run's tables.",
        "repair": "Seal what a crash left.",
        "export": "Write tables as CSV or JSON lines.",
    }
)
"""The verbs and what they do; each lives in the module of its name, - being _, and is imported when it is run."""

ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Verbs(click.Group):
    """Imports a verb when it is run, and turns every error into one line and a status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"tracehooks.surface.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UnknownNameError("verb", args[0], VERBS, "command line")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            status = super().invoke(ctx)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # Here and not in main(): click would exit with 1, which reads as a difference. Python flushes stdout once
            # more at exit, which must not complain about the reader that left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def main(self, args: Any = None, prog_name: Any = None, *_: Any, **extra: Any) -> Any:
        if not extra.pop("standalone_mode", True):
            return super().main(args, prog_name, standalone_mode=False, **extra)
        try:
            status = super().main(args, prog_name, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            status = ERROR
        except (click.Abort, KeyboardInterrupt):
            status = INTERRUPTED
        except Exception as error:  # the last edge: one line and status 2, never a traceback
            click.echo(f"tracehooks: {_one_line(error)}", err=True)
            status = ERROR
        sys.exit(status if isinstance(status, int) else 0)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tracehooks", message="tracehooks %(version)s")
def main() -> None:
    """Find where a PyTorch training run goes wrong.

    Exit status: 0 fine or equal, 1 a difference or a finding, 2 an error.
    """


def _one_line(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        text = error.format_message()
    elif isinstance(error, TracehooksError):
        text = str(error)
    elif isinstance(error, OSError):
        text = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    else:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"internal error, please report it: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    return " ".join(text.split("\n")).strip()
