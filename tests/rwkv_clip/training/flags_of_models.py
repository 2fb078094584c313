"""Proofs of the flags that shape the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rwkv_clip import InputError, train, wkv
from rwkv_clip.data.loading import load_steps
from rwkv_clip.mixing import TimeMix
from rwkv_clip.towers import DropPath, Layer
from rwkv_clip.wkv.reference import wkv6_reference
from tests.rwkv_clip.training.flag_bench import Bench, Proofs

PROOFS = Proofs()


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


@PROOFS.of("--dim-att")
def _(bench):
    with pytest.raises(InputError, match="dim_att 24 must be 0 or n_embd 16"):
        bench.build("--dim-att", "24")


@PROOFS.of("--image-output-cls-token")
def _(bench):
    assert bench.changes("--image-output-cls-token", "True", base=("--image-with-cls-token", "True"))


@PROOFS.of("--ctx-len")
def _(bench):
    assert bench.build("--ctx-len", "20").pairs[0].tokens.shape == (20,)


@PROOFS.of("--text-initialization")
def _(bench):
    silent = bench.build().bare.text_model.blocks[0].att.output.weight
    assert not silent.any()
    assert bench.build("--text-initialization", "False").bare.text_model.blocks[0].att.output.weight.any()


@PROOFS.of("--head-size-divisor")
def _(bench):
    epsilons = {
        m.eps for m in bench.build("--head-size-divisor", "2").bare.text_model.modules() if isinstance(m, TimeMix)
    }
    assert epsilons == {4e-5}


@PROOFS.of("--drop-path-rate")
def _(bench):
    flags = ("--image-depth", "2", "--drop-path-rate", "0.5")
    rates = [m.rate for m in bench.build(*flags).bare.image_model.modules() if isinstance(m, DropPath)]
    assert rates == [0.0, 0.5]
    assert bench.changes("--drop-path-rate", "0.5", base=("--image-depth", "2"))


@PROOFS.of("--dropout")
def _(bench):
    assert bench.changes("--dropout", "0.5")


@PROOFS.of("--with-cp")
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


@PROOFS.of("--wkv-engine")
def _(bench):
    used = []
    bench.monkeypatch.setitem(wkv.FORWARD, "reference", lambda *args: used.append(1) or wkv6_reference(*args))
    bench.weights("--wkv-engine", "chunked", steps=1)
    assert not used
    bench.weights("--wkv-engine", "reference", steps=1)
    assert used
