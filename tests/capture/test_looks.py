"""What is asked of a loss and of the process now and then: classes, targets, padding that masks keep, memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tracehooks
from tracehooks.capture import optimizers

IGNORED = -100


def scalars_of(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Of each name its steps and values, in order."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in tracehooks.open(path).scalars().sort_by("step").to_pylist():
        found.setdefault(row["name"], []).append((row["step"], row["value"]))
    return found


def trained(
    path: Path, model: nn.Module, step: Callable[[int], Tensor], steps: int
) -> dict[str, list[tuple[int, float]]]:
    """Train while recording; what was recorded as scalars."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with tracehooks.attach(model, path, quiet=True):
        for number in range(steps):
            optimizer.zero_grad()
            step(number).backward()
            optimizer.step()
    return scalars_of(path)


@pytest.mark.parametrize("shape", [(40,), (5, 4, 3)], ids=["samples", "pixels"])
def test_classes_are_counted_as_by_hand(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Of a cross-entropy with ignored targets: classes, distinct ones, the commonest, its share, how many predictions are
    right, and the class most often taken for another, all counted again from the logits."""
    model = nn.Linear(6, 5)
    target = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(1))
    target.view(-1)[:7] = IGNORED
    x = torch.randn(*shape, 6, generator=torch.Generator().manual_seed(2))
    seen: list[Tensor] = []

    def step(number: int) -> Tensor:
        logits = model(x).movedim(-1, 1)
        seen.append(logits.detach())
        return functional.cross_entropy(logits, target)

    found = trained(tmp_path / "run", model, step, 1)
    told = {
        name.removeprefix("targets/"): values[0][1] for name, values in found.items() if name.startswith("targets/")
    }
    kept = target != IGNORED
    wanted, said = target[kept], seen[0].argmax(1)[kept]
    counts = torch.bincount(wanted, minlength=5).double()
    assert (told["classes"], told["distinct"]) == (5, len(wanted.unique()))
    assert told["commonest"] == counts.argmax()
    assert told["largest_share"] == pytest.approx((counts.max() / counts.sum()).item())
    assert told["right"] == pytest.approx((wanted == said).double().mean().item())
    assert told["predicted_share"] == pytest.approx((torch.bincount(said).max() / len(said)).item())
    shares = {(a, b): ((wanted == a) & (said == b)).sum() / counts[a] for a in range(4) for b in range(5) if a != b}
    pairs = {pair: float(share) for pair, share in shares.items() if counts[pair[0]] >= 4}
    worst = max(pairs, key=lambda pair: pairs[pair])
    assert told["confused"] == pytest.approx(pairs[worst])
    assert pairs[int(told["confused_class"]), int(told["taken_for"])] == pytest.approx(pairs[worst])


def test_targets_that_are_numbers_have_mean_and_spread(tmp_path: Path) -> None:
    """Of a squared error: mean and standard deviation of its targets."""
    model, y = nn.Linear(6, 1), torch.tensor([[1.0], [3.0], [8.0]])
    found = trained(tmp_path / "run", model, lambda number: functional.mse_loss(model(torch.ones(3, 6)), y), 1)
    assert found["targets/mean"][0][1] == pytest.approx(4.0)
    assert found["targets/std"][0][1] == pytest.approx(y.std(correction=0).item())


def test_looks_are_ever_further_apart(tmp_path: Path) -> None:
    """The first steps are looked at, then powers of two: what they cost is nothing in a long run."""
    model = nn.Linear(6, 3)
    found = trained(
        tmp_path / "run", model,
        lambda number: functional.cross_entropy(model(torch.ones(4, 6)), torch.tensor([0, 1, 2, 0])), 20,
    )  # fmt: skip
    assert [step for step, _ in found["targets/right"]] == [0, 1, 2, 4, 8, 16]
    assert [step for step, _ in found["memory/resident"]] == [0, 1, 2, 4, 8, 16]
    assert all(value > 1e7 for _, value in found["memory/resident"])


class Takes(nn.Module):
    """Tokens and a mask of some name."""

    def __init__(self, padding: int | None = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=padding)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        return self.table(ids).square().mean()


IDS = torch.tensor([[3, 4, 0, 0], [5, 6, 7, 0]])


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("attention_mask", (IDS != 0).long()),
        ("attention_mask", IDS != 0),
        ("attention_mask", (IDS != 0).float()),
        ("key_padding_mask", IDS == 0),
    ],
    ids=["long", "bool", "float", "drops"],
)
def test_what_a_mask_keeps_of_the_padding(name: str, mask: Tensor, tmp_path: Path) -> None:
    """Whatever the convention, a right mask keeps all tokens and no padding, its inverse the padding alone."""
    inverse = ~mask if mask.dtype is torch.bool else 1 - mask
    for folder, given, kept in (("right", mask, (0.0, 1.0)), ("inverted", inverse, (1.0, 0.0))):
        model = Takes()
        found = trained(
            tmp_path / folder, model, lambda number, model=model, given=given: model(IDS, **{name: given}), 1
        )
        assert found[f"mask/padding_kept/{name}"][0][1] == kept[0]
        assert found[f"mask/tokens_kept/{name}"][0][1] == kept[1]


@pytest.mark.parametrize("mask", [IDS == 0, IDS != 0, (IDS != 0).long()], ids=["drops", "keeps", "long"])
def test_of_a_mask_whose_name_means_either_nothing_is_told(mask: Tensor, tmp_path: Path) -> None:
    """A padding_mask is True for padding in some models and for tokens in others: neither is the wrong way round."""
    model = Takes()
    found = trained(tmp_path / "run", model, lambda number: model(IDS, padding_mask=mask), 1)
    assert not [name for name in found if name.startswith("mask/")]


def test_without_padding_nothing_is_told_of_masks(tmp_path: Path) -> None:
    """An embedding without padding_idx says nothing of which tokens are padding."""
    model = Takes(None)
    found = trained(tmp_path / "run", model, lambda number: model(IDS, attention_mask=IDS != 0), 1)
    assert not [name for name in found if name.startswith("mask/")]


def test_likeness_is_recorded_with_the_samples_until_there_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of 256 elements or more have a sketch, the first so many of each split, others null."""
    monkeypatch.setattr("tracehooks.capture.recorder.LIKENED", 6)
    model = nn.Linear(256, 1)
    trained(tmp_path / "run", model, lambda number: model(torch.randn(4, 256)).square().mean(), 3)
    sketches = tracehooks.open(tmp_path / "run").samples()["sketch"].to_pylist()
    assert [sketch is None for sketch in sketches] == [False] * 4 + [True] * 8


def test_a_resumed_run_says_so_and_whether_the_optimizer_had_state(tmp_path: Path) -> None:
    """The event names the step, run.json whether moments were there before the first step."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    told = []
    for resume in (False, True):
        with tracehooks.attach(model, tmp_path / "run", quiet=True, resume=resume):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        told.append(tracehooks.open(tmp_path / "run").info["optimizers"][0]["had_state"])
    assert told == [False, True]
    events = tracehooks.open(tmp_path / "run").events(where="kind = 'run_resumed'").to_pylist()
    assert [(event["step"], event["details"]) for event in events] == [(1, '{"step": 1}')]


def test_the_process_is_searched_for_optimizers_in_the_first_steps_alone(tmp_path: Path, monkeypatch) -> None:
    """Also where the root is never called: a critic and a generator in a ModuleDict, with a gradient penalty."""
    searches: list[int] = []
    everybody = optimizers._all_of_them
    monkeypatch.setattr(optimizers, "_all_of_them", lambda: searches.append(trace.step) or everybody())
    both = nn.ModuleDict({"critic": nn.Linear(2, 1), "generator": nn.Linear(3, 2)})
    critics = torch.optim.SGD(both["critic"].parameters(), 1e-3)
    with tracehooks.attach(both, tmp_path / "run", quiet=True) as trace:
        for _ in range(12):
            points = torch.randn(4, 2, requires_grad=True)
            slope = torch.autograd.grad(both["critic"](points).sum(), points, create_graph=True)[0]
            critics.zero_grad()
            (both["critic"](both["generator"](torch.randn(4, 3)).detach()).mean() + slope.square().mean()).backward()
            critics.step()
        assert trace.step == 11
    assert max(searches) < 4


def test_what_a_module_makes_in_its_first_pass_is_registered(tmp_path: Path) -> None:
    """Parameters that exist only from the first forward pass on are no strangers in its backward pass."""

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(x.shape[1], 2)
            result: Tensor = self.layer(x)
            return result

    model = Late()
    with tracehooks.attach(model, tmp_path / "run", quiet=True):
        for _ in range(5):
            model(torch.randn(4, 3)).sum().backward()
    kinds = tracehooks.open(tmp_path / "run").events().column("kind").to_pylist()
    assert "modules_changed" in kinds
    assert "unregistered" not in kinds
