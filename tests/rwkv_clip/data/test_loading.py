"""Which pairs make which step, and loading them with workers."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from rwkv_clip import InputError
from rwkv_clip.data import open_pairs
from rwkv_clip.data.loading import Plan, in_order, load_steps
from rwkv_clip.data.pairs import Sample

SIZES = st.integers(1, 5)


@given(pairs=st.integers(20, 200), batch=st.integers(1, 9), micro=SIZES, world=SIZES, epoch=st.integers(0, 3))
def test_an_epoch_deals_each_pair_at_most_once(pairs, batch, micro, world, epoch):
    """No pair is dealt twice in an epoch, over all ranks; fewer than one step's are left out."""
    if pairs < micro * world:
        return
    plans = [Plan(pairs, batch, 1, micro, rank, world) for rank in range(world)]
    dealt = torch.cat([plan.indices(epoch).flatten() for plan in plans]).tolist()
    assert len(dealt) == len(set(dealt)) == plans[0].steps * plans[0].pairs_a_step
    assert 0 <= pairs - len(dealt) < plans[0].pairs_a_step
    assert set(dealt) <= set(range(pairs))


@given(world=st.sampled_from([1, 2, 4]), micro=st.sampled_from([1, 2]), start=st.integers(0, 4))
def test_a_steps_pairs_do_not_depend_on_who_makes_it(world, micro, start):
    """With equal pairs a step, ranks and micro-batches share out the same pairs, from any step on."""
    alone = Plan(50, 8, seed=3).indices(1, start).view(-1, 8)
    plans = [Plan(50, 8 // world // micro, 3, micro, rank, world) for rank in range(world)]
    shared = torch.cat([plan.indices(1, start).view(len(alone), -1) for plan in plans], dim=1)
    assert torch.equal(shared.sort(dim=1).values, alone.sort(dim=1).values)


def test_epochs_and_seeds_have_orders_of_their_own():
    """The order differs between epochs and seeds, and is the same for the same of both."""
    orders = {tuple(Plan(40, 4, seed).indices(epoch).flatten().tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert torch.equal(Plan(40, 4, 1).indices(1), Plan(40, 4, 1).indices(1))


def test_too_few_pairs_are_named():
    """Fewer pairs than ranks and micro-batches are an error; fewer than a batch make a smaller one."""
    assert Plan(5, 64).batch == 5
    with pytest.raises(InputError, match="3 pairs are too few for 2 processes with 2 micro-batches"):
        Plan(3, 64, 0, 2, 0, 2)


@pytest.fixture
def pairs(pictures, small_config):
    return open_pairs(pictures / "pairs.csv", dataclasses.replace(small_config, vocab_size=49408), seed=2)


def test_workers_change_nothing(pairs):
    """With 0, 1 and 2 workers, and from the middle of an epoch, every batch is the same bit for bit."""
    plan = Plan(len(pairs), 4, 7, 2)
    alone = list(load_steps(pairs, plan, 1))
    for workers in (1, 2):
        for step, other in zip(alone[1:], load_steps(pairs, plan, 1, start=1, workers=workers), strict=True):
            for batch, same in zip(step, other, strict=True):
                assert torch.equal(batch.image, same.image)
                assert torch.equal(batch.tokens, same.tokens)


class _Drawn(Dataset):
    """Samples that show what a careless augmentation would draw from the global generators, and in which process."""

    problems = ()

    def __init__(self, count=8):
        self.count = count

    def set_epoch(self, epoch):
        pass

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return Sample(torch.rand(1), torch.tensor([os.getpid()]), 0, index)


@given(count=st.integers(1, 20), size=SIZES, world=SIZES)
def test_ranks_share_out_all_samples(count, size, world):
    """Put together, the ranks' whole samples are all samples once, in order; all ranks have as many batches, as large."""
    pairs = _Drawn(count)
    shares = [list(in_order(pairs, size, rank=rank, world=world)) for rank in range(world)]
    seen = [i for share in shares for batch in share for i in batch.pair[batch.whole].tolist()]
    assert seen == list(range(count))
    assert len({tuple(len(batch.pair) for batch in share) for share in shares}) == 1
    assert sum(len(batch.pair) for batch in shares[0]) == -(-count // world)


def test_no_two_workers_draw_the_same_numbers():
    """Also what is drawn from torch's global generator differs between workers, ranks and epochs."""
    drawn, processes = [], set()
    for epoch, rank in ((0, 0), (1, 0), (0, 1)):
        for (batch,) in load_steps(_Drawn(), Plan(8, 2, 0, 1, rank, 2), epoch, workers=2):
            drawn += batch.image.flatten().tolist()
            processes |= set(batch.tokens.flatten().tolist())
    assert len(processes) == 6
    assert len(set(drawn)) == len(drawn)


def test_loading_draws_from_no_global_generator(pairs):
    """Starting to load, with or without workers, leaves torch's global generator as it was."""
    before = torch.get_rng_state()
    for workers in (0, 1):
        next(load_steps(pairs, Plan(len(pairs), 4), 0, workers=workers))
        next(in_order(pairs, 4, workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_broken_samples_are_marked(tmp_path, pictures, small_config):
    """A batch says which of its samples stand in for broken ones, and where those are."""
    (tmp_path / "pairs.csv").write_text(f"image,caption\nno.png,a\n{pictures / '001.png'},b\n")
    broken = open_pairs(tmp_path / "pairs.csv", dataclasses.replace(small_config, vocab_size=49408), "held-out")
    (batch,) = in_order(broken, 4)
    assert batch.whole.tolist() == [False, True]
    assert len(batch.broken) == 1
    assert "row 1, image no.png" in batch.broken[0]
