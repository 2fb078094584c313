"""Training: the update against the original's, runs that repeat, what a run leaves behind, bad input."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from rwkv_clip import ClipLoss, create_RWKV_Model, load_model_weight
from rwkv_clip.config import ModelConfig
from rwkv_clip.optimizer import make_optimizer
from rwkv_clip.train import LARGEST_LOGIT_SCALE, Run, build, build_parser, main, parse_args, train_step


def test_nineteen_updates_are_the_originals(numbers, model_of, inputs_of):
    """Under the original's schedule, loss, gradient norm and scale of 19 steps and the last weights are its own."""
    recorded, model = numbers("trace_cosine.npz"), model_of("tiny").train()
    optimizer = make_optimizer(model, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.2, decay_all=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps_per_epoch=10, epochs=2, pct_start=0.1)
    args = argparse.Namespace(clip_grad_norm=1.0)
    run = Run(args, model, None, None, optimizer, schedule, ClipLoss(), 20)
    image, tokens = inputs_of("tiny")
    for step in range(19):
        loss, grad_norm, scale = train_step(run, image.double(), tokens)
        schedule.step()
        seen = [loss, grad_norm, scale, model.logit_scale.detach()]
        expected = [recorded[name][step] for name in ("loss", "gnorm", "scale_logged", "logit_scale_after")]
        np.testing.assert_allclose([float(value) for value in seen], expected, rtol=1e-12, atol=1e-13)
    state = model.state_dict()
    norms = [float(state[name].norm()) for name in recorded["param_names"]]
    np.testing.assert_allclose(norms, recorded["param_l2_end"], rtol=1e-11)


def test_the_logit_scale_is_clamped(tmp_path, small_flags):
    """After an update the scale's logarithm is within [0, ln 100], whatever the update was."""
    run = build(parse_args([*small_flags, "--output", str(tmp_path)]))
    image, tokens, _ = run.pairs[0]
    for start, end in ((9.0, LARGEST_LOGIT_SCALE), (-9.0, 0.0)):
        with torch.no_grad():
            run.model.logit_scale.fill_(start)
        train_step(run, image.unsqueeze(0), tokens.unsqueeze(0))
        assert run.model.logit_scale.item() == pytest.approx(end)


def test_gradients_are_clipped(tmp_path, small_flags):
    """The returned norm is the one before clipping; after it no gradient norm exceeds the limit, and 0 means none."""
    for limit, clipped in (("0.01", True), ("0", False)):
        run = build(parse_args([*small_flags, "--output", str(tmp_path), "--clip-grad-norm", limit]))
        image, tokens = (torch.stack([run.pairs[i][part] for i in range(4)]) for part in (0, 1))
        _, grad_norm, _ = train_step(run, image, tokens)
        left = math.sqrt(sum(float(p.grad.square().sum()) for p in run.model.parameters() if p.grad is not None))
        assert left == pytest.approx(0.01 if clipped else float(grad_norm), rel=1e-3)
        assert float(grad_norm) > 0.01


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
        r"rank:\d+ total:\d+ lr:\[\d\.\d{8}\] step:(\d+)/6 loss:\d+\.\d+ grad_norm:\d+\.\d+ scale:\d+\.\d+ "
        r"required:\d+\.\d hours"
    )
    assert re.findall(pattern, printed) == ["2", "4", "6"]
    assert re.findall(pattern, (output / "training.log").read_text()) == ["2", "4", "6"]


def test_a_run_ends_with_what_came_out(finished):
    """The last lines give loss, zero-shot accuracy beside chance, where things are and what to type."""
    output, printed = finished
    assert re.search(r"loss \d\.\d+ nats", printed)
    assert re.search(r"zero-shot accuracy on 359 held-out digits: \d+\.\d% \(chance 10\.0%\)", printed)
    assert f"tensorboard --logdir {output / 'tensorboard'}" in printed


def test_a_run_leaves_a_checkpoint_for_each_epoch(finished, small_config):
    """Each epoch's checkpoint holds the raw state dict and loads into a model of the same configuration."""
    output, _ = finished
    assert sorted(path.name for path in output.glob("*.pt")) == ["RWKV_CLIP_model_0.pt", "RWKV_CLIP_model_1.pt"]
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
    for name in ("loss", "lr", "logit_scale", "grad_norm", "samples_per_second"):
        points = events.Scalars(name)
        assert [point.step for point in points] == [2, 4, 6], name
        assert all(math.isfinite(point.value) for point in points), name
    assert [point.step for point in events.Scalars("zero_shot_accuracy")] == [3, 6]
    assert events.Scalars("logit_scale")[0].value == pytest.approx(1 / 0.07, rel=0.05)


def test_weights_can_be_carried_on(finished, tmp_path, small_flags):
    """--model-weight-path starts from a checkpoint's weights."""
    output, _ = finished
    path = output / "RWKV_CLIP_model_1.pt"
    run = build(parse_args([*small_flags, "--output", str(tmp_path), "--model-weight-path", str(path)]))
    assert all(torch.equal(value, run.model.state_dict()[name]) for name, value in torch.load(path).items())


@pytest.mark.slow
def test_the_defaults_learn_the_digits(tmp_path, run_python):
    """A quarter of the default run reaches 90 % zero-shot accuracy on digits it has never seen."""
    done = run_python("-m", "rwkv_clip.train", "--output", str(tmp_path / "run"), "--epochs", "5")
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"held-out digits: (\d+\.\d)%", done.stdout)[1])
    assert accuracy > 90


def test_threads_are_set(tmp_path, small_flags, monkeypatch, capsys):
    """--threads sets torch's number of threads, 1 when it is not given."""
    asked = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    for flags in ([], ["--threads", "2"]):
        assert main([*small_flags, "--output", str(tmp_path / "missing" / "run"), *flags]) == 2
    assert asked == [1, 2]


def test_every_model_flag_reaches_the_model(tmp_path, small_flags):
    """Flags named after the configuration's fields override the configuration, and only those that are given."""
    flags = [*small_flags, "--output", str(tmp_path), "--dropout", "0.25", "--text-initialization", "False"]
    config = build(parse_args([*flags, "--wkv-engine", "reference"])).model.config
    assert (config.dropout, config.text_initialization, config.wkv_engine) == (0.25, False, "reference")
    assert (config.input_size, config.ctx_len) == (8, 12)


def test_optimiser_flags_reach_the_optimiser(tmp_path, small_flags):
    """Rate, betas, weight decay, --decay-all, schedule and warm-up arrive where they belong."""
    flags = shlex.split(
        "--lr 0.5 --beta1 0.7 --beta2 0.8 --weight-decay 0.3 --decay-all --lr-scheduler linear --warmup 0"
    )
    run = build(parse_args([*small_flags, "--output", str(tmp_path), *flags]))
    (group,) = run.optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.7, 0.8), 0.3)
    rates = []
    for _ in range(run.steps_total):
        rates.append(run.scheduler.get_last_lr()[0])
        run.optimizer.step()
        run.scheduler.step()
    assert rates == pytest.approx([0.5 * (1 - step / 6) for step in range(6)])


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
    module.attach = recorder.attach
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
        "loss",
        "zero_shot_accuracy",
        "loss",
        "loss",
        "zero_shot_accuracy",
    ]
    assert recorder.exits == [None]
    printed = capsys.readouterr().out
    assert f"trace: {trace} (6 steps" in printed
    assert f"next: tracehooks show {trace}" in printed


def test_a_trace_is_closed_when_training_fails(recorder, tmp_path, small_flags, monkeypatch):
    """When training raises, the trace is closed on the way out and the error goes on."""

    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("rwkv_clip.train.train_step", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        main([*small_flags, "--output", str(tmp_path / "run"), "--trace", str(tmp_path / "trace")])
    assert recorder.exits == [RuntimeError]


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
        (["--output", "run", "--data", "letters"], "unknown data set 'letters'; known: digits"),
        (["--output", "run", "--model-weight-path", "no.pt"], "no checkpoint no.pt: no such file"),
        (["--output", "run", "--n-embd", "48"], "image_embed_dims 64 and n_embd 48 must be equal"),
        (["--output", "run", "--vocab-size", "5"], "vocab_size 5: digits needs at least"),
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
        if default not in (None, argparse.SUPPRESS, False):
            assert rows[flag].strip() == f"`{default}`", flag
