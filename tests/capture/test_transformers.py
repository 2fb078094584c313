"""Models of transformers, recorded: what people do with them is the same with attach, and every module is seen."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracehooks
from tests.models import (
    FAMILIES,
    Subject,
    assert_same,
    exact,
    hooks_of,
    photograph,
    random_states,
    seed_everything,
    tensors,
    words,
)

Record = Callable[..., Any]


def both_ways(name: str, record: Record, work: Callable[[Subject], object], **options: Any) -> Any:
    """What ``work`` returns for a model of a family, in evaluation mode, without and with attach; they must be equal.
    What was recorded."""
    results = []
    recorded = None
    for watched in (False, True):
        seed_everything(0)
        subject = FAMILIES[name]()
        subject.model.eval()
        done: list[object] = []
        if watched:
            recorded = record(subject.model, lambda trace, s=subject, d=done: d.append(work(s)), **options)
        else:
            done.append(work(subject))
        results.append((done, random_states(), hooks_of(subject.model)))
    assert results[0] == results[1]
    return recorded


def calls_in(model: nn.Module, work: Callable[[], object]) -> Counter[str]:
    """How often each module is called, counted by hooks of our own."""
    calls: Counter[str] = Counter()
    handles = [
        module.register_forward_hook(lambda module, args, output, path=path: calls.update([path] * holds(output)))
        for path, module in model.named_modules()
    ]
    work()
    for handle in handles:
        handle.remove()
    return calls


def holds(output: Any) -> bool:
    """Whether there is a tensor in an output."""
    return next(tensors(output), None) is not None


@pytest.mark.parametrize("name", FAMILIES)
def test_every_call_of_every_module_is_recorded(name: str, record: Record) -> None:
    """Each call of each module that returns a tensor has a row for every tensor in it, with values of the right shape,
    under the module's own path."""
    seed_everything(0)
    subject = FAMILIES[name]()
    subject.model.eval()
    batch = subject.inputs()

    def evaluate(trace: object = None) -> None:
        with torch.no_grad():
            subject.call(subject.model, batch)

    calls = calls_in(subject.model, evaluate)
    recorded = record(subject.model, evaluate)
    found = recorded.rows(phase="forward")
    seen = found.drop_duplicates(["module", "call"])["module"]
    assert Counter(seen) == calls
    output = subject.call(subject.model.eval(), batch)
    own = {name.lstrip("."): tuple(tensor.shape) for name, tensor in tensors(output)}
    root = found[found["module"] == ""]
    assert {slot.removeprefix("output.") for slot in root["slot"]} <= set(own)
    assert {"loss"} <= {slot.removeprefix("output.") for slot in root["slot"]}
    for slot, shape in zip(root["slot"], root["shape"], strict=True):
        assert tuple(shape) == own[slot.removeprefix("output.")]


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mamba", "rwkv", "t5", "bart"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_the_same_text_is_generated(name: str, sampling: bool, record: Record) -> None:
    """generate(), with and without a cache and a random generator, returns the same tokens; every token is a pass."""

    def work(subject: Subject) -> object:
        batch = words(4, labels=False, mask=name not in ("mamba", "rwkv"))()
        tokens = subject.model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=sampling)
        return exact(tokens), random_states()

    recorded = both_ways(name, record, work)
    assert not recorded.rows(phase="forward").empty
    assert recorded.rows(phase="backward").empty


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "vit"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing(name: str, reentrant: bool, tmp_path: Path) -> None:
    """With gradient checkpointing training is the same, and modules that ran again in backward are marked so."""

    def build() -> Subject:
        subject = FAMILIES[name]()
        subject.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            subject.model.enable_input_require_grads()
        return subject

    def attached(model: nn.Module) -> tracehooks.Trace:
        return tracehooks.attach(model, tmp_path / "run", quiet=True)

    assert_same(photograph(build, steps=2), photograph(build, attached, steps=2))
    run = tracehooks.open(tmp_path / "run")
    found = run.tensors(["phase", "recompute"]).to_pylist()
    assert {row["recompute"] for row in found if row["phase"] == "forward"} == {False, True}
    assert "recorder_error" not in run.events(["kind"])["kind"].to_pylist()


@pytest.mark.parametrize("name", ["bert", "llama", "whisper"])
def test_saved_files_are_the_same(name: str, record: Record, tmp_path: Path) -> None:
    """save_pretrained() while attached writes byte for byte what it writes without, and what is loaded is silent."""

    def work(subject: Subject) -> object:
        folder = tmp_path / f"saved{len(list(tmp_path.iterdir()))}"
        subject.model.save_pretrained(folder)
        again = type(subject.model).from_pretrained(folder)
        with torch.no_grad():
            output = again.eval()(**subject.inputs())
        assert hooks_of(again) == hooks_of(type(subject.model)(subject.model.config))
        files = sorted(folder.iterdir())
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}, exact(output.loss)

    assert both_ways(name, record, work).rows(phase="forward").empty


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "clip"])
def test_hidden_states_and_attentions_are_named(name: str, record: Record) -> None:
    """Outputs inside a ModelOutput have rows under the names of its fields, however deep, and are returned unchanged."""
    wanted = {"output_hidden_states": True, "output_attentions": True}

    def work(subject: Subject) -> object:
        subject.model.set_attn_implementation("eager")
        with torch.no_grad():
            output = subject.model(**subject.inputs(), **wanted)
        names.update(name for name, tensor in tensors(output))
        return type(output).__name__, list(output), {name: exact(tensor) for name, tensor in tensors(output)}

    names: set[str] = set()
    recorded = both_ways(name, record, work)
    slots = set(recorded.rows(phase="forward", module="")["slot"])
    assert slots == {f"output{name}" for name in names}
    assert any(slot.count(".") >= 2 for slot in slots)


def test_embeddings_resized_while_attached(record: Record) -> None:
    """resize_token_embeddings() replaces parameters and modules; the new ones are recorded from the next pass on."""

    def work(subject: Subject) -> object:
        model = subject.model.train()
        losses = []
        for size in (48, 56):
            model.resize_token_embeddings(size, mean_resizing=False)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(**subject.inputs()).loss
                loss.backward()
                optimizer.step()
                losses.append(exact(loss))
                del loss
        return losses, [exact(parameter) for parameter in model.parameters()]

    recorded = both_ways("gpt2", record, work)
    found = recorded.rows(phase="update", module="transformer.wte")
    assert [(row.step, tuple(row.shape)) for row in found.itertuples()] == [
        (0, (48, 16)), (1, (48, 16)), (2, (56, 16)), (3, (56, 16)),
    ]  # fmt: skip


def test_attention_kernels_are_the_same(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention implementation that was chosen is the one that runs, as often and with the same arguments."""
    seen: list[object] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        shapes = [tuple(value.shape) for value in args if isinstance(value, Tensor)]
        seen.append((shapes, sorted(kwargs), kwargs.get("is_causal")))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)

    def work(subject: Subject) -> object:
        seen.clear()
        with contextlib.nullcontext() if subject.model.training else torch.no_grad():
            subject.model(**subject.inputs())
        return list(seen)

    both_ways("llama", record, work)
    assert seen
