"""The engines on which the tests of queries run: DuckDB always, Spark under its own marker (make test-spark)."""

from __future__ import annotations

import os
import shutil

import pytest

SPARK = "local[2]"

# Tests are over before Java has compiled what they run.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture
def spark() -> str:
    """Spark in this process, begun once for all tests."""
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java 17 or newer, and there is no java on the PATH")
    return SPARK


@pytest.fixture(params=["duckdb", pytest.param(SPARK, marks=pytest.mark.spark)])
def engine(request: pytest.FixtureRequest) -> str:
    """What runs the queries."""
    return str(request.param if request.param == "duckdb" else request.getfixturevalue("spark"))
