"""The samples: repeated, in the same order, drifting, out of range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.conditions import is_material
from tracehooks.analysis.rules.facts import LASTING, Batches, Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, rule
from tracehooks.analysis.rules.series import longest, period, running, trend

REPEATS = 3
DRIFT = 4.0
PIXEL = 16.0


@rule(
    sees="one and the same batch in step after step although the data loader has more",
    threshold=f"the same fingerprints in {REPEATS} or more batches running and in at least half of all; a warning "
    "where a loader of that batch size has more than one batch, else a note: training on all data at once, or on one "
    "batch on purpose, is fine",
    source="content hashes of the samples; next(iter(loader)) makes a new iterator at every call",
    needs=needs.SAMPLES,
    next_check="make the iterator once, outside of the loop",
    evidence=("period", "count", "unique_batches", "cause"),
    causes=("iterator_recreated",),
)
def repeated_batch(facts: Facts) -> Answers:
    batches = _main(facts)
    if batches is None:
        return
    same = batches.digests[1:] == batches.digests[:-1]
    start, length = longest(same)
    unique = len(np.unique(batches.digests))
    if length + 1 < REPEATS or length + 1 < 0.5 * len(batches.digests):
        yield Clear(
            f"{unique} different batches of {len(batches.digests)}, no more than {length + 1} equal ones running"
        )
        return
    loader = _loader_of(facts, int(batches.samples[start]))
    more = f", and the loader has {loader['samples']} samples" if loader else ""
    yield Found(
        "warning" if loader else "info",
        f"{length + 1} batches running are the same {int(batches.samples[start])} samples{more}",
        int(batches.steps[start + 1]),
        batches.name,
        {
            "period": 1,
            "count": length + 1,
            "unique_batches": unique,
            "cause": "iterator_recreated" if loader else None,
        },
    )


@rule(
    sees="epochs in which the batches come in the same order each time",
    threshold="every batch equals the one a period before, bit for bit, over more than one and a half periods of "
    "different batches, while there is a data loader; a warning where it is to shuffle, a note where it is not",
    source="torch.utils.data.distributed.DistributedSampler: without set_epoch every epoch has the same order",
    needs=needs.SAMPLES,
    next_check="call sampler.set_epoch(epoch) at the start of every epoch; do not seed the generator anew",
    evidence=("period", "count", "cause"),
    causes=("set_epoch_missing", "not_shuffled"),
)
def same_order_each_epoch(facts: Facts) -> Answers:
    batches = _main(facts)
    if batches is None:
        return
    every = period(batches.digests)
    loader = next((known for known in _loaders(facts) if known["shuffle"] is not None), None)
    if every is None or loader is None:
        unique = len(np.unique(batches.digests))
        again = "no period" if every is None else f"a period of {every}, without a data loader"
        yield Clear(f"{unique} different batches of {len(batches.digests)}, with {again}")
        return
    stuck = loader["shuffle"] and _epoch_stands_still(facts, loader)
    yield Found(
        "warning" if loader["shuffle"] else "info",
        f"the {every} batches of an epoch come in the same order every time"
        + (f", though {loader['sampler']} is to shuffle them" if loader["shuffle"] else ""),
        int(batches.steps[every]),
        batches.name,
        {"period": every, "count": len(batches.digests), "cause": "set_epoch_missing" if stuck else "not_shuffled"},
    )


@rule(
    sees="batches that come twice, a few batches apart: worker processes that draw the same random numbers",
    threshold="between 30 % and 95 % of the batches equal the one so many batches before, here and there: an order with a "
    "period, or a stream that begins anew and then stays so, is none; a warning where a loader has more than one worker, "
    "else a note. Bool inputs, those named like masks, positions or times, and those of which one content is in more than "
    "half of the batches are left out",
    source="NumPy's global generator is copied to every worker process of a data loader in the same state",
    needs=needs.SAMPLES + ", of four or more batches",
    next_check="seed each worker by its own number (worker_init_fn), or draw from torch's generator",
    evidence=("lag", "share", "cause"),
    causes=("worker_rng_copied",),
)
def duplicate_augmentation(facts: Facts) -> Answers:
    for batches in facts.batches:
        digests = batches.digests
        if len(digests) < 4 or period(digests) is not None or not _carries_samples(facts, batches):
            continue
        for lag in range(1, min(17, len(digests) // 2 + 1)):
            again = digests[lag:] == digests[:-lag]
            share = float(again.mean())
            anew = running(again) == again.sum()
            if 0.3 <= share <= 0.95 and len(np.unique(digests[lag:][again])) > 1 and not anew:
                workers = any((loader["workers"] or 0) > 1 for loader in _loaders(facts))
                text = f"{share:.0%} of the batches equal the one {lag} before: {batches.name}"
                evidence = {"lag": lag, "share": share, "cause": "worker_rng_copied" if workers else None}
                step = int(batches.steps[lag:][again][0])
                yield Found("warning" if workers else "info", text, step, batches.name, evidence)
                return
    if facts.batches and len(facts.batches[0].digests) >= 4:
        digests = facts.batches[0].digests
        yield Clear(f"{len(np.unique(digests))} different batches of {len(digests)}, no lag at which 30 % come again")


@rule(
    sees="an input whose values move away from where they began",
    threshold=f"the mean moves by more than {DRIFT:g} standard deviations of the first steps, or the magnitude changes "
    f"by more than {DRIFT:g}-fold, in rank order over the steps (Spearman 0.9)",
    source="a transform that works in place on a cached sample is applied once more in every epoch",
    needs=needs.INPUTS,
    next_check="load the same sample twice: are the values equal? Copy before an in-place transform",
    evidence=("growth", "apart", "cause"),
    causes=("inplace_transform_on_cached_data",),
)
def input_drift(facts: Facts) -> Answers:
    rows = facts.sql(
        "SELECT slot::VARCHAR AS slot, step, avg(mean) AS mean, avg(rms) AS rms, avg(std) AS std FROM tensors "
        "WHERE phase::VARCHAR = 'input' AND module::VARCHAR = '' AND contains(dtype::VARCHAR, 'float') "
        "AND rms IS NOT NULL GROUP BY ALL ORDER BY slot, step"
    )
    slots = np.array(rows["slot"].to_pylist(), dtype=object)
    for slot in dict.fromkeys(slots):
        mean, rms, std = (rows[name].to_numpy()[slots == slot] for name in ("mean", "rms", "std"))
        if len(mean) < 6:
            continue
        third = len(mean) // 3
        apart = abs(np.median(mean[-third:]) - np.median(mean[:third])) / max(float(np.median(std[:third])), 1e-30)
        growth = float(np.median(rms[-third:]) / max(float(np.median(rms[:third])), 1e-30))
        moved = apart > DRIFT and abs(trend(mean)) >= 0.9
        grown = not 1 / DRIFT <= growth <= DRIFT and abs(trend(rms)) >= 0.9
        if moved or grown:
            steps = rows["step"].to_numpy()[slots == slot]
            spans = f"mean from {mean[0]:.3g} to {mean[-1]:.3g}, magnitude from {rms[0]:.3g} to {rms[-1]:.3g}"
            text = f"{slot} moves away from its first values: {spans}"
            evidence = {"growth": growth, "apart": float(apart), "cause": "inplace_transform_on_cached_data"}
            yield Found("warning", text, int(steps[0]), slot, evidence)
        yield Clear(f"{slot} moved by {apart:.2g} standard deviations, its magnitude {growth:.3g}-fold")


def _main(facts: Facts) -> Batches | None:
    """The batches by their most varied input."""
    return facts.batches[0] if facts.batches else None


def _carries_samples(facts: Facts, batches: Batches) -> bool:
    """Whether an input is what a batch is made of, and neither a mask nor a constant, which come again for good reason."""
    kinds = {site.dtype for site in facts.of_phase("input") if site.slot == f"input.{batches.name}" and not site.module}
    commonest = np.unique(batches.digests, return_counts=True)[1].max()
    named = not is_material(batches.name) and "bool" not in kinds
    return named and 2 * commonest <= len(batches.digests) and facts.is_large(batches.name)


def _loaders(facts: Facts) -> list[Mapping[str, Any]]:
    """Each data loader as it was when last told of."""
    return list({event.details["number"]: event.details for event in facts.events("data_loader")}.values())


def _loader_of(facts: Facts, batch: int) -> Mapping[str, Any] | None:
    """A loader of that batch size with more than one batch."""
    return next(
        (known for known in _loaders(facts) if known["batch_size"] == batch and (known["samples"] or 0) > batch), None
    )


def _epoch_stands_still(facts: Facts, loader: Mapping[str, Any] | None) -> bool:
    epochs = {
        event.details["epoch"]
        for event in facts.events("data_loader")
        if loader and event.details["number"] == loader["number"]
    }
    return len(epochs) == 1


def _reaches_weights(facts: Facts) -> bool:
    """Whether what the first module with parameters gives has the size of pixels."""
    held = {name.rpartition(".")[0] for name in facts.described}
    first = next((site for site in facts.of_phase("forward") if site.module in held), None)
    return first is not None and (first.absmax or 0.0) > PIXEL


@rule(
    sees="pictures that are not normalised: numbers from 0 to 255 as floats",
    threshold="an input of the root of four dimensions with 1, 3 or 4 channels, nothing negative, and above "
    f"{PIXEL:g}, in every one of {LASTING} or more steps, and still of such a size behind the first module with "
    "parameters: a model that divides or normalises by itself is fine",
    source="LeCun et al., 1998, Efficient backprop: inputs of mean zero and equal variance; SageMaker's NotNormalizedImages",
    needs="pictures among the root's inputs, in three or more steps",
    next_check="divide by 255, subtract the mean and divide by the standard deviation of each channel",
    evidence=("input", "min", "max", "count", "cause"),
    causes=("pixels_as_they_are",),
)
def unnormalised_images(facts: Facts) -> Answers:
    for site in facts.of_phase("input"):
        if site.module or len(site.shape) != 4 or "float" not in site.dtype or site.rows < LASTING:
            continue
        if not {site.shape[1], site.shape[3]} & {1, 3, 4} or site.least is None or site.greatest is None:
            continue
        if site.least >= 0 and site.greatest > PIXEL and _reaches_weights(facts):
            text = (
                f"{site.slot} has numbers from {site.least:g} to {site.greatest:g}: pictures as they come from a file"
            )
            evidence = {"input": site.slot, "min": site.least, "max": site.greatest, "count": site.rows,
                        "cause": "pixels_as_they_are"}  # fmt: skip
            yield Found("warning", text, site.first_step, site.slot, evidence)
        yield Clear(f"{site.slot} has numbers from {site.least:.3g} to {site.greatest:.3g}")


RULES = (
    repeated_batch,
    same_order_each_epoch,
    duplicate_augmentation,
    input_drift,
    unnormalised_images,
)
