"""Options that several verbs share."""

from __future__ import annotations

import click

from tracehooks.analysis.engine import EMBEDDED

engine_option = click.option(
    "--engine",
    default=EMBEDDED,
    show_default=True,
    metavar="ENGINE",
    help="What runs the queries: duckdb, or a master of Spark's: spark://host:7077, local[2], yarn.",
)
