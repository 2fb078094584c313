"""Training: runs that repeat, what a run leaves behind, bad input."""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from rwkv_clip import create_RWKV_Model, load_model_weight
from rwkv_clip.config import ModelConfig
from rwkv_clip.train import main
from rwkv_clip.training.flags import build_parser
from tests import launching


def test_the_same_seed_gives_the_same_weights(tmp_path, small_flags, capsys):
    """Two runs with one seed end with bit-equal weights; another seed ends elsewhere."""
    states = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main([*small_flags, "--output", str(tmp_path / name), "--seed", seed]) == 0
        states.append(torch.load(tmp_path / name / "RWKV_CLIP_model_1.pt"))
    first, second, other = states
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_flags, run_python):
    """A run of six steps in a process of its own: its output directory and what it printed."""
    output = tmp_path_factory.mktemp("run") / "out"
    done = run_python("-m", "rwkv_clip.train", *small_flags, "--output", str(output))
    assert done.returncode == 0, done.stderr
    return output, done.stdout


def test_a_run_prints_its_speed(finished):
    """There is a line every --frequent steps from the first interval on, the same in training.log."""
    output, printed = finished
    pattern = (
        r"rank:\d+ total:\d+ lr:\[\d\.\d{8}\] step:(\d+)/6 amp:1 skipped:0 loss:\d+\.\d+ grad_norm:\d+\.\d+ scale:\d+\.\d+ "
        r"required:\d+\.\d hours"
    )
    assert re.findall(pattern, printed) == ["2", "4", "6"]
    assert re.findall(pattern, (output / "training.log").read_text()) == ["2", "4", "6"]


def test_a_run_ends_with_what_came_out(finished):
    """The last lines give loss, zero-shot accuracy beside chance, where things are and what to type."""
    output, printed = finished
    assert re.search(r"loss \d\.\d+ nats", printed)
    assert re.search(r"zero-shot accuracy on 359 held-out digits \(chance 10\.0%\): \d+\.\d%", printed)
    assert f"tensorboard --logdir {output / 'tensorboard'}" in printed


def test_a_run_leaves_a_checkpoint_for_each_epoch(finished, small_config):
    """Each epoch's checkpoint holds the raw state dict and loads into a model of the same configuration."""
    output, _ = finished
    assert sorted(path.name for path in output.glob("RWKV*")) == ["RWKV_CLIP_model_0.pt", "RWKV_CLIP_model_1.pt"]
    config = ModelConfig(**{**{n: getattr(small_config, n) for n in ModelConfig.__dataclass_fields__},
                            "vocab_size": 64, "image_hidden_rate": 3})  # fmt: skip
    model = load_model_weight(create_RWKV_Model(config), output / "RWKV_CLIP_model_1.pt")
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())


def test_tensorboard_reads_the_curves(finished):
    """TensorBoard's own reader finds each scalar at every interval's last step, and the accuracy at every epoch's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    output, _ = finished
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    for name in ("loss", "lr", "logit_scale", "grad_norm", "scale", "skipped_steps", "samples_per_second"):
        points = events.Scalars(name)
        assert [point.step for point in points] == [2, 4, 6], name
        assert all(math.isfinite(point.value) for point in points), name
    assert [point.step for point in events.Scalars("zero_shot_accuracy")] == [3, 6]
    assert events.Scalars("logit_scale")[0].value == pytest.approx(1 / 0.07, rel=0.05)


def test_what_is_broken_in_held_out_data_is_said(tmp_path, small_flags, picture_flags, pictures, capsys):
    """Rows and images of --val-data that are broken are said once with their place, or end the run if asked."""
    held_out = tmp_path / "held_out.csv"
    held_out.write_text(f"image,caption\n{pictures / '001.png'},one\nno.png,two\nx.png,\n")
    flags = [*small_flags, *picture_flags, "--val-data", str(held_out)]
    assert main([*flags, "--output", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert said.count(f"left out a broken row: {held_out} row 3: no caption") == 1
    assert said.count(f"skipped a broken sample: {held_out} row 2, image no.png: ") == 1
    assert main([*flags, "--output", str(tmp_path / "stop"), "--on-broken", "stop"]) == 2
    assert f"broken row: {held_out} row 3" in capsys.readouterr().err


@pytest.mark.slow
def test_the_defaults_learn_the_digits(tmp_path, run_python):
    """A quarter of the default run reaches 90 % zero-shot accuracy on digits it has never seen."""
    done = run_python("-m", "rwkv_clip.train", "--output", str(tmp_path / "run"), "--epochs", "5")
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"held-out digits .*: (\d+\.\d)%", done.stdout)[1])
    assert accuracy > 90


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's default backend needs a C++ compiler")
def test_a_compiled_run_is_the_eager_one(tmp_path, small_flags, monkeypatch):
    """With --compile, and its default backend, a run has the losses and gradient norms of one without, to rounding."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    values = []
    for more in ([], ["--compile"]):
        output = tmp_path / f"run{len(more)}"
        flags = [*small_flags, "--frequent", "1", "--output", str(output), *more]
        launching.run(main, flags, log=tmp_path / "log", timeout=600)
        found = re.findall(r"step:\d+/6 .* loss:(\S+) grad_norm:(\S+) ", (output / "training.log").read_text())
        values.append([float(value) for line in found for value in line])
    assert len(values[0]) == 12
    assert values[1] == pytest.approx(values[0], rel=2e-3)


class Recorder:
    """Stands in for tracehooks' trace: remembers what was asked of it."""

    def __init__(self):
        self.calls, self.scalars, self.exits = [], [], []

    def attach(self, model, out, **options):
        self.calls.append((model, out, options))
        return self

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.exits.append(kind)

    def scalar(self, name, value):
        self.scalars.append((name, value))


@pytest.fixture
def recorder(monkeypatch):
    module, recorder = types.ModuleType("tracehooks"), Recorder()
    module.attach, module.TracehooksError = recorder.attach, RuntimeError
    monkeypatch.setitem(sys.modules, "tracehooks", module)
    return recorder


def test_a_trace_is_attached_and_closed(recorder, tmp_path, small_flags, capsys):
    """--trace attaches once with the optimiser and --trace-every, records loss and accuracy, closes, and says where."""
    trace = tmp_path / "trace"
    flags = [*small_flags, "--output", str(tmp_path / "run"), "--trace", str(trace), "--trace-every", "3"]
    assert main(flags) == 0
    ((model, out, options),) = recorder.calls
    assert out == trace
    assert options["every"] == 3
    assert options["optimizer"].param_groups[0]["params"][0] in set(model.parameters())
    assert [name for name, _ in recorder.scalars] == [
        "interval_loss",
        "zero_shot_accuracy",
        "interval_loss",
        "interval_loss",
        "zero_shot_accuracy",
    ]
    assert recorder.exits == [None]
    printed = capsys.readouterr().out
    assert f"trace: {trace} (6 steps" in printed
    assert f"next: tracehooks show {trace}" in printed


def test_a_trace_is_closed_when_training_fails(recorder, tmp_path, small_flags, monkeypatch):
    """When training raises, the trace is closed on the way out and the error goes on."""

    def fail(*_):
        raise ValueError("out of luck")

    monkeypatch.setattr("rwkv_clip.train.train_step", fail)
    with pytest.raises(ValueError, match="out of luck"):
        main([*small_flags, "--output", str(tmp_path / "run"), "--trace", str(tmp_path / "trace")])
    assert recorder.exits == [ValueError]


def test_tracing_without_tracehooks_is_explained(monkeypatch, tmp_path, small_flags, capsys):
    """Without the package, --trace ends with status 2 and says what to install."""
    monkeypatch.setitem(sys.modules, "tracehooks", None)
    assert main([*small_flags, "--output", str(tmp_path / "run"), "--trace", str(tmp_path / "trace")]) == 2
    assert "pip install tracehooks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "missing/run"], "--output missing/run: the directory missing does not exist; make it first"),
        (["--output", "a-file"], "--output a-file: File exists"),
        (
            ["--output", "run", "--config", "digit"],
            "no model configuration 'digit': no such file; did you mean 'digits'?",
        ),
        (
            ["--output", "run", "--data", "letters"],
            "no data 'letters': expected digits, a manifest (.csv, .parquet), or tar shards",
        ),
        (["--output", "run", "--model-weight-path", "no.pt"], "no checkpoint no.pt: no such file"),
        (["--output", "run", "--n-embd", "48"], "image_embed_dims 64 and n_embd 48 must be equal"),
        (["--output", "run", "--vocab-size", "5"], "vocab_size 5: digits needs at least"),
        (["--output", "run", "--device", "cpu", "--wkv-engine", "cuda"], "--wkv-engine cuda: the model is on cpu"),
        (["--output", "run", "--compile", "inducter"], "--compile inducter: no such backend; did you mean 'inductor'?"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, capsys, flags, message):
    """Input that does not fit ends with status 2 and one line on stderr, without a traceback and without a run."""
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    assert main(flags) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --output"),
        (["--output", "run", "--epochs", "0"], "argument --epochs: expected a whole number of at least 1, seen '0'"),
        (["--output", "run", "--warmup", "1"], "argument --warmup: expected a number in [0, 1), seen '1'"),
        (["--output", "run", "--seed", "-1"], "argument --seed: expected a whole number of at least 0, below 2^32"),
        (["--output", "run", "--lr", "nan"], "argument --lr: expected a number of at least 0, seen 'nan'"),
        (["--output", "run", "--with-cp", "maybe"], "expected True or False, seen 'maybe'"),
        (["--output", "run", "--wkv-engine", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_malformed_command_lines_are_refused(capsys, flags, message):
    """A command line that cannot be parsed ends with status 2 and says which flag and why."""
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_every_flag_is_documented():
    """The documentation's table has every flag of --help with its default, and no other."""
    page = Path(__file__).parents[2] / "docs" / "rwkv_clip.md"
    rows = dict(re.findall(r"^\| `(--[a-z0-9-]+)` \|([^|]*)\|", page.read_text(encoding="utf-8"), re.MULTILINE))
    flags = {a.option_strings[-1]: a.default for a in build_parser()._actions if a.dest != "help"}
    assert set(rows) == set(flags)
    for flag, default in flags.items():
        if default not in (None, argparse.SUPPRESS, False, ()):
            assert rows[flag].strip() == f"`{default}`", flag
