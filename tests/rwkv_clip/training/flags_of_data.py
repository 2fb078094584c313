"""Proofs of the flags that say what a run learns from and how: data, optimizer, schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rwkv_clip import InputError, train
from rwkv_clip.data.loading import load_steps
from tests.rwkv_clip.training.flag_bench import Proofs

PROOFS = Proofs()


@PROOFS.of("--data")
def _(bench):
    run = bench.build(*bench.pictures)
    assert len(run.pairs) == 24
    assert run.held_out is None


@PROOFS.of("--vocabulary")
def _(bench):
    with pytest.raises(InputError, match=r"cannot read the vocabulary .*no\.txt"):
        bench.build(*bench.pictures, "--vocabulary", "no.txt")


@PROOFS.of("--image-column")
def _(bench):
    with pytest.raises(InputError, match=r"no column 'picture'"):
        bench.build(*bench.pictures, "--image-column", "picture")


@PROOFS.of("--caption-columns")
def _(bench):
    assert len(bench.build(*bench.pictures).pairs.captions(0)) == 2
    assert bench.build(*bench.pictures, "--caption-columns", "caption_short").pairs.captions(0) == ["a zero"]


@PROOFS.of("--workers")
def _(bench):
    asked = []
    loader = torch.utils.data.DataLoader
    bench.monkeypatch.setattr(
        "rwkv_clip.data.loading.DataLoader",
        lambda *args, **options: asked.append(options["num_workers"]) or loader(*args, **options),
    )
    bench.main("--epochs", "1", "--workers", "1")
    assert asked[0] == 1


def broken_manifest(bench) -> Path:
    (bench.folder / "broken.png").write_bytes(b"no image")
    source = Path(bench.pictures[1]).parent / "001.png"
    path = bench.folder / "broken.csv"
    path.write_text(f"image,caption\nbroken.png,one\n{source},two\n")
    return path


@PROOFS.of("--on-broken")
def _(bench):
    data = [*bench.pictures, "--data", str(broken_manifest(bench)), "--epochs", "1"]
    bench.main(*data, "--on-broken", "skip")
    assert train.main([*bench.small, "--output", str(bench.folder / "stop"), *data, "--on-broken", "stop"]) == 2
    assert "broken.csv row 1, image broken.png" in bench.capsys.readouterr().err


@PROOFS.of("--val-data")
def _(bench):
    printed = bench.main(*bench.pictures, "--val-data", bench.pictures[1], "--epochs", "1")
    assert "image-to-text-r1:" in printed


@PROOFS.of("--train-num-samples")
def _(bench):
    assert len(bench.build("--train-num-samples", "20").pairs) == 20


@PROOFS.of("--no-augment")
def _(bench):
    assert bench.changes("--no-augment", base=tuple(bench.pictures))


@PROOFS.of("--lr")
def _(bench):
    run = bench.build("--lr", "0.5")
    assert max(run.schedule.learning_rate(step) for step in range(6)) == pytest.approx(0.5)
    assert bench.changes("--lr", "0.5")


@PROOFS.of("--lr-scheduler")
def _(bench):
    rates = [bench.build("--lr-scheduler", s, "--warmup", "0").schedule.learning_rate(3) for s in ("cosine", "linear")]
    assert rates[1] == pytest.approx(2e-3 * 0.5)
    assert rates[0] != rates[1]


@PROOFS.of("--warmup")
def _(bench):
    schedule = bench.build("--epochs", "10", "--warmup", "0.5").schedule
    rates = [schedule.learning_rate(step) for step in range(30)]
    assert rates.index(max(rates)) == 14


@PROOFS.of("--beta1")
def _(bench):
    assert bench.changes("--beta1", "0.5")
    assert bench.build("--beta1", "0.5").updater.optimizer.param_groups[0]["betas"] == (0.5, 0.98)


@PROOFS.of("--beta2")
def _(bench):
    assert bench.changes("--beta2", "0.5")
    assert bench.build("--beta2", "0.5").updater.optimizer.param_groups[0]["betas"] == (0.9, 0.5)


@PROOFS.of("--cycle-momentum")
def _(bench):
    schedule = bench.build("--cycle-momentum", "--warmup", "0.5").schedule
    assert [schedule.beta1(step) for step in (0, 2, 5)] == pytest.approx([0.95, 0.85, 0.95])
    assert bench.changes("--cycle-momentum")


@PROOFS.of("--weight-decay")
def _(bench):
    assert bench.changes("--weight-decay", "0.9")
    assert [g["weight_decay"] for g in bench.build("--weight-decay", "0.9").updater.optimizer.param_groups] == [
        0.9,
        0.0,
    ]


@PROOFS.of("--decay-all")
def _(bench):
    assert bench.changes("--decay-all", base=("--weight-decay", "0.9"))


@PROOFS.of("--clip-grad-norm")
def _(bench):
    assert bench.changes("--clip-grad-norm", "1e-9")


@PROOFS.of("--gradient-acc")
def _(bench):
    run = bench.build("--gradient-acc", "3", "--batch-size", "4")
    assert len(next(load_steps(run.pairs, run.plan, 0))) == 3
    assert run.plan.steps == 4
