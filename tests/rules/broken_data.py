"""Training that fails by what it is given: targets, masks, inputs, conditions, splits, loaders. Each builder's
docstring says what is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.rules.broken_training import pictures
from tests.rules.cases import Broken, Case, batches, trained
from tests.rules.parts import mlp, regression


def one_label() -> Case:
    """The label of every sample is 2."""

    def loss(model: nn.Module, number: int) -> Tensor:
        return functional.cross_entropy(model(batches(16, 6)[number % 8]), torch.full((16,), 2))

    return trained(mlp(6, 4), loss)


def one_value() -> Case:
    """The target of every sample is 0.5."""

    def loss(model: nn.Module, number: int) -> Tensor:
        return functional.mse_loss(model(batches(16, 6)[number % 8]), torch.full((16, 1), 0.5))

    return trained(mlp(6, 1), loss)


def nearly_all_of_one_class() -> Case:
    """Sixty-two of sixty-four samples have class 0, and soon the predictions have no other."""

    def loss(model: nn.Module, number: int) -> Tensor:
        target = torch.zeros(64, dtype=torch.int64)
        target[:2] = torch.tensor([1, 2])
        return functional.cross_entropy(model(0.1 * batches(64, 6)[number % 8]), target)

    return trained(mlp(6, 3), loss, lr=0.1, steps=40)


def threes_labelled_as_eights() -> Case:
    """A trained classifier goes on with the threes labelled as eights, at a rate too small to learn it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    learner = torch.optim.Adam(model.parameters(), 3e-3)
    for number in range(150):
        x, y = pictures(number, 32)
        learner.zero_grad()
        functional.cross_entropy(model(x / 16), y).backward()
        learner.step()

    def loss(m: nn.Module, number: int) -> Tensor:
        x, y = pictures(number, 128)
        return functional.cross_entropy(m(x[y != 8] / 16), torch.where(y == 3, 8, y)[y != 8])

    return trained(model, loss, optimizer=torch.optim.SGD(model.parameters(), 1e-4), steps=12)


class Pooled(nn.Module):
    """Tokens, averaged where a mask keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 1)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask.float().unsqueeze(-1)
        return self.head((self.embedding(ids) * kept).sum(1) / kept.sum(1).clamp(min=1))


def padded(number: int, count: int = 16, length: int = 32) -> tuple[Tensor, Tensor]:
    """Token ids with zeros behind them, and how long each is."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1, 20, (count, length), generator=generator)
    lengths = torch.randint(8, length - 8, (count,), generator=generator)
    return ids * (torch.arange(length) < lengths.unsqueeze(1)), lengths


def _pooled(mask_of: Any, steps: int = 8, count: int = 16, length: int = 32) -> Case:
    def loss(model: nn.Module, number: int) -> Tensor:
        ids, _ = padded(number, count, length)
        return (model(ids, mask_of(ids, number)) - ids.float().mean(-1, keepdim=True)).square().mean()

    return trained(Pooled(), loss, steps=steps)


def mask_of_one_position() -> Case:
    """The mask keeps one position of a hundred."""
    return _pooled(lambda ids, number: torch.arange(100).expand(16, 100) == 3, length=100)


def ten_times_as_long_as_needed() -> Case:
    """Sequences are padded to a length that hardly any of their tokens need."""

    def ids(number: int) -> Tensor:
        return functional.pad(padded(number)[0][:, :8], (0, 92))

    def loss(model: nn.Module, number: int) -> Tensor:
        return (model(ids(number), ids(number) != 0) - 1.0).square().mean()

    return trained(Pooled(), loss)


def every_third_sample_masked() -> Case:
    """The mask of every third sample is empty."""
    return _pooled(lambda ids, number: (ids != 0) & (torch.arange(16) % 3 > 0).unsqueeze(1))


def mask_inverted() -> Case:
    """True where there is padding, to a model that keeps what is True."""
    return _pooled(lambda ids, number: ids == 0)


def batches_of_nothing() -> Case:
    """A filter drops every sample."""

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number]
        return model(x[x[:, 0] > 100]).sum()

    return trained(mlp(6, 8, 1), loss)


def pictures_as_they_come() -> Case:
    """Pixels from 0 to 255 as floats."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def loss(m: nn.Module, number: int) -> Tensor:
        x, y = pictures(number)
        return functional.cross_entropy(m(x * 255 / 16), y)

    return trained(model, loss, lr=1e-5)


class Guided(nn.Module):
    """A text condition, where it is given, is added to what is in the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = nn.Linear(6, 8), nn.Embedding(20, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, caption: Tensor | None = None) -> Tensor:
        h = self.image(x)
        return self.head(h if caption is None else h + self.text(caption).mean(1))


def caption(number: int, count: int = 16, length: int = 12) -> Tensor:
    """Token ids, another caption for each sample."""
    return torch.randint(1, 20, (count, length), generator=torch.Generator().manual_seed(100 + number))


def _guided(caption_of: Any, model: nn.Module | None = None) -> Case:
    def loss(m: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number % 8]
        given = caption_of(number)
        return ((m(x) if given is None else m(x, given)) - x.sum(-1, keepdim=True)).square().mean()

    return trained(model or Guided(), loss, steps=8)


def caption_mostly_absent() -> Case:
    """The caption is handed over in two of eight passes."""
    return _guided(lambda number: caption(number) if number % 4 == 0 else None)


def caption_mostly_dropped() -> Case:
    """Condition dropout of 75 % in place of 25 %."""

    def dropped(number: int) -> Tensor:
        kept = torch.arange(16) % 4 == 0
        return torch.where(kept.unsqueeze(1), caption(number), 0)

    return _guided(dropped)


def frozen_text_encoder() -> Case:
    """The encoder of the caption was never loaded, and is frozen."""
    model = Guided()
    model.text.requires_grad_(False)
    return _guided(caption, model)


def windows_of_one_song_in_both() -> Case:
    """Windows that overlap were cut before the split."""
    case = trained(mlp(6, 1), regression)

    def tell(number: int, trace: Any) -> None:
        starts = torch.arange(4) * 10 + number
        trace.samples(batches(4, 6)[number % 8], "train", [f"song{number % 2}@{start}+8" for start in starts.tolist()])
        trace.samples(
            batches(2, 6, seed=3)[number % 8], "validation", [f"song{number % 2}@{number + 4}+8", f"other{number}@0+8"]
        )

    case.after = tell
    return case


def one_singer_in_both() -> Case:
    """One source id of the validation data is in training as well."""
    case = trained(mlp(6, 1), regression)

    def tell(number: int, trace: Any) -> None:
        trace.samples(batches(4, 6)[number % 8], "train", [f"singer{number}-{i}" for i in range(4)])
        trace.samples(batches(2, 6, seed=3)[number % 8], "validation", ["singer3-1", f"new{number}"])

    case.after = tell
    return case


def the_same_noise_a_little_louder() -> Case:
    """Validation samples are training samples at another level, with a little noise."""
    model = mlp(300, 8, 1)
    data = batches(16, 300)

    def loss(m: nn.Module, number: int) -> Tensor:
        return (m(data[number % 8]) - data[number % 8].sum(-1, keepdim=True)).square().mean()

    case = trained(model, loss, lr=1e-4)

    def validate(number: int, trace: Any) -> None:
        with torch.no_grad():
            copies = 0.7 * data[number % 8][:3] + 0.01 * batches(3, 300, seed=8)[number % 8]
            fresh = batches(13, 300, seed=9)[number % 8]
            model(torch.cat([copies, fresh]))

    case.after = validate
    return case


def fresh_iterator_each_step() -> Case:
    """next(iter(loader)) in the loop."""
    loader = DataLoader(TensorDataset(batches(6, count=64)), 16)
    case = trained(mlp(6, 8, 1), lambda m, i: m(next(iter(loader))[0]).square().mean())
    case.options = {}
    return case


def epoch_never_set() -> Case:
    """A distributed sampler whose epoch stays 0."""
    data = TensorDataset(batches(6, count=48))
    loader = DataLoader(data, 16, sampler=DistributedSampler(data, 1, 0, shuffle=True))
    given = [batch for _ in range(3) for (batch,) in loader]
    return trained(mlp(6, 8, 1), lambda m, i: m(given[i]).square().mean() + 0 * len(loader), steps=9)


def same_noise_in_every_worker() -> Case:
    """Two workers that draw the same numbers: every batch comes twice."""
    loader = DataLoader(TensorDataset(batches(6, count=64)), 16, num_workers=2)
    drawn = batches(16, 6)
    return trained(mlp(6, 8, 1), lambda m, i: m(drawn[i // 2]).square().mean() + 0 * len(loader))


class Normalised(Dataset[Tensor]):
    """Normalises the tensor it keeps."""

    def __init__(self) -> None:
        self.kept = torch.rand(8, 6)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return self.kept[index].sub_(0.5).div_(0.25)


def normalised_again_and_again() -> Case:
    """A transform in place on what the dataset keeps."""
    loader = DataLoader(Normalised(), 4)
    stream = (batch for _ in range(10) for batch in loader)
    return trained(mlp(6, 8, 1), lambda m, i: m(next(stream)).square().mean(), steps=10)


def empty_captions() -> Case:
    """Every caption is the empty one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.net = nn.Embedding(10, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor, caption: Tensor) -> Tensor:
            return self.net(x + self.text(caption).mean(1))

    caption = torch.zeros(16, 5, dtype=torch.long)

    def loss(model: nn.Module, number: int) -> Tensor:
        return (model(batches(16, 6)[number], caption) - 1).square().mean()

    return trained(Model(), loss)


def shared_between_splits() -> Case:
    """Shuffled before it was cut: a third of the validation samples are training samples."""
    data = batches(6, count=128)
    model = mlp(6, 8, 1)

    def validate(number: int, trace: Any) -> None:
        with torch.no_grad():
            model(data[96 + 4 * number : 100 + 4 * number] if number < 4 else data[8 * number : 8 * number + 2])

    case = trained(model, lambda m, i: m(data[12 * i : 12 * i + 12]).square().mean())
    case.after = validate
    return case


def slow_loader() -> Case:
    """Every batch takes much longer than a step."""
    import time

    def loss(model: nn.Module, number: int) -> Tensor:
        time.sleep(0.05)
        return regression(model, number)

    return trained(mlp(6, 8, 1), loss)


DATA = [
    Broken(one_label, "constant_targets", "one_class", {}),
    Broken(one_value, "constant_targets", "one_number", {}),
    Broken(nearly_all_of_one_class, "class_imbalance", "majority_class", {"commonest": 0, "classes": 3}),
    Broken(threes_labelled_as_eights, "confusion", "one_class_taken_for_another", {"taken": 8, "for_class": 3}),
    Broken(mask_of_one_position, "nearly_empty_mask", "keeps_nearly_nothing", {"slot": "attention_mask"}),
    Broken(
        every_third_sample_masked, "masked_rows", "rows_without_anything", {"slot": "attention_mask", "share": 0.375}
    ),
    Broken(
        mask_inverted, "inverted_mask", "inverted", {"slot": "attention_mask", "padding_kept": 1.0, "tokens_kept": 0.0}
    ),
    Broken(batches_of_nothing, "zero_gradient", "empty_batches", {"count": 4}),
    Broken(pictures_as_they_come, "unnormalised_images", "pixels_as_they_are", {"max": 255.0}),
    Broken(caption_mostly_absent, "condition_absent", "missing_in_most_passes", {"input": "caption", "count": 6}),
    Broken(caption_mostly_dropped, "condition_dropped", "dropped_too_often", {"input": "caption", "share": 0.75}),
    Broken(frozen_text_encoder, "condition_frozen", "encoder_frozen", {"input": "caption", "modules": ["text"]}),
    Broken(windows_of_one_song_in_both, "source_overlap", "overlapping_windows", {"sources": ["song0", "song1"]}),
    Broken(one_singer_in_both, "source_overlap", "source_in_both_splits", {"sources": ["singer3-1"], "count": 1}),
    Broken(the_same_noise_a_little_louder, "near_duplicates", "nearly_the_same_sample", {"count": 24}),
    Broken(fresh_iterator_each_step, "repeated_batch", "iterator_recreated", {"period": 1, "unique_batches": 1}),
    Broken(epoch_never_set, "same_order_each_epoch", "set_epoch_missing", {"period": 3}),
    Broken(same_noise_in_every_worker, "duplicate_augmentation", "worker_rng_copied", {"lag": 1}),
    Broken(normalised_again_and_again, "input_drift", "inplace_transform_on_cached_data", {}),
    Broken(empty_captions, "constant_input", "empty_condition", {"input": "caption", "modules": ["text"]}),
    Broken(shared_between_splits, "split_overlap", "shuffle_before_slice", {"count": 8}),
    Broken(slow_loader, "stall", "loader_wait", {}),
]
