"""Several processes over gloo against a single one: loss, gradients, updates, scores, checkpoints, logs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rwkv_clip import ClipLoss, InputError, create_RWKV_Model, load_model_weight, train
from rwkv_clip.config import ModelConfig
from rwkv_clip.data.loading import load_steps
from rwkv_clip.training.distributed import Place, full_model_state, joined
from rwkv_clip.training.flags import parse_args
from rwkv_clip.training.run import Run, build, computing
from tests import launching
from tests.rwkv_clip.originals import LOSSES, loss_and_gradients

CPU = Place(torch.device("cpu"))
STEPS = 2
RECORDED_RANKS = 2  # that the original's loss was run on
PAIRS_A_STEP = 16
VARIANTS = [*LOSSES, "--fsdp", "--gradient-acc 2", "--fsdp --gradient-acc 2 --gather-with-grad", "--fsdp --precision fp16",
            "--image-depth 2 --with-cp True"]  # fmt: skip


def evaluated(run: Run) -> dict[str, Any]:
    """The scores that every rank is told, and how many images this one has encoded for them."""
    encoded = []
    hook = run.bare.image_model.register_forward_pre_hook(lambda _, inputs: encoded.append(len(inputs[0])))
    scores = train.evaluate(run)
    hook.remove()
    return {"scores": scores, "encoded": sum(encoded), "moves": run.phases.now.moves}


def outcomes(run: Run) -> dict[str, Any]:
    """Losses, gradient norms and whole weights after some steps."""
    with computing(run.args):
        run.model.train()
        steps = [
            train.train_step(run, batches) for batches in itertools.islice(load_steps(run.pairs, run.plan, 0), STEPS)
        ]
    return {
        "losses": [float(step.loss) for step in steps],
        "norms": [float(step.grad_norm) for step in steps],
        "weights": full_model_state(run.model),
    }


def work(flags: list[str], pictures: list[str], features: np.ndarray, output: str) -> None:
    """Everything that the tests below compare, on this rank."""
    with joined("cpu") as place:
        image, text = (torch.from_numpy(part[place.rank % RECORDED_RANKS]) for part in features)
        results: dict[str, Any] = {
            name: loss_and_gradients(image, text, **options)
            for name, options in LOSSES.items()
            if place.world == len(features[0])
        }
        for variant in VARIANTS:
            more = ["--batch-size", str(PAIRS_A_STEP // place.world // (2 if "acc" in variant else 1))]
            args = parse_args([*flags, "--output", output, *more, *variant.split()])
            results[f"run {variant}"] = outcomes(build(args, place))
        for data, more in (("digits", []), ("pictures", pictures)):
            for spread in ([], ["--fsdp"]):
                run = build(parse_args([*flags, *more, *spread, "--output", output]), place)
                results[f"evaluate {data}"] = [*results.get(f"evaluate {data}", []), evaluated(run)]
        torch.save(results, f"{output}.{place.rank}.pt")
        args = parse_args(
            [*flags, "--output", output, "--fsdp", "--batch-size", "8", "--frequent", "1", "--stall-timeout", "60"]
        )
        Path(output).mkdir(exist_ok=True)
        train._work(build(args, place))
        for args.epochs, args.fsdp in ((3, True), (4, False)):
            args.resume = "latest"
            train._work(build(args, place))


@pytest.fixture(scope="module")
def held_out(tmp_path_factory, pictures, picture_flags) -> list[str]:
    """Flags of a run that evaluates on 25 images, which no number of ranks here divides; the 8th cannot be read."""
    path = tmp_path_factory.mktemp("held_out") / "pairs.csv"
    head, *rows = (pictures / "pairs.csv").read_text().splitlines()
    rows = [row.replace('"', f'"{pictures}/', 1) for row in rows]
    path.write_text("\n".join([head, *rows[:7], '"no.png","none","none",0', *rows[7:]]))
    return [*picture_flags, "--val-data", str(path)]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory, small_flags, held_out, numbers) -> Iterator[list[dict[str, Any]]]:
    """What each of the ranks got, and the directory of a whole run."""
    folder = tmp_path_factory.mktemp("ranks")
    recorded = numbers("dist_loss.npz")
    features = np.stack([recorded["image"], recorded["text"]])
    launching.run(
        work, small_flags, held_out, features, str(folder / "out"), ranks=request.param, log=folder / "log", timeout=300
    )
    return [torch.load(folder / f"out.{rank}.pt") | {"folder": folder / "out"} for rank in range(request.param)]


@pytest.fixture(scope="module")
def single(small_flags, tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """What a single process gets with the same pairs a step."""
    output = str(tmp_path_factory.mktemp("single"))

    def run(variant: str) -> dict[str, Any]:
        kept = [flag for flag in variant.split() if flag not in ("--fsdp", "--local-loss", "--gather-with-grad")]
        more = ["--batch-size", str(PAIRS_A_STEP // (2 if "acc" in variant else 1))]
        return outcomes(build(parse_args([*small_flags, "--output", output, *more, *kept]), CPU))

    return run


@pytest.mark.parametrize("flags", LOSSES)
def test_the_loss_is_the_originals_and_the_single_processs(ranks, numbers, flags):
    """Mean loss and averaged gradients over two ranks are the original's single process's, for every kind of loss."""
    if len(ranks) != RECORDED_RANKS:
        pytest.skip("the original was run on two ranks")
    recorded = numbers("dist_loss.npz")
    losses, images, texts, scales = zip(*(rank[flags] for rank in ranks), strict=True)
    np.testing.assert_allclose(np.mean([float(loss) for loss in losses]), recorded["single/loss"], rtol=1e-12)
    np.testing.assert_allclose(np.mean([float(scale) for scale in scales]), recorded["single/g_scale"], rtol=1e-12)
    for seen, name in ((images, "g_image"), (texts, "g_text")):
        averaged = torch.cat(seen).numpy() / len(ranks)  # what DDP makes of it: each rank's features are its own
        np.testing.assert_allclose(averaged, recorded[f"single/{name}"], rtol=1e-10, atol=1e-14)
    if flags:
        kind = "local1_grad1" if "local" in flags else "local0_grad1"
        for rank, loss in enumerate(losses):
            np.testing.assert_allclose(float(loss), recorded[f"{kind}/rank{rank}/loss"], rtol=1e-12)
            np.testing.assert_allclose(images[rank], recorded[f"{kind}/rank{rank}/g_image"], rtol=1e-10, atol=1e-14)


def test_a_local_loss_without_gradients_is_refused():
    """The one combination whose gradients would be wrong is an error that says what is missing."""
    with pytest.raises(InputError, match="local_loss needs gather_with_grad"):
        ClipLoss(local_loss=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_processes_train_as_one(ranks, single, variant):
    """Losses, gradient norms and weights after two steps agree with one process's, on every rank."""
    results, expected, start = [rank[f"run {variant}"] for rank in ranks], single(variant), single(f"{variant} --lr 0")
    tolerance = 2e-2 if "fp16" in variant else 2e-4
    losses = np.mean([result["losses"] for result in results], axis=0)
    np.testing.assert_allclose(losses, expected["losses"], rtol=tolerance)
    for result in results:
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=tolerance)
    weights = results[0]["weights"]
    assert {name: w.shape for name, w in weights.items()} == {name: w.shape for name, w in expected["weights"].items()}
    # Where a gradient is noise around zero, AdamW's first steps are as large as the rate and of either sign: single
    # weights may differ by it, all together not by a thirtieth of the way.
    assert distance(weights, expected["weights"]) < distance(weights, start["weights"]) / 30


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Euclidean distance of all weights together."""
    return math.sqrt(sum(float((value - b[name]).square().sum()) for name, value in a.items()))


@pytest.mark.parametrize("data", ["digits", "pictures"])
def test_many_processes_evaluate_as_one(ranks, data, small_flags, held_out, tmp_path):
    """Copied and sharded, each rank encodes its share of the images, and every rank is told the single one's scores."""
    flags = [*small_flags, *(held_out if data == "pictures" else []), "--output", str(tmp_path)]
    expected = evaluated(build(parse_args(flags), CPU))
    assert expected["encoded"] == {"digits": 359, "pictures": 25}[data]
    share = -(-expected["encoded"] // len(ranks))
    for rank in ranks:
        for seen in rank[f"evaluate {data}"]:
            assert seen["scores"] == pytest.approx(expected["scores"])
            assert seen["encoded"] == share
    assert len({seen["moves"] for rank in ranks for seen in rank[f"evaluate {data}"]}) == 1
    assert any(0 < score < 1 for score in expected["scores"].values())


def test_a_sharded_run_leaves_what_any_run_leaves(ranks, small_flags):
    """Sharded, ended and gone on with: the checkpoint loads into a bare model and has the state of every rank."""
    folder = ranks[0]["folder"]
    model = create_RWKV_Model(ModelConfig.from_namespace(parse_args([*small_flags, "--output", "x"])))
    load_model_weight(model, folder / "RWKV_CLIP_model_2.pt")
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    state = torch.load(folder / "training_state_2.pt", weights_only=True)
    assert state["optimizer"].keys() == model.state_dict().keys()
    assert len(state["random"]) == len(ranks)


def test_a_run_goes_on_in_another_arrangement(ranks, small_flags, tmp_path, capsys):
    """What was sharded goes on copied, and what many processes trained goes on in one, which says what is different."""
    folder = ranks[0]["folder"]
    assert "settings differ: fsdp True -> False" in (folder / "training.log").read_text().replace("epochs 3 -> 4, ", "")
    flags = [*small_flags, "--batch-size", str(8 * len(ranks)), "--epochs", "5"]
    assert train.main([*flags, "--output", str(tmp_path), "--resume", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"processes {len(ranks)} -> 1" in said
    assert "epoch 4, step " in said
    moved, there = torch.load(tmp_path / "RWKV_CLIP_model_4.pt"), torch.load(folder / "RWKV_CLIP_model_3.pt")
    assert 0 < distance(moved, there) < math.inf


def test_every_rank_has_a_log(ranks):
    """Each rank's own log has the run's lines, with every rank's speed, and all ranks found the same accuracy."""
    folder, count = ranks[0]["folder"], len(ranks)
    logs = [folder / ("training.log" if rank == 0 else f"training.rank{rank}.log") for rank in range(count)]
    accuracies = []
    for rank, log in enumerate(logs):
        text = log.read_text()
        assert f"process {rank} of {count}" in text
        assert re.search(rf"rank:\d+ total:\d+ ranks:\[\d+(?: \d+){{{count - 1}}}\] lr:", text)
        accuracies += re.findall(r"epoch:2 zero-shot-accuracy:(\S+)", text)
    assert len(accuracies) == count
    assert len(set(accuracies)) == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set: start the processes with torchrun"),
        ({"WORLD_SIZE": "two"}, "environment variable WORLD_SIZE: expected a whole number, seen 'two'"),
    ],
)
def test_a_half_made_launch_is_explained(monkeypatch, environment, message):
    """A launcher's variables that are missing or malformed are errors that say which."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message), joined("cpu"):
        pass
