"""Every flag of ``python -m rwkv_clip.train`` does something: one proof each, and none may be missing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rwkv_clip import InputError, train, wkv
from rwkv_clip.data.loading import load_steps
from rwkv_clip.mixing import TimeMix
from rwkv_clip.towers import DropPath, Layer
from rwkv_clip.training.distributed import Place
from rwkv_clip.training.flags import build_parser, parse_args
from rwkv_clip.training.run import Run, build, computing
from rwkv_clip.wkv.reference import wkv6_reference

CPU = Place(torch.device("cpu"))
PROOFS: dict[str, Callable[[Bench], None]] = {}


class Bench:
    """Runs with some flags: built, trained for two steps, or whole."""

    def __init__(self, folder: Path, small: list[str], pictures: list[str], monkeypatch: Any, capsys: Any) -> None:
        self.folder, self.small, self.pictures = folder, small, pictures
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def build(self, *flags: str) -> Run:
        return build(parse_args([*self.small, "--output", str(self.folder / "out"), *flags]), CPU)

    def weights(self, *flags: str, steps: int = 2) -> torch.Tensor:
        """All weights after two steps, in one vector."""
        run = self.build(*flags)
        with computing(run.args):
            run.model.train()
            batches = load_steps(run.pairs, run.plan, 0)
            for _ in range(steps):
                train.train_step(run, next(batches))
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    def changes(self, *flags: str, base: tuple[str, ...] = ()) -> bool:
        """Whether two steps end elsewhere with these flags than without."""
        with_flags, without = self.weights(*base, *flags), self.weights(*base)
        return with_flags.shape != without.shape or not torch.equal(with_flags, without)

    def main(self, *flags: str, output: str = "run") -> str:
        """Train to the end; returns what was printed."""
        assert train.main([*self.small, "--output", str(self.folder / output), *flags]) == 0
        return str(self.capsys.readouterr().out)


@pytest.fixture
def bench(tmp_path, small_flags, picture_flags, monkeypatch, capsys):
    return Bench(tmp_path, small_flags, picture_flags, monkeypatch, capsys)


def flags() -> list[str]:
    return [a.option_strings[-1] for a in build_parser()._actions if a.dest != "help"]


@pytest.mark.parametrize("flag", flags())
def test_a_flag_does_something(bench, flag):
    """Each flag of --help has a proof here, and it holds."""
    assert flag in PROOFS, f"{flag} has no proof that it does anything"
    PROOFS[flag](bench)


def test_every_proof_is_of_a_flag():
    """No proof is left of a flag that is gone."""
    assert set(PROOFS) == set(flags())


def proves(flag: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    def note(proof: Callable[[Bench], None]) -> Callable[[Bench], None]:
        PROOFS[flag] = proof
        return proof

    return note


@proves("--output")
def _(bench):
    bench.main("--epochs", "1", output="here")
    assert {p.name for p in (bench.folder / "here").iterdir()} >= {
        "RWKV_CLIP_model_0.pt",
        "training.log",
        "tensorboard",
    }


@proves("--config")
def _(bench):
    parsed = parse_args(["--output", "x", "--config", "RWKV_CLIP_B16"])
    assert (parsed.n_embd, parsed.image_patch_size) == (640, 16)


@proves("--model-weight-path")
def _(bench):
    state = bench.build("--seed", "9").bare.state_dict()
    torch.save(state, bench.folder / "start.pt")
    loaded = bench.build("--model-weight-path", str(bench.folder / "start.pt")).bare.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.items())


@proves("--epochs")
def _(bench):
    assert [bench.build("--epochs", n).steps_total for n in ("1", "3")] == [3, 9]


@proves("--batch-size")
def _(bench):
    assert next(load_steps((run := bench.build("--batch-size", "6")).pairs, run.plan, 0))[0].image.shape[0] == 6


@proves("--seed")
def _(bench):
    assert bench.changes("--seed", "5")
    assert not bench.changes("--seed", "0")


@proves("--frequent")
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


@proves("--trace")
def _(bench):
    ((out, _),) = traced(bench, "--trace", str(bench.folder / "trace"))
    assert out == bench.folder / "trace"


@proves("--trace-every")
def _(bench):
    ((_, options),) = traced(bench, "--trace", str(bench.folder / "trace"), "--trace-every", "7")
    assert options["every"] == 7


@proves("--data")
def _(bench):
    run = bench.build(*bench.pictures)
    assert len(run.pairs) == 24
    assert run.held_out is None


@proves("--vocabulary")
def _(bench):
    with pytest.raises(InputError, match=r"cannot read the vocabulary .*no\.txt"):
        bench.build(*bench.pictures, "--vocabulary", "no.txt")


@proves("--image-column")
def _(bench):
    with pytest.raises(InputError, match=r"no column 'picture'"):
        bench.build(*bench.pictures, "--image-column", "picture")


@proves("--caption-columns")
def _(bench):
    assert len(bench.build(*bench.pictures).pairs.captions(0)) == 2
    assert bench.build(*bench.pictures, "--caption-columns", "caption_short").pairs.captions(0) == ["a zero"]


@proves("--workers")
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


@proves("--on-broken")
def _(bench):
    data = [*bench.pictures, "--data", str(broken_manifest(bench)), "--epochs", "1"]
    bench.main(*data, "--on-broken", "skip")
    assert train.main([*bench.small, "--output", str(bench.folder / "stop"), *data, "--on-broken", "stop"]) == 2
    assert "broken.csv row 1, image broken.png" in bench.capsys.readouterr().err


@proves("--val-data")
def _(bench):
    printed = bench.main(*bench.pictures, "--val-data", bench.pictures[1], "--epochs", "1")
    assert "image-to-text-r1:" in printed


@proves("--train-num-samples")
def _(bench):
    assert len(bench.build("--train-num-samples", "20").pairs) == 20


@proves("--no-augment")
def _(bench):
    assert bench.changes("--no-augment", base=tuple(bench.pictures))


@proves("--lr")
def _(bench):
    run = bench.build("--lr", "0.5")
    assert max(run.schedule.learning_rate(step) for step in range(6)) == pytest.approx(0.5)
    assert bench.changes("--lr", "0.5")


@proves("--lr-scheduler")
def _(bench):
    rates = [bench.build("--lr-scheduler", s, "--warmup", "0").schedule.learning_rate(3) for s in ("cosine", "linear")]
    assert rates[1] == pytest.approx(2e-3 * 0.5)
    assert rates[0] != rates[1]


@proves("--warmup")
def _(bench):
    schedule = bench.build("--epochs", "10", "--warmup", "0.5").schedule
    rates = [schedule.learning_rate(step) for step in range(30)]
    assert rates.index(max(rates)) == 14


@proves("--beta1")
def _(bench):
    assert bench.changes("--beta1", "0.5")
    assert bench.build("--beta1", "0.5").updater.optimizer.param_groups[0]["betas"] == (0.5, 0.98)


@proves("--beta2")
def _(bench):
    assert bench.changes("--beta2", "0.5")
    assert bench.build("--beta2", "0.5").updater.optimizer.param_groups[0]["betas"] == (0.9, 0.5)


@proves("--cycle-momentum")
def _(bench):
    schedule = bench.build("--cycle-momentum", "--warmup", "0.5").schedule
    assert [schedule.beta1(step) for step in (0, 2, 5)] == pytest.approx([0.95, 0.85, 0.95])
    assert bench.changes("--cycle-momentum")


@proves("--weight-decay")
def _(bench):
    assert bench.changes("--weight-decay", "0.9")
    assert [g["weight_decay"] for g in bench.build("--weight-decay", "0.9").updater.optimizer.param_groups] == [
        0.9,
        0.0,
    ]


@proves("--decay-all")
def _(bench):
    assert bench.changes("--decay-all", base=("--weight-decay", "0.9"))


@proves("--clip-grad-norm")
def _(bench):
    assert bench.changes("--clip-grad-norm", "1e-9")


@proves("--gradient-acc")
def _(bench):
    run = bench.build("--gradient-acc", "3", "--batch-size", "4")
    assert len(next(load_steps(run.pairs, run.plan, 0))) == 3
    assert run.plan.steps == 4


@proves("--device")
def _(bench):
    if torch.cuda.is_available():
        bench.main("--device", "cuda", "--epochs", "1")
    else:
        assert train.main([*bench.small, "--output", str(bench.folder), "--device", "cuda"]) == 2
        assert "torch sees no GPU" in bench.capsys.readouterr().err


@proves("--threads")
def _(bench):
    before = torch.get_num_threads()
    with computing(parse_args(["--output", "x", "--threads", "2"])):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


@proves("--precision")
def _(bench):
    assert bench.changes("--precision", "bf16")
    for precision, expected in (("tf32", ("high", True)), ("fp32", ("highest", False))):
        with computing(parse_args(["--output", "x", "--precision", precision])):
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == expected


@proves("--init-scale")
def _(bench):
    assert bench.build("--precision", "fp16", "--init-scale", "32").updater.scaler.get_scale() == 32


@proves("--growth-interval")
def _(bench):
    run = bench.build("--precision", "fp16", "--growth-interval", "1", "--init-scale", "8")
    train.train_step(run, next(load_steps(run.pairs, run.plan, 0)))
    assert run.updater.scaler.get_scale() == 16


@proves("--compile")
def _(bench):
    asked = []
    bench.monkeypatch.setattr("rwkv_clip.clip.RWKVCLIP.compile", lambda self, **options: asked.append(options))
    for more in ([], ["--compile"], ["--compile", "eager"]):
        bench.build(*more)
    assert asked == [{"backend": "inductor"}, {"backend": "eager"}]


@proves("--deterministic")
def _(bench):
    for more, expected in (([], False), (["--deterministic"], True)):
        with computing(parse_args(["--output", "x", *more])):
            assert torch.are_deterministic_algorithms_enabled() == expected
    assert not torch.are_deterministic_algorithms_enabled()


@proves("--fsdp")
def _(bench):
    with pytest.raises(InputError, match="--fsdp spreads the model over several processes: start them with torchrun"):
        bench.build("--fsdp")


@proves("--local-loss")
def _(bench):
    assert bench.build("--local-loss", "--gather-with-grad").updater.loss.local_loss
    with pytest.raises(InputError, match="--local-loss needs --gather-with-grad"):
        bench.build("--local-loss")


@proves("--gather-with-grad")
def _(bench):
    assert [bench.build(*more).updater.loss.gather_with_grad for more in ([], ["--gather-with-grad"])] == [False, True]


@proves("--stall-timeout")
def _(bench):
    asked = []
    watched = train.watched
    bench.monkeypatch.setattr(train, "watched", lambda *args: asked.append(args[2]) or watched(*args))
    bench.main("--epochs", "1", "--stall-timeout", "7.5")
    assert asked == [7.5]


@proves("--resume")
def _(bench):
    bench.main("--epochs", "2")
    printed = bench.main("--epochs", "2", "--resume", "0")
    assert re.search(r"going on from \S+RWKV_CLIP_model_0\.pt: epoch 1, step 3", printed)


@proves("--save-every")
def _(bench):
    saved = []
    save = train.save
    bench.monkeypatch.setattr(train, "save", lambda run, position: saved.append(run.step) or save(run, position))
    bench.main("--epochs", "2", "--save-every", "2")
    assert saved == [2, 3, 4, 6]


@proves("--keep-last")
def _(bench):
    bench.main("--epochs", "3", "--keep-last", "2")
    assert sorted(p.name for p in (bench.folder / "run").glob("*.pt")) == [
        "RWKV_CLIP_model_1.pt", "RWKV_CLIP_model_2.pt", "training_state_1.pt", "training_state_2.pt",
    ]  # fmt: skip


def changes_shapes(*flags: str) -> Callable[[Bench], None]:
    """The model's parameters have other shapes with the flags."""

    def proof(bench):
        shapes = [{n: p.shape for n, p in bench.build(*f).bare.named_parameters()} for f in (flags, ())]
        assert shapes[0] != shapes[1]

    return proof


WIDER = ("--image-embed-dims", "32", "--n-embd", "32")
PROOFS |= {
    "--input-size": changes_shapes("--input-size", "16"),
    "--image-depth": changes_shapes("--image-depth", "2"),
    "--image-embed-dims": changes_shapes(*WIDER),
    "--n-embd": changes_shapes(*WIDER),
    "--image-patch-size": changes_shapes("--image-patch-size", "2"),
    "--image-hidden-rate": changes_shapes("--image-hidden-rate", "5"),
    "--image-num-heads": changes_shapes("--image-num-heads", "4"),
    "--image-with-cls-token": changes_shapes("--image-with-cls-token", "True"),
    "--vocab-size": changes_shapes("--vocab-size", "80"),
    "--head-size": changes_shapes("--head-size", "4"),
    "--text-num-head": changes_shapes("--text-num-head", "4"),
    "--n-layer": changes_shapes("--n-layer", "2"),
    "--dim-ffn": changes_shapes("--dim-ffn", "64"),
}


@proves("--dim-att")
def _(bench):
    with pytest.raises(InputError, match="dim_att 24 must be 0 or n_embd 16"):
        bench.build("--dim-att", "24")


@proves("--image-output-cls-token")
def _(bench):
    assert bench.changes("--image-output-cls-token", "True", base=("--image-with-cls-token", "True"))


@proves("--ctx-len")
def _(bench):
    assert bench.build("--ctx-len", "20").pairs[0].tokens.shape == (20,)


@proves("--text-initialization")
def _(bench):
    silent = bench.build().bare.text_model.blocks[0].att.output.weight
    assert not silent.any()
    assert bench.build("--text-initialization", "False").bare.text_model.blocks[0].att.output.weight.any()


@proves("--head-size-divisor")
def _(bench):
    epsilons = {
        m.eps for m in bench.build("--head-size-divisor", "2").bare.text_model.modules() if isinstance(m, TimeMix)
    }
    assert epsilons == {4e-5}


@proves("--drop-path-rate")
def _(bench):
    flags = ("--image-depth", "2", "--drop-path-rate", "0.5")
    rates = [m.rate for m in bench.build(*flags).bare.image_model.modules() if isinstance(m, DropPath)]
    assert rates == [0.0, 0.5]
    assert bench.changes("--drop-path-rate", "0.5", base=("--image-depth", "2"))


@proves("--dropout")
def _(bench):
    assert bench.changes("--dropout", "0.5")


@proves("--with-cp")
def _(bench):
    passes = []
    for more in ([], ["--with-cp", "True"]):
        run, count = bench.build(*more), []
        for layer in (m for m in run.bare.image_model.modules() if isinstance(m, Layer)):
            layer.ln1.register_forward_hook(lambda *_, count=count: count.append(1))
        run.model.train()
        train.train_step(run, next(load_steps(run.pairs, run.plan, 0)))
        passes.append(len(count))
    assert passes == [1, 2]
    assert not bench.changes("--with-cp", "True")


@proves("--wkv-engine")
def _(bench):
    used = []
    bench.monkeypatch.setitem(wkv.FORWARD, "reference", lambda *args: used.append(1) or wkv6_reference(*args))
    bench.weights("--wkv-engine", "chunked", steps=1)
    assert not used
    bench.weights("--wkv-engine", "reference", steps=1)
    assert used
