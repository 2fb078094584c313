"""Every verb: what it prints, its exit status, its errors."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from tracehooks.core.records import FirstNonFinite
from tracehooks.core.schema import FORMAT_VERSION, TABLES
from tracehooks.surface.cli import VERBS, main
from tracehooks.testing import TraceBuilder

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def call(*arguments: object) -> Result:
    """The command line, in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="tracehooks")


def parsed(result: Result) -> Any:
    """Standard output as strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def trace(change: float = 0.0, nan: int = 0) -> TraceBuilder:
    """Three steps of two blocks; the second block's output may differ from step 1 on."""
    builder = TraceBuilder({"model": {"class": "Net"}})
    for step in range(3):
        builder.step(step).tensor("", "input.x", "input", mean=0.1)
        builder.tensor("blocks.0", mean=1.0).tensor("blocks.1", mean=2.0 + change * (step > 0), nan=nan * (step > 1))
        builder.scalar("loss", 1.0 / (step + 1)).scalar("time/step", 0.1 * step)
    return builder.event("note", "the\nend")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finite run."""
    return trace().write(tmp_path / "a")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """One that parts from it at step 1, blocks.1, and has NaN in step 2."""
    return trace(0.5, nan=1).write(tmp_path / "b")


def test_show(run: Path, other: Path) -> None:
    """show prints identity, counts, events, losses, worst values and sites."""
    told = call("show", run)
    assert told.exit_code == 0
    assert told.stdout.splitlines()[0].startswith(f"{run}: Net, run 0190")
    assert "3 steps (0 to 2), 3 sites; rows: 9 tensors, 6 scalars, 1 events" in told.stdout
    assert re.search(r"^loss +1 +0\.333333 +0\.333333 +1 +3$", told.stdout, re.MULTILINE)
    assert re.search(r"^note +info +1 +2 +the …$", told.stdout, re.MULTILINE)
    assert f"… the rest of note: tracehooks show {run} --json" in told.stdout
    assert "non-finite" not in told.stdout
    assert "non-finite" in call("show", other).stdout


def test_show_narrows(run: Path) -> None:
    """--step, --module and --phase choose sites, --sort orders them, --limit says what it leaves out."""
    assert [site["module"] for site in parsed(call("show", run, "--module", "blocks.*", "--json"))["sites"]] == [
        "blocks.0",
        "blocks.1",
    ]
    assert [site["rows"] for site in parsed(call("show", run, "--step", 1, "--json"))["sites"]] == [1, 1, 1]
    assert [site["slot"] for site in parsed(call("show", run, "--phase", "input", "--json"))["sites"]] == ["input.x"]
    assert [site["module"] for site in parsed(call("show", run, "--sort", "absmax", "--json"))["sites"]] == [
        "blocks.1",
        "blocks.0",
        "",
    ]
    assert "1 of 3 sites; --limit 0 shows all" in call("show", run, "--limit", 1).stdout
    assert len(parsed(call("show", run, "--limit", 0, "--json"))["sites"]) == 3


def test_show_json(other: Path) -> None:
    """show --json holds everything that show prints."""
    found = parsed(call("show", other, "--json"))
    assert found["steps"] == {"count": 3, "first": 0, "last": 2}
    assert found["nonfinite"][0]["module"] == "blocks.1"
    assert found["problems"] == []


def test_first(run: Path, other: Path) -> None:
    """first exits with 1 and names the site where there is a non-finite value, with 0 where all is finite."""
    assert (call("first", run).exit_code, call("first", run).stdout) == (
        0,
        f"{run}: nothing that is not finite was found\n",
    )
    assert (call("first", run, "--json").exit_code, parsed(call("first", run, "--json"))) == (0, None)
    found = call("first", other)
    assert found.exit_code == 1
    assert found.stdout.splitlines()[:4] == [
        "step 2: nan in blocks.1 output (forward): 1 nan of 4 elements, float32[4]",
        "  step: 2",
        "  phase: forward",
        "  module: blocks.1",
    ]
    assert parsed(call("first", other, "--json"))["value"] == "nan"


def test_first_tells_all_that_is_known(tmp_path: Path) -> None:
    """What was located live is printed: op, cause, line, code, inputs."""
    located = FirstNonFinite(
        7, "forward", "attn", "nan", "step 7: nan", op="aten._softmax.default", cause="fully_masked_row",
        file="m.py", line=3, code="softmax(x)", inputs=({"dtype": "float32", "neginf": 4, "max": float("-inf")},),
    )  # fmt: skip
    path = TraceBuilder().step(7).event("nonfinite", details=located.to_details()).write(tmp_path / "run")
    told = call("first", path)
    assert told.exit_code == 1
    for text in (
        "op: aten._softmax.default",
        "cause: fully_masked_row",
        "line: m.py:3",
        "code: softmax(x)",
        "input 0: dtype float32, neginf 4",
    ):
        assert f"  {text}" in told.stdout
    assert parsed(call("first", path, "--json"))["inputs"] == [{"dtype": "float32", "neginf": 4, "max": "-Infinity"}]


def test_diff(run: Path, other: Path, tmp_path: Path) -> None:
    """diff exits with 0 where runs are equal within tolerance, with 1 where they differ, and names the first site."""
    again = trace().write(tmp_path / "again")
    same = call("diff", run, again)
    assert (same.exit_code, same.stdout) == (0, f"{run} and {again} are identical: all 12 rows equal\n")
    differ = call("diff", run, other)
    assert differ.exit_code == 1
    assert "first divergence: step 1: blocks.1 output (forward): float32[4]: " in differ.stdout
    assert "mean 2 → 2.5" in differ.stdout
    assert re.search(r"^ +1 +0 +forward +blocks\.1 +output +0 +differs +0\.2 ", differ.stdout, re.MULTILINE)
    assert call("diff", run, other, "--tolerance", "0.3", "--steps", "0:2").exit_code == 0
    assert call("diff", run, other, "--steps", "0").exit_code == 0
    assert call("diff", run, other, "--steps", "0,2").exit_code == 1
    assert "1 of 2 rows; --limit 0 shows all" in call("diff", run, other, "--limit", 1).stdout


def test_diff_json(run: Path, other: Path) -> None:
    """diff --json holds the verdict, the first site, the culprits and the rows that differ."""
    found = parsed(call("diff", run, other, "--json"))
    assert (found["identical"], found["within_tolerance"]) == (False, False)
    assert (found["first"]["module"], found["first"]["step"]) == ("blocks.1", 1)
    assert [item["module"] for item in found["culprits"]] == ["blocks.1"]
    assert [row["difference"] for row in found["rows"]] == [0.2, "Infinity"]
    assert found["counts"]["differs"] == 2


def test_diff_rename(run: Path, tmp_path: Path) -> None:
    """diff --rename aligns modules under their new names."""
    renamed = trace()
    for row in renamed._rows[0]["tensors"]:
        row["module"] = row["module"].replace("blocks", "layers")
        row["type"] = "Other" if row["module"] else row["type"]
    path = renamed.write(tmp_path / "renamed")
    assert call("diff", run, path).exit_code == 1
    assert call("diff", run, path, "--rename", "^blocks=layers").exit_code == 0


def test_checkpoint(tmp_path: Path) -> None:
    """checkpoint inspect, diff, verify and first-bad print what they found; status 1 when that is something."""
    for number in range(3):
        weight = np.full((4, 4), np.nan if number == 2 else number + 1.5, np.float32)
        save_file({"w": weight, "b": np.arange(3.0)}, tmp_path / f"{number}.safetensors")
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    assert call("checkpoint", "inspect", paths[0]).exit_code == 0
    bad = call("checkpoint", "inspect", paths[2], "--limit", 1)
    assert bad.exit_code == 1
    assert "  error: w: 16 NaN of 16 elements" in bad.stdout
    assert "1 of 2 tensors; --limit 0 shows all" in bad.stdout
    assert parsed(call("checkpoint", "inspect", paths[2], "--json"))["tensors"][0]["nan"] == 16
    assert call("checkpoint", "diff", paths[0], paths[0]).exit_code == 0
    moved = call("checkpoint", "diff", paths[0], paths[1])
    assert (moved.exit_code, "  w: relative change 0.667, 0° apart" in moved.stdout) == (1, True)
    assert parsed(call("checkpoint", "diff", paths[0], paths[1], "--json"))["layers"][0]["name"] == ""
    assert (call("checkpoint", "verify", paths[0]).exit_code, call("checkpoint", "verify", paths[2]).exit_code) == (
        0,
        1,
    )
    assert parsed(call("checkpoint", "verify", paths[0], "--json"))["fine"] is True
    first = call("checkpoint", "first-bad", *paths)
    assert first.exit_code == 1
    assert first.stdout.startswith(f"first bad: {paths[2]}: w: 16 NaN of 16 elements; {paths[1]} is healthy")
    test = f"{sys.executable} -c 'import sys; sys.exit(0)' {{}}"
    tested = ("checkpoint", "first-bad", *paths, "--json", "--test", test)
    assert parsed(call(*tested))["path"] is None
    missing = call("checkpoint", "inspect", tmp_path / "none.pt")
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "there is no such file" in missing.stderr
    assert call("checkpoint", "first-bad", *paths, "--test", "true").exit_code == 2


def test_query(run: Path) -> None:
    """query prints the rows of a SELECT, as a table or as JSON."""
    assert call("query", run, "SELECT name, value FROM scalars WHERE step = 1 ORDER BY name").stdout.splitlines() == [
        "name       value",
        "loss         0.5",
        "time/step    0.1",
    ]
    assert parsed(call("query", run, "SELECT 'nan'::double AS x, [1, 2] AS l", "--json")) == [{"x": "NaN", "l": [1, 2]}]


def test_repair(run: Path) -> None:
    """repair says what it did; a whole run needs nothing."""
    assert (call("repair", run).exit_code, call("repair", run).stdout) == (0, f"{run}: nothing to repair\n")
    assert parsed(call("repair", run, "--json")) == []


def test_repair_seals_what_a_crash_left(tmp_path: Path) -> None:
    """After a process died without closing its run, repair seals the journal and every row is still there."""
    code = (
        "import os, sys\n"
        "from tracehooks.storage import RunWriter\n"
        "from tracehooks.testing import INFO, TraceBuilder, _batches\n"
        "builder = TraceBuilder().tensor('m', mean=1.0)\n"
        "RunWriter(sys.argv[1], {**INFO, 'status': 'running'}).write(_batches(builder._rows[0]))\n"
        "os._exit(9)\n"
    )
    path = tmp_path / "crashed"
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == 9
    before = parsed(call("query", path, "FROM tensors", "--json"))
    told = call("repair", path)
    assert told.exit_code == 0
    assert "sealed 1 rows" in told.stdout
    assert parsed(call("query", path, "FROM tensors", "--json")) == before
    assert len(before) == 1


def test_export_csv(run: Path, tmp_path: Path) -> None:
    """export writes one table to standard output or each to a file; lists are JSON, null is empty."""
    rows = list(csv.DictReader(io.StringIO(call("export", run, "--table", "tensors", "--where", "step = 1").stdout)))
    assert [(row["module"], row["mean"], row["shape"], row["hash"]) for row in rows] == [
        ("", "0.1", "[4]", ""),
        ("blocks.0", "1.0", "[4]", ""),
        ("blocks.1", "2.0", "[4]", ""),
    ]
    out = tmp_path / "out"
    assert call("export", run, "-o", out).exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{name}.csv" for name in TABLES)


def test_export_json(other: Path, tmp_path: Path) -> None:
    """export --json writes one JSON object a line."""
    told = call("export", other, "--table", "events", "--json")
    assert [json.loads(line)["message"] for line in told.stdout.splitlines()] == ["the\nend"]
    assert call("export", other, "--format", "json", "-o", tmp_path / "out", "--table", "scalars").exit_code == 0
    assert len((tmp_path / "out" / "scalars.jsonl").read_text().splitlines()) == 6


def newer(path: Path) -> list[object]:
    """A run that a later version wrote."""
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, "format_version": FORMAT_VERSION + 1}))
    return ["show", path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda run: ["show", run.parent], r".*: not a run \(no run.json in it\); expected a directory with run.json.*"),
        (lambda run: ["diff", run, run / "nope"], r".*nope: not a run \(there is no such directory\); .*"),
        (newer, r".*: trace format version 2, this tracehooks reads versions 1 to 1; upgrade tracehooks to read it"),
        (lambda run: ["show", run, "--module", "block.1"], "option module: unknown module pattern 'block.1'; did .*"),
        (lambda run: ["show", run, "--step", "7"], "option step: got 7, expected a step with tensors; they go from 0 to 2"),
        (lambda run: ["show", run, "--sort", "max"], "Invalid value for '--sort': 'max' is not one of .*"),
        (lambda run: ["query", run, "SELECT modul FROM tensors"], "query: unknown column 'modul'; did you mean 'module'.*"),
        (lambda run: ["query", run, "FROM tensor"], "query: unknown table 'tensor'; did you mean 'tensors'.*"),
        (lambda run: ["query", run, "DROP VIEW tensors"], "query 'DROP VIEW tensors': DROP statement; .*give a SELECT"),
        (lambda run: ["query", run], "Missing argument 'SQL'."),
        (lambda run: ["diff", run, run, "--tolerance", "x"], "option tolerance: got 'x', expected 'auto' or .*"),
        (lambda run: ["diff", run, run, "--steps", "a:b"], "option --steps: got 'a:b', expected a step, first:end, or .*"),
        (lambda run: ["diff", run, run, "--steps", "5:2"], "option steps: got '5:2', expected recorded steps, .* 0 to 2"),
        (lambda run: ["diff", run, run, "--steps", "9"], "option steps: got 9, expected recorded .* 0 to 2, without 9"),
        (lambda run: ["diff", run, run, "--rename", "blocks.0"], "option rename: got 'blocks.0', expected 'old=new'.*"),
        (lambda run: ["export", run], "several tables need --output DIR; .*"),
        (lambda run: ["export", run, "--table", "scalars", "--where", "valu > 1"], ".*unknown column 'valu'; did .*"),
        (lambda run: ["export", run, "-o", run / "run.json" / "x"], r".*tensors.csv: cannot be written \(.*\); .*"),
        (lambda run: ["query", run, "SELECT 1", "--engine", "spork"], "option engine: got 'spork', expected duckdb, .*"),
        (lambda run: ["show", run, "--engine", "spark://x"], "engine spark://x: .*"),
        (lambda run: ["shwo", run], "command line: unknown verb 'shwo'; did you mean 'show'.*"),
        (lambda run: ["show", run, "--jsn"], "No such option '?--jsn'?.*--json.*"),
    ],
)  # fmt: skip
def test_errors(run: Path, arguments: Callable[[Path], list[object]], message: str) -> None:
    """Bad input is one clear line on standard error and exit status 2, with nothing on standard output."""
    told = call(*arguments(run))
    assert told.exit_code == 2
    assert told.stdout == ""
    assert re.fullmatch(f"tracehooks: {message}\n", told.stderr), told.stderr


def test_corrupted_part(run: Path) -> None:
    """A part that cannot be read is named on standard error; the rest is shown, and nothing is made up."""
    part = next((run / "tensors").rglob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-50])
    told = call("show", run)
    assert told.exit_code == 0
    assert re.search(r"could not be read: tensors/rank=0/part-\d+\.parquet: ", told.stderr)
    assert "Traceback" not in told.output
    assert len(parsed(call("query", run, "FROM scalars", "--json"))) == 6
    assert parsed(call("show", run, "--json"))["problems"]


def test_internal_errors_are_no_difference(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours must not read as "they differ": one line, exit status 2."""

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("tracehooks.surface.offline.diff", fail)
    told = call("diff", run, run)
    assert told.exit_code == 2
    assert re.fullmatch(
        r"tracehooks: internal error, please report it: RuntimeError: two lines \(.*:\d+\)\n", told.stderr
    )


def test_module_can_be_run(run: Path, other: Path) -> None:
    """`python -m tracehooks` is the command line, with its exit status."""
    command = [sys.executable, "-m", "tracehooks", "diff", str(run), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """A pipe that is closed early ends the verb quietly."""
    builder = TraceBuilder()
    for number in range(20000):
        builder.scalar("loss", float(number))
    path = builder.write(tmp_path / "long")
    command = [sys.executable, "-m", "tracehooks", "export", str(path), "--table", "scalars"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "step,micro,time_ns,name,value,rank\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_no_arguments() -> None:
    """Without a verb the help is shown, as an error."""
    told = call()
    assert told.exit_code == 2
    assert "Verbs:" in told.stderr


def test_help_and_version() -> None:
    """Help names every verb, each verb has its own, and the short helps agree with the verbs'."""
    told = call("--help")
    assert told.exit_code == 0
    for verb, short in VERBS.items():
        assert re.search(rf"^  {verb} +{re.escape(short)}$", told.stdout, re.MULTILINE)
        assert call(verb, "--help").exit_code == 0
        assert _command(verb).short_help == short
    assert re.fullmatch(r"tracehooks \d+\.\d+\.\d+\n", call("--version").stdout)


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_takes_json(verb: str) -> None:
    """--json is an option of every verb, and of every verb inside a verb."""
    for command in _commands(verb):
        assert "--json" in {name for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("verb", list(VERBS))
def test_docs_name_every_parameter(verb: str) -> None:
    """docs/cli.md has a section for each verb that names its arguments and options, and no others."""
    section = re.search(rf"^## `{verb}.*?(?=^## |\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    named = set(re.findall(r"`(--[a-z]+)", section.group()))
    options = {
        name
        for command in _commands(verb)
        for item in command.params
        if isinstance(item, click.Option)
        for name in item.opts
        if name.startswith("--")
    }
    assert named == options
    usage = section.group().splitlines()[0]
    for item in (item for command in _commands(verb) for item in command.params):
        if isinstance(item, click.Argument):
            assert item.name is not None
            assert item.name.upper() in usage


def test_docs_name_no_other_verbs() -> None:
    """Every section of docs/cli.md is a verb that exists."""
    assert re.findall(r"^## `([a-z-]+)", DOCS.read_text(), re.MULTILINE) == list(VERBS)


def _commands(verb: str) -> list[click.Command]:
    """The command of a verb, or those inside it."""
    command = _command(verb)
    return list(command.commands.values()) if isinstance(command, click.Group) else [command]


def _command(verb: str) -> click.Command:
    command = main.get_command(click.Context(main), verb)
    assert command is not None
    return command
