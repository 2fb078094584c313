"""A session of Spark's: the user's own, or one begun at a master, in silence."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # of the newest pandas, which is not used here
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

from py4j.protocol import Py4JJavaError

from tracehooks.analysis.sql import first_line
from tracehooks.core.errors import EngineError

PATIENCE = 5.0
"""Seconds in which a master must take a connection; Spark itself tries for a minute."""

_HOST = re.compile(r"([^:,/\[\]]+|\[[^\]]+\]):(\d+)")
_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


def session_for(engine: str | SparkSession) -> SparkSession:
    """The session itself, or one at this master, which lasts as long as the process.

    Raises:
        EngineError: Java is missing, the master is not there, or this process has a session elsewhere.
    """
    if not isinstance(engine, str):
        return engine
    running = SparkSession.getActiveSession()
    if running is None:
        return _begun(engine)
    master = running.sparkContext.master
    if master != engine:
        _look_for_master(engine)
        raise EngineError(engine, f"this process has a session at {master} already; pass that session, or stop it")
    return running


@contextmanager
def quiet() -> Iterator[None]:
    """Spark's errors are raised; it need not log them as well."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@cache
def _begun(master: str) -> SparkSession:
    _look_for_java(master)
    _look_for_master(master)
    conf = SparkConf().setMaster(master).setAppName("tracehooks")
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF"}
    if master.startswith("local"):
        settings |= {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),  # 200 by default: for clusters
        }
    for name, value in settings.items():
        conf.set(name, value)
    with tempfile.TemporaryFile() as said, quiet():
        try:
            gateway = launch_gateway(conf, {"stdout": said, "stderr": said})  # type: ignore[no-untyped-call]
            return SparkSession(SparkContext(conf=conf, gateway=gateway))
        except Exception as error:  # whatever Java and the cluster may say, in one line
            reason = first_line(innermost(error)) if isinstance(error, Py4JJavaError) else _complaint(said)
            raise EngineError(master, reason or first_line(error)) from error


def _look_for_java(master: str) -> None:
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    if shutil.which(java) is None:
        where = f"JAVA_HOME is {home}" if home else "there is no java on the PATH"
        raise EngineError(master, f"Java is missing: {where}; Spark needs Java 17 or newer")


def _look_for_master(master: str) -> None:
    """Whether any of the hosts of a Spark master takes a connection."""
    if not master.startswith("spark://"):
        return
    hosts = _HOST.findall(master.removeprefix("spark://"))
    if not hosts:
        raise EngineError(master, "expected spark://host:port")
    reasons = []
    for host, port in hosts:
        try:
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
        except (OSError, OverflowError) as error:
            reasons.append(f"{host}:{port}: {error}")
        else:
            return
    raise EngineError(master, f"the master cannot be reached ({'; '.join(reasons)})")


def innermost(error: Exception) -> Exception:
    """What Java's innermost exception says, without the stack around it."""
    if not isinstance(error, Py4JJavaError):
        return error
    cause = error.java_exception
    while cause.getCause() is not None:
        cause = cause.getCause()
    return Exception(str(cause.getMessage() or cause.toString()))


def _complaint(said: IO[Any]) -> str:
    """The line that names an exception or an error, else the last that is no place in a stack."""
    said.seek(0)
    lines = [line.strip() for line in said.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("at ")]
    return next((line for line in lines if re.search(r"Exception|Error\b", line)), lines[-1] if lines else "")
