"""Probes in eager models: what is recorded, where and how often. That they change nothing is shown in test_neutrality."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracehooks
from tests.capture.conftest import Record, Recorded
from tests.models import under_autocast
from tests.probed import Block, Probed

IDS = torch.tensor([[1, 2, 7, 0], [0, 0, 0, 0]])


def training(model: nn.Module, steps: int = 1, *, call: Any = lambda model, batch: model(*batch)) -> Any:
    """A loop with SGD over `IDS`."""

    def work(trace: tracehooks.Trace) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            call(model, (IDS,)).float().square().sum().backward()
            optimizer.step()

    return work


def seen(recorded: Recorded, phase: str, step: int = 0) -> list[tuple[str, str, int, bool]]:
    """(module, slot, call, recompute) of each row that a probe made, in order."""
    rows = recorded.rows(phase=phase, step=step)
    rows = rows[rows["slot"].isin(["hidden", "inside", "last", "ids", "wave"])]
    return list(zip(rows["module"], rows["slot"], rows["call"], rows["recompute"], strict=True))


FORWARD = [
    ("", "ids", 0, False),
    ("", "wave", 0, False),
    ("blocks.0", "hidden", 0, False),
    ("", "inside", 0, False),
    ("blocks.1", "hidden", 0, False),
    ("", "inside", 1, False),
    ("", "last", 0, False),
]
BACKWARD = [site for site in reversed(FORWARD) if site[1] not in ("ids", "wave")]


def test_a_probe_returns_the_very_object(record: Record) -> None:
    """With a trace attached or without, in a module or outside, each probe returns what it was given."""
    x, ids = torch.randn(3, 4, requires_grad=True), torch.arange(4)

    def check(_: object) -> None:
        assert tracehooks.probe(x, "x") is x
        assert tracehooks.mask(ids, "ids", keep=False, dim=0) is ids
        assert tracehooks.tokens(ids, "ids", vocab_size=3, pad=0) is ids
        assert tracehooks.audio(x, "x", sample_rate=8) is x

    check(None)
    record(nn.Linear(4, 4), check)


def test_the_example_of_the_page(record: Record) -> None:
    """The model that docs/probes.md shows is recorded as the page says."""
    page = (Path(__file__).parents[2] / "docs" / "probes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(code, names)
    model = names["Reader"]()
    recorded = record(model, lambda trace: model(torch.tensor([[3, 1, 0], [5, 5, 5]])).sum().backward())
    assert set(recorded.rows(phase="probe")["slot"]) == {"ids", "scores"}
    assert list(recorded.masks["slot"]) == ["keys"]
    assert recorded.values("tokens/ids/padding") == [(0, pytest.approx(1 / 6))]


def test_a_site_is_a_name_in_the_module_that_calls(record: Record) -> None:
    """Tensors and their gradients stand at the module in which the probe was called, in execution order, every step."""
    model = Probed()
    recorded = record(model, training(model, 2))
    for step in range(2):
        assert seen(recorded, "probe", step) == FORWARD
        assert sorted(seen(recorded, "backward", step)) == sorted(BACKWARD)
    assert set(recorded.rows(phase="probe", module="blocks.1")["type"]) == {"Block"}


def test_numbers_are_those_of_the_tensor_and_its_gradient(record: Record) -> None:
    """A probe on what a module returns has the same numbers as that module's own rows, forward and backward."""
    model = Block()
    recorded = record(model, lambda trace: model(torch.randn(3, 4)).sum().backward())
    for phase, own in (("probe", "forward"), ("backward", "backward")):
        (probed,), (returned,) = (
            recorded.rows(phase=phase, slot="hidden").to_dict("records"),
            recorded.rows(phase=own, module="layer").to_dict("records"),
        )
        assert probed["hash"] == returned["hash"]
        assert probed["rms"] == returned["rms"] > 0


def test_a_mask_shows_how_empty_it_is(record: Record) -> None:
    """Kept and empty rows of a bool mask and of one that is added to scores are the same, told apart by convention."""
    model = Probed()
    recorded = record(model, training(model))
    masks = recorded.masks.set_index("slot")
    assert list(masks["convention"]) == ["keep=True", "additive"]
    for slot in ("kept", "added"):
        row = masks.loc[slot]
        assert (row["module"], list(row["shape"])) == ("", [2, 4])
        assert (row["kept"], row["empty_rows"], row["first_empty"], row["max_kept"]) == (3, 1, 1, 3)


@pytest.mark.parametrize(
    ("asked", "kept", "empty", "shape"),
    [
        ({}, 4, 0, [2, 3]),
        ({"keep": False}, 2, 1, [2, 3]),
        ({"dim": 0}, 4, 0, [3, 2]),
        ({"dim": -2, "keep": False}, 2, 1, [3, 2]),
    ],
)
def test_what_true_means_and_along_which_dimension(
    record: Record, asked: dict[str, Any], kept: int, empty: int, shape: list[int]
) -> None:
    """``keep`` says whether True is used or dropped, ``dim`` along which dimension a row lies; shape ends with it."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    recorded = record(nn.Linear(1, 1), lambda trace: tracehooks.mask(mask, "m", **asked))
    (row,) = recorded.masks.to_dict("records")
    assert (row["kept"], row["empty_rows"], list(row["shape"])) == (kept, empty, shape)


def test_ids_and_signals_are_told_in_numbers(record: Record) -> None:
    """What tokens and audio say of a step is in its scalars, under the site; the range of ids is in their row."""
    model = Probed()
    model.eval()
    recorded = record(model, training(model))
    values = dict(zip(recorded.scalars["name"], recorded.scalars["value"], strict=True))
    assert {name: value for name, value in values.items() if name.startswith("tokens/")} == {
        "tokens/ids/distinct": 3,
        "tokens/ids/padding": 5 / 8,
        "tokens/ids/out_of_vocabulary": 1,
        "tokens/ids/longest_repeat": 0,
        "tokens/ids/distinct_4grams": 1,
    }
    (ids,) = recorded.rows(phase="probe", slot="ids").to_dict("records")
    assert (ids["min"], ids["max"]) == (0, 7)
    (wave,) = recorded.rows(phase="probe", slot="wave").to_dict("records")
    peaks = [values[f"audio/wave/peak/{channel}"] for channel in range(len(IDS))]
    assert max(peaks) == wave["absmax"] > min(peaks)
    assert len([name for name in values if name.startswith("audio/wave/")]) == 5 * len(peaks)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes_is_not_counted_twice(record: Record, reentrant: bool) -> None:
    """Rows of the first pass are there once, those of the recomputation are marked and at the same sites; there is one
    gradient each, and one row for each mask, and one scalar for each number of ids."""
    model = Probed(reentrant)
    recorded = record(model, training(model))
    assert [site for site in seen(recorded, "probe") if not site[3]] == FORWARD
    again = [(module, slot) for module, slot, _, recompute in seen(recorded, "probe") if recompute]
    assert Counter(again) <= Counter((module, slot) for module, slot, *_ in FORWARD)
    assert ("blocks.0", "hidden") in again
    gradients = Counter((module, slot) for module, slot, *_ in seen(recorded, "backward"))
    assert gradients == Counter((module, slot) for module, slot, *_ in BACKWARD)
    assert list(recorded.masks["slot"]) == ["kept", "added"]
    assert len(recorded.values("tokens/ids/distinct")) == 1


@pytest.mark.parametrize(
    ("options", "masks", "probes", "gradients"),
    [
        ({"record": ["masks"]}, 2, 7, 0),
        ({"record": ["outputs"]}, 0, 7, 0),
        ({"record": ["output_grads"]}, 0, 7, 5),
        ({"modules": "blocks.1", "record": ["outputs", "output_grads", "masks"]}, 2, 7, 5),
    ],
)
def test_what_is_asked_for_is_recorded(
    record: Record, options: dict[str, Any], masks: int, probes: int, gradients: int
) -> None:
    """``record`` decides on masks and gradients; the tensor of a probe is recorded whatever it and ``modules`` say, since
    somebody put the probe there."""
    model = Probed()
    recorded = record(model, training(model), **options)
    assert len(recorded.masks) == masks
    assert len(seen(recorded, "probe")) == probes
    assert len(seen(recorded, "backward")) == gradients


def test_steps_that_record_no_tensors(record: Record) -> None:
    """Every second step is recorded; in the others a probe is watched for what is not finite, and says no numbers."""
    model = Probed()
    recorded = record(model, training(model, 4), every=2)
    assert sorted(set(recorded.rows(phase="probe")["step"])) == [0, 2]
    assert [step for step, _ in recorded.values("tokens/ids/distinct")] == [0, 2]
    assert sorted(set(recorded.masks["step"])) == [0, 2]


@pytest.mark.parametrize("every", [1, 100])
def test_a_value_that_is_not_finite_is_found_at_its_probe(record: Record, every: int) -> None:
    """What only a probe sees, because no module returns it, is the first non-finite value of the run."""

    class Logs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nan_to_num(tracehooks.probe((x - 1).log(), "log"), 0.0)

    model = nn.Sequential(nn.Linear(1, 1), Logs())
    with torch.no_grad():
        model[0].weight.fill_(0)
        model[0].bias.fill_(2)

    def work(trace: tracehooks.Trace) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 4.0)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).add(model[0].bias * 0.5).sum().backward()
            optimizer.step()

    first = record(model, work, every=every, on_nonfinite="record").run.first_nonfinite
    assert first is not None
    assert (first.step, first.phase, first.module, first.value) == (1, "forward", "1", "nan")


def test_autocast_and_evaluation(record: Record) -> None:
    """Under autocast a probe shows the lower precision; without gradients it has no gradient row, and no step of its
    own."""
    model = Probed()

    def work(trace: tracehooks.Trace) -> None:
        training(model, call=under_autocast)(trace)
        model.eval()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                model(IDS)

    recorded = record(model, work)
    assert set(recorded.rows(phase="probe", slot="hidden", micro=0)["dtype"]) == {"bfloat16"}
    assert sorted(set(recorded.rows(phase="probe")["micro"])) == [0, 1, 2]
    assert set(recorded.rows(phase="probe")["step"]) == {0}
    assert len(seen(recorded, "backward")) == len(BACKWARD)


def test_several_traces_see_what_is_theirs(record: Record) -> None:
    """A probe is recorded by every trace whose model is being called, at its path in that model, and by no other."""
    model, other = Probed(), Probed()
    runs: dict[str, Recorded] = {}

    def outer(trace: tracehooks.Trace) -> None:
        runs["block"] = record(model.blocks[0], training(model))
        runs["other"] = record(other, training(model))

    runs["model"] = record(model, outer)
    assert seen(runs["model"], "probe") == FORWARD
    assert seen(runs["block"], "probe") == [("", "hidden", 0, False)]
    assert seen(runs["other"], "probe") == []


def test_a_probe_outside_every_model_stands_at_the_root(record: Record) -> None:
    """In a training loop, between the model and the loss, a probe is recorded with its gradient, at the root."""
    model = nn.Linear(4, 4)

    def work(trace: tracehooks.Trace) -> None:
        logits = tracehooks.probe(model(torch.randn(2, 4)) * 2, "logits")
        logits.sum().backward()

    recorded = record(model, work)
    for phase in ("probe", "backward"):
        (row,) = recorded.rows(phase=phase, slot="logits").to_dict("records")
        assert (row["module"], row["step"]) == ("", 0)


def test_methods_without_the_root(record: Record) -> None:
    """Where methods call submodules and the root is never called, a probe in one of them begins the step that is due."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def encode(self, x: Tensor) -> Tensor:
            return self.block(x)

    model = Encoder()

    def work(trace: tracehooks.Trace) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model.encode(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    recorded = record(model, work)
    assert [(row.step, row.micro) for row in recorded.rows(phase="probe").itertuples()] == [(0, 0), (1, 0), (2, 0)]
    assert set(recorded.rows(phase="probe")["module"]) == {"block"}


def test_threads(record: Record) -> None:
    """Calls in several threads each find their own module, and none is lost."""
    model = nn.ModuleList([Block() for _ in range(4)])

    def work(trace: tracehooks.Trace) -> None:
        threads = [
            threading.Thread(target=lambda block=block: [block(torch.randn(2, 4)) for _ in range(20)])
            for block in model
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = Counter(record(model, work).rows(phase="probe")["module"])
    assert found == {str(i): 20 for i in range(4)}


def test_transforms_of_functions(record: Record) -> None:
    """Under vmap and grad each probe sees all samples together, and the transform gives what it would."""
    model = nn.Sequential(Block())
    x = torch.randn(5, 4)
    expected = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x)

    def work(trace: tracehooks.Trace) -> None:
        assert torch.equal(torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x), expected)

    (row,) = record(model, work).rows(phase="probe").to_dict("records")
    assert list(row["shape"]) == [5, 4]

    def shown(row: Tensor) -> Tensor:
        tracehooks.tokens(row.abs().long(), "ids")
        tracehooks.audio(row, "wave")
        return tracehooks.mask(row[:, None] > row, "m", dim=0).sum()

    recorded = record(model, lambda trace: torch.func.vmap(shown)(x))
    assert [list(shape) for shape in recorded.masks["shape"]] == [[5, 4, 4]]
    assert len(recorded.values("tokens/ids/distinct")) == len(recorded.values("audio/wave/peak/0")) == 1


def test_a_module_that_came_later(record: Record) -> None:
    """A probe in a module that was added after attach stands at its path from the next pass on."""
    model = nn.Sequential(nn.Linear(4, 4))

    def work(trace: tracehooks.Trace) -> None:
        model.append(Block())
        model(torch.randn(2, 4)).sum().backward()

    assert set(record(model, work).rows(phase="probe")["module"]) == {"1"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: tracehooks.probe([1.0], "list"), "probe(…, 'list'): got 'list', expected a tensor"),
        (
            lambda: tracehooks.mask(torch.ones(2, 2), "m", dim=2),
            "dim of mask(…, 'm'): got 2, expected a dimension of (2, 2)",
        ),
        (lambda: tracehooks.tokens(torch.ones(3), "ids"), "expected integer ids"),
    ],
)
def test_bad_input_is_said_and_breaks_nothing(record: Record, wrong: Any, said: str) -> None:
    """A probe that was called wrongly is said as an event that names it; the run goes on."""
    recorded = record(nn.Linear(1, 1), lambda trace: wrong(), errors=True)
    (message,) = recorded.events[recorded.events["kind"] == "recorder_error"]["message"]
    assert said in message


def test_empty_tensors_and_single_numbers(record: Record) -> None:
    """A tensor without elements, or without dimensions, is seen by every probe; a mask needs a dimension."""

    def work(trace: tracehooks.Trace) -> None:
        for x in (torch.zeros(0, 3), torch.tensor(2.0)):
            tracehooks.probe(x, "x")
            tracehooks.audio(x, "x")
            tracehooks.tokens(x.long(), "x", vocab_size=1, pad=0)
        tracehooks.mask(torch.zeros(0, 3), "x")

    recorded = record(nn.Linear(1, 1), work)
    assert list(recorded.rows(phase="probe")["count"]) == [0, 0, 0, 1, 1, 1]
    assert list(recorded.masks["count"]) == [0]
    assert math.isfinite(recorded.values("audio/x/rms_dbfs/0")[0][1])


def test_distributed_data_parallel(record: Record, tmp_path: Any) -> None:
    """In DistributedDataParallel, whether the trace was attached to it or to the model inside, sites are the model's."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Probed())
        for watched in (wrapped, wrapped.module):
            recorded = record(watched, training(wrapped))
            assert seen(recorded, "probe") == FORWARD
            assert sorted(seen(recorded, "backward")) == sorted(BACKWARD)
    finally:
        torch.distributed.destroy_process_group()


def test_in_a_model_of_transformers(record: Record) -> None:
    """Around tensors inside a model that nobody wrote for it, by way of its own attention function, a probe stands at the
    attention module of each layer."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, tracehooks.probe(query, "query"), *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("probed", attention)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        attn_implementation="probed",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 32, (2, 6))
    recorded = record(model, lambda trace: model(ids, labels=ids).loss.backward())
    for phase in ("probe", "backward"):
        found = recorded.rows(phase=phase, slot="query").sort_values("module")
        assert list(found["module"]) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        assert [list(shape) for shape in found["shape"]] == [[2, 2, 6, 8]] * 2
