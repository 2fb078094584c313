"""Proofs of the flags that say what a run is made with, on what machine it computes, and what it keeps."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from rwkv_clip import InputError, train
from rwkv_clip.data.loading import load_steps
from rwkv_clip.training.flags import parse_args
from rwkv_clip.training.run import computing
from tests.rwkv_clip.training.flag_bench import Proofs

PROOFS = Proofs()


@PROOFS.of("--output")
def _(bench):
    bench.main("--epochs", "1", output="here")
    assert {p.name for p in (bench.folder / "here").iterdir()} >= {
        "RWKV_CLIP_model_0.pt",
        "training.log",
        "tensorboard",
    }


@PROOFS.of("--config")
def _(bench):
    parsed = parse_args(["--output", "x", "--config", "RWKV_CLIP_B16"])
    assert (parsed.n_embd, parsed.image_patch_size) == (640, 16)


@PROOFS.of("--model-weight-path")
def _(bench):
    state = bench.build("--seed", "9").bare.state_dict()
    torch.save(state, bench.folder / "start.pt")
    loaded = bench.build("--model-weight-path", str(bench.folder / "start.pt")).bare.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.items())


@PROOFS.of("--epochs")
def _(bench):
    assert [bench.build("--epochs", n).steps_total for n in ("1", "3")] == [3, 9]


@PROOFS.of("--batch-size")
def _(bench):
    assert next(load_steps((run := bench.build("--batch-size", "6")).pairs, run.plan, 0))[0].image.shape[0] == 6


@PROOFS.of("--seed")
def _(bench):
    assert bench.changes("--seed", "5")
    assert not bench.changes("--seed", "0")


@PROOFS.of("--frequent")
def _(bench):
    for every in ("1", "3"):
        printed = bench.main("--epochs", "1", "--frequent", every, output=every)
        assert len(re.findall(r"^rank:", printed, re.MULTILINE)) == 3 // int(every)


class Recorder:
    """Stands in for tracehooks."""

    TracehooksError = RuntimeError

    def __init__(self):
        self.calls = []

    def attach(self, model, out, **options):
        self.calls.append((out, options))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def scalar(self, name, value):
        pass


def traced(bench, *more):
    recorder = Recorder()
    bench.monkeypatch.setitem(sys.modules, "tracehooks", recorder)
    bench.main("--epochs", "1", *more)
    return recorder.calls


@PROOFS.of("--trace")
def _(bench):
    ((out, _),) = traced(bench, "--trace", str(bench.folder / "trace"))
    assert out == bench.folder / "trace"


@PROOFS.of("--trace-every")
def _(bench):
    ((_, options),) = traced(bench, "--trace", str(bench.folder / "trace"), "--trace-every", "7")
    assert options["every"] == 7


@PROOFS.of("--device")
def _(bench):
    if torch.cuda.is_available():
        bench.main("--device", "cuda", "--epochs", "1")
    else:
        assert train.main([*bench.small, "--output", str(bench.folder), "--device", "cuda"]) == 2
        assert "torch sees no GPU" in bench.capsys.readouterr().err


@PROOFS.of("--threads")
def _(bench):
    before = torch.get_num_threads()
    with computing(parse_args(["--output", "x", "--threads", "2"])):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


@PROOFS.of("--precision")
def _(bench):
    assert bench.changes("--precision", "bf16")
    for precision, expected in (("tf32", ("high", True)), ("fp32", ("highest", False))):
        with computing(parse_args(["--output", "x", "--precision", precision])):
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == expected


@PROOFS.of("--init-scale")
def _(bench):
    assert bench.build("--precision", "fp16", "--init-scale", "32").updater.scaler.get_scale() == 32


@PROOFS.of("--growth-interval")
def _(bench):
    run = bench.build("--precision", "fp16", "--growth-interval", "1", "--init-scale", "8")
    train.train_step(run, next(load_steps(run.pairs, run.plan, 0)))
    assert run.updater.scaler.get_scale() == 16


@PROOFS.of("--compile")
def _(bench):
    asked = []
    bench.monkeypatch.setattr("rwkv_clip.clip.RWKVCLIP.compile", lambda self, **options: asked.append(options))
    for more in ([], ["--compile"], ["--compile", "eager"]):
        bench.build(*more)
    assert asked == [{"backend": "inductor"}, {"backend": "eager"}]


@PROOFS.of("--deterministic")
def _(bench):
    for more, expected in (([], False), (["--deterministic"], True)):
        with computing(parse_args(["--output", "x", *more])):
            assert torch.are_deterministic_algorithms_enabled() == expected
    assert not torch.are_deterministic_algorithms_enabled()


@PROOFS.of("--fsdp")
def _(bench):
    with pytest.raises(InputError, match="--fsdp spreads the model over several processes: start them with torchrun"):
        bench.build("--fsdp")


@PROOFS.of("--local-loss")
def _(bench):
    assert bench.build("--local-loss", "--gather-with-grad").updater.loss.local_loss
    with pytest.raises(InputError, match="--local-loss needs --gather-with-grad"):
        bench.build("--local-loss")


@PROOFS.of("--gather-with-grad")
def _(bench):
    assert [bench.build(*more).updater.loss.gather_with_grad for more in ([], ["--gather-with-grad"])] == [False, True]


@PROOFS.of("--stall-timeout")
def _(bench):
    asked = []
    watched = train.watched
    bench.monkeypatch.setattr(train, "watched", lambda *args: asked.append(args[2]) or watched(*args))
    bench.main("--epochs", "1", "--stall-timeout", "7.5")
    assert asked == [7.5]


@PROOFS.of("--resume")
def _(bench):
    bench.main("--epochs", "2")
    printed = bench.main("--epochs", "2", "--resume", "0")
    assert re.search(r"going on from \S+RWKV_CLIP_model_0\.pt: epoch 1, step 3", printed)


@PROOFS.of("--save-every")
def _(bench):
    saved = []
    save = train.save
    bench.monkeypatch.setattr(train, "save", lambda run, position: saved.append(run.step) or save(run, position))
    bench.main("--epochs", "2", "--save-every", "2")
    assert saved == [2, 3, 4, 6]


@PROOFS.of("--keep-last")
def _(bench):
    bench.main("--epochs", "3", "--keep-last", "2")
    assert sorted(p.name for p in (bench.folder / "run").glob("*.pt")) == [
        "RWKV_CLIP_model_1.pt", "RWKV_CLIP_model_2.pt", "training_state_1.pt", "training_state_2.pt",
    ]  # fmt: skip
