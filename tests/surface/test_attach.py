"""The front door: where attach records, what it refuses, how a trace ends."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import tracehooks
from tests import launching
from tracehooks.core.schema import run_json_schema


def train(model: nn.Module, steps: int = 2, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def run_script(code: str, folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, check=False, timeout=120, **options
    )


SCRIPT = """
    import sys, torch, tracehooks
    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 2)
    trace = tracehooks.attach(model, "run")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""


def test_one_line_is_enough(tmp_path, monkeypatch, capfd) -> None:
    """attach(model) records under runs/ and says where, in one line on stderr; quiet says nothing."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 2)
    trace = tracehooks.attach(model)
    train(model)
    trace.close()
    assert trace.path.parent == tmp_path / "runs"
    assert trace.path.name.endswith("-Linear")
    assert capfd.readouterr().err == f"tracehooks: recording Linear into runs/{trace.path.name}\n"
    assert tracehooks.open(trace.path).steps == [0, 1]
    with tracehooks.attach(model, tmp_path / "quiet", quiet=True):
        train(model)
    assert capfd.readouterr().err == ""


def test_run_json(tmp_path) -> None:
    """run.json fits its JSON schema and identifies code, machine, model and settings."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    path = tmp_path / "run"
    with tracehooks.attach(model, path, quiet=True, every=3):
        assert json.loads((path / "run.json").read_text())["status"] == "running"
        train(model)
    info = json.loads((path / "run.json").read_text())
    jsonschema.validate(info, run_json_schema())
    assert info["status"] == "closed"
    assert info["model"]["class"] == "Sequential"
    assert info["model"]["parameter_count"] == 24
    assert [m["path"] for m in info["model"]["modules"]] == ["", "0", "1"]
    assert [b["name"] for b in info["model"]["buffers"]] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert info["packages"]["torch"] == torch.__version__
    assert info["config"]["every"] == 3
    assert info["flags"]["seed"] == torch.initial_seed()
    assert info["pid"] == os.getpid()


def test_git_is_noted(tmp_path, monkeypatch) -> None:
    """The commit, the branch and the digest of what is uncommitted are those of the working directory; nothing is noted
    before the first commit."""

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        return subprocess.run(["git", *who, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    def noted(name: str) -> dict[str, object] | None:
        with tracehooks.attach(nn.Linear(3, 2), tmp_path / "runs" / name, quiet=True):
            pass
        return tracehooks.open(tmp_path / "runs" / name).info["git"]

    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    git("init", "-q", "-b", "trunk")
    assert noted("empty") is None
    (repository / "file").write_text("a")
    git("add", ".")
    git("commit", "-q", "-m", "m")
    commit = {"commit": git("rev-parse", "HEAD"), "branch": "trunk"}
    assert noted("clean") == {**commit, "dirty": False, "diff_sha256": None}
    (repository / "file").write_text("b")
    difference = git("diff", "HEAD") + "\n"
    assert noted("changed") == {
        **commit, "dirty": True, "diff_sha256": hashlib.sha256(difference.encode()).hexdigest()
    }  # fmt: skip
    git("checkout", "-q", "--detach")
    assert noted("detached")["branch"] == "HEAD"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evry": 2}, r"attach\(\): unknown option 'evry'; did you mean 'every'"),
        ({"record": ["outptus"]}, "unknown record 'outptus'; did you mean 'outputs'"),
        ({"every": 0}, "option every: got 0, expected a whole number of steps from 1"),
        ({"on_nonfinite": "explode"}, "unknown on_nonfinite 'explode'"),
        ({"sketch": "yes"}, "option sketch: got 'yes', expected True or False"),
        ({"modules": "blocks.*"}, "unknown module pattern 'blocks"),
        ({"config": "missing.toml"}, "a readable TOML file"),
        ({"config": {"hsah": False}}, "config: unknown option 'hsah'; did you mean 'hash'"),
        ({"config": {5: 1}}, "config: unknown option '5'"),
        ({"config": 5}, "option config: got 5, expected a Config, a mapping or the path of a TOML file"),
        ({"modules": 5}, "option modules: got 5, expected glob patterns or a predicate"),
        ({"exclude": None}, "option exclude: got None, expected glob patterns or a predicate"),
        ({"record": 5}, "option record: got 5, expected some of outputs"),
        ({"record": [5]}, r"option record: got \(5,\), expected some of outputs"),
        ({"optimizer": 5}, "option optimizer: got 5, expected one optimizer"),
        (
            {"optimizer": [torch.optim.SGD([torch.ones(1)], 0.1)]},
            "option optimizer: got 'list', expected one optimizer",
        ),
        ({"scaler": 5}, r"option scaler: got 5, expected a torch\.amp\.GradScaler"),
        ({"ema": 5}, r"option ema: got 5, expected a torch\.nn\.Module"),
        ({"ema": nn.Linear(4, 2)}, r"ema: got 'weight of shape \(2, 4\)', expected shape \(2, 3\) as in the model"),
        ({"ema": nn.Sequential(nn.Linear(3, 2))}, "ema: got 'Sequential', expected a copy of the model"),
    ],
)
def test_bad_options(tmp_path, options, message) -> None:
    """A bad option is one clear line, before anything is created or hooked: the next try may use the directory."""
    model = nn.Linear(3, 2)
    with pytest.raises(tracehooks.TracehooksError, match=message) as caught:
        tracehooks.attach(model, tmp_path / "run", quiet=True, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with tracehooks.attach(model, tmp_path / "run", quiet=True):
        train(model)
    assert tracehooks.open(tmp_path / "run").steps == [0, 1]


@pytest.mark.parametrize("from_step", [0, 2])
def test_a_predicate_that_raises_disturbs_nothing(tmp_path, capfd, from_step: int) -> None:
    """Where `every` raises, be it in attach itself, training goes on and the step is recorded; it is said once."""

    def every(step: int) -> bool:
        if step >= from_step:
            raise ZeroDivisionError("no such share")
        return step == 0

    model = nn.Linear(3, 2)
    with tracehooks.attach(model, tmp_path / "run", every=every):
        train(model, steps=5)
    run = tracehooks.open(tmp_path / "run")
    assert run.status == "closed"
    assert sorted(set(run.tensors(["step"])["step"].to_pylist())) == [0, *range(max(from_step, 1), 5)]
    (event,) = run.events(where="kind = 'recorder_error'").to_pylist()
    assert event["step"] == from_step
    said = [line for line in capfd.readouterr().err.splitlines() if "every" in line]
    assert said == [
        "tracehooks: error inside the recorder, in every(step), taken for a yes (ZeroDivisionError: no such share); "
        "training goes on, this is said once"
    ]


def test_what_is_no_model_and_no_path() -> None:
    """None is nothing to record, and a number no place for a run."""
    with pytest.raises(tracehooks.TracehooksError, match=r"option model: got None, expected a torch\.nn\.Module"):
        tracehooks.attach(None)
    with pytest.raises(tracehooks.TracehooksError, match="option out: got 5, expected the path of a directory"):
        tracehooks.attach(nn.Linear(3, 2), 5)


def test_averages_and_scalers_of_all_kinds(tmp_path) -> None:
    """A copy, torch's AveragedModel, a scaler of torch's."""
    model = nn.Linear(3, 2)
    averages = (copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model))
    for number, average in enumerate(averages):
        scaler = torch.amp.GradScaler("cpu")
        with tracehooks.attach(model, tmp_path / str(number), quiet=True, ema=average, scaler=scaler):
            train(model)
        scalars = tracehooks.open(tmp_path / str(number)).scalars().to_pandas()
        assert list(scalars[scalars["name"] == "ema/distance"]["step"]) == [0, 1]


def test_options_come_from_files_and_the_environment(tmp_path, monkeypatch) -> None:
    """Options win over the environment, the environment over a TOML file, that over the defaults."""
    (tmp_path / "c.toml").write_text('[tracehooks]\nevery = 7\nsketch = true\nmodules = ["0"]\n')
    monkeypatch.setenv("TRACEHOOKS_EVERY", "5")
    monkeypatch.setenv("TRACEHOOKS_RECORD", "outputs, masks")
    model = nn.Sequential(nn.Linear(3, 2))
    with tracehooks.attach(model, tmp_path / "run", config=tmp_path / "c.toml", quiet=True, sketch=False):
        pass
    config = tracehooks.open(tmp_path / "run").info["config"]
    assert (config["every"], config["sketch"], config["modules"]) == (5, False, ["0"])
    assert config["record"] == ["outputs", "masks"]
    monkeypatch.setenv("TRACEHOOKS_EVRY", "5")
    with pytest.raises(tracehooks.TracehooksError, match="environment: unknown option 'TRACEHOOKS_EVRY'"):
        tracehooks.attach(model, tmp_path / "other", quiet=True)


def test_refuses_a_directory_that_holds_a_run(tmp_path) -> None:
    """A second run into the same directory is refused, unless it resumes; nothing of the first is lost."""
    model, path = nn.Linear(3, 2), tmp_path / "run"
    with tracehooks.attach(model, path, quiet=True):
        train(model)
    before = tracehooks.open(path).tensors().num_rows
    with pytest.raises(tracehooks.TracehooksError, match="holds a run already"):
        tracehooks.attach(model, path, quiet=True)
    assert not model._forward_hooks
    with tracehooks.attach(model, path, quiet=True, resume=True):
        train(model)
    run = tracehooks.open(path)
    assert run.tensors().num_rows > before
    assert run.steps == [0, 1, 2, 3]
    assert run.info["status"] == "closed"


def test_attach_twice(tmp_path) -> None:
    """A model that is recorded already is refused, with the path of that trace; after close it may be attached again."""
    model = nn.Linear(3, 2)
    with tracehooks.attach(model, tmp_path / "one", quiet=True):
        with pytest.raises(tracehooks.TracehooksError, match=r"Linear is being recorded into .*one already"):
            tracehooks.attach(model, tmp_path / "two", quiet=True)
        assert not (tmp_path / "two").exists()
    with tracehooks.attach(model, tmp_path / "two", quiet=True):
        train(model)


def test_not_a_module(tmp_path) -> None:
    """Something that is no module is refused in words."""
    with pytest.raises(tracehooks.TracehooksError, match=r"option model: got 'dict', expected a torch\.nn\.Module"):
        tracehooks.attach({}, tmp_path / "run")


def test_unwritable_directory(tmp_path) -> None:
    """A directory that cannot be made is one clear line before training starts."""
    (tmp_path / "file").write_text("")
    with pytest.raises(tracehooks.TracehooksError, match="cannot be written"):
        tracehooks.attach(nn.Linear(3, 2), tmp_path / "file" / "run", quiet=True)


def train_on_a_full_disk(path: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(10)])
    trace = tracehooks.attach(model, path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    train(model, 40, lr=1e-3)
    trace.close()
    print("trained")


def test_a_full_disk_stops_recording_not_training(tmp_path) -> None:
    """When rows can no longer be written, one line says so, training goes on, what was written stays readable."""
    launching.run(train_on_a_full_disk, str(tmp_path / "run"), log=tmp_path / "log")
    _, stopped, *rest = (tmp_path / "log.0").read_text().splitlines()
    assert stopped.startswith("tracehooks: recording stopped, training goes on")
    assert rest == ["trained"]
    run = tracehooks.open(tmp_path / "run")
    steps = run.steps
    assert steps == list(range(len(steps)))
    assert 0 < len(steps) < 40
    counts = run.tensors().to_pandas().groupby("step").size()
    assert counts.nunique() == 1


def test_an_exception_in_the_block_is_noted(tmp_path) -> None:
    """A with-block that ends with an exception is marked crashed, with the exception as an event; hooks are off."""
    model = nn.Linear(3, 2)

    def fails() -> None:
        with tracehooks.attach(model, tmp_path / "run", quiet=True):
            train(model)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()
    run = tracehooks.open(tmp_path / "run")
    assert run.info["status"] == "crashed"
    assert run.events().column("message").to_pylist()[-1] == "ZeroDivisionError: division by zero"
    assert not model._forward_hooks


def test_a_closed_trace_says_so(tmp_path) -> None:
    """Calls on a closed trace are refused in words; closing again is fine; what was found stays readable."""
    trace = tracehooks.attach(nn.Linear(3, 2), tmp_path / "run", quiet=True)
    trace.close()
    trace.close()
    for call in (
        lambda: trace.scalar("a", 1),
        lambda: trace.note("a"),
        trace.flush,
        trace.pause,
        trace.step_scope().__enter__,
    ):
        with pytest.raises(tracehooks.TracehooksError, match="is closed; attach"):
            call()
    assert trace.first_nonfinite is None
    assert "closed" in repr(trace)


def test_never_closed_is_closed_at_exit(tmp_path) -> None:
    """A script that forgets close() leaves a sealed, closed run."""
    assert run_script(SCRIPT, tmp_path).returncode == 0
    run = tracehooks.open(tmp_path / "run")
    assert run.info["status"] == "closed"
    assert run.steps == [0, 1, 2]
    assert not list((tmp_path / "run").rglob("*.arrows"))


def test_forgotten_models_die(tmp_path) -> None:
    """A model that was never closed and is dropped takes its session with it."""
    model = nn.Linear(3, 2)
    tracehooks.attach(model, tmp_path / "run", quiet=True)
    train(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_forked_children_are_silent(tmp_path) -> None:
    """A forked child that uses the model writes nothing, and its exit closes nothing."""
    model = nn.Linear(3, 2)
    with tracehooks.attach(model, tmp_path / "run", quiet=True) as trace:
        train(model, 1)
        child = os.fork()
        if not child:
            train(model, 3)
            trace.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train(model, 1)
    run = tracehooks.open(tmp_path / "run")
    assert run.steps == [0, 1]
    assert run.info["status"] == "closed"


def train_until_killed(path: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    tracehooks.attach(model, path, quiet=True)
    for number in range(100_000):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(number, flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_killed_at_a_random_moment(tmp_path, seed) -> None:
    """kill -9 at any moment: every step that had ended is readable, whole and once; repair seals it."""
    kill_and_check(tmp_path, 0.02 + 0.04 * seed)


@pytest.mark.parametrize("after", [0.05, 0.4, 1.1])
def test_killed(tmp_path, after) -> None:
    """The same at three moments, for every run of the tests."""
    kill_and_check(tmp_path, after)


def kill_and_check(folder: Path, seconds: float) -> None:
    path, printed = folder / "run", folder / "log.0"
    with launching.running(train_until_killed, str(path), log=folder / "log") as (process,):
        while not (printed.exists() and printed.stat().st_size):
            assert process.is_alive()
            time.sleep(0.005)
        time.sleep(seconds)
        process.kill()
        process.join()
    last = max(map(int, printed.read_text().splitlines()))
    check_whole(path, last)
    tracehooks.repair(path)
    check_whole(path, last)
    assert tracehooks.open(path).info["status"] == "crashed"
    assert not list(path.rglob("*.arrows"))


def check_whole(path: Path, last: int) -> None:
    run = tracehooks.open(path)
    assert not run.problems
    rows = run.tensors().to_pandas()
    keys = rows[["step", "micro", "phase", "module", "slot", "call"]]
    assert not keys.duplicated().any()
    sizes = rows.groupby("step").size()
    assert list(sizes.index[: last + 1]) == list(range(last + 1))
    assert sizes.iloc[: last + 1].nunique() == 1
    assert sizes.index.max() <= last + 1
