"""What is recorded of outputs, whatever a module returns and however it is called."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import tracehooks


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: object = None


class Returns(nn.Module):
    """One linear layer whose output is wrapped by a function."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.layer, self.wrap = nn.Linear(3, 3), wrap

    def forward(self, x):
        return self.wrap(self.layer(x))


def recursive(h):
    loop = [h]
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("wrap", "slots"),
    [
        (lambda h: h, ["output"]),
        (lambda h: (h, None, h * 2), ["output.0", "output.2"]),
        (lambda h: {"a": h, "n": 3, "s": "text"}, ["output.a"]),
        (lambda h: {"z": [h, (h * 2, {"y": h * 3})]}, ["output.z.0", "output.z.1.0", "output.z.1.1.y"]),
        (lambda h: Pair(h, h * 2), ["output.left", "output.right"]),
        (lambda h: Result(h, {"k": h * 2}), ["output.logits", "output.extra.k"]),
        (lambda h: collections.OrderedDict(b=h, a=h * 2), ["output.b", "output.a"]),
        (lambda h: "text", []),
        (lambda h: None, []),
        (lambda h: (t for t in (h,)), []),
        (lambda h: {h.ndim}, []),
        (lambda h: Result, []),
    ],
)
def test_nested_outputs(record, wrap, slots) -> None:
    """Every tensor in tuples, lists, mappings, NamedTuples and dataclasses has a row; everything else is ignored."""
    model = Returns(wrap)
    recorded = record(model, lambda trace: model(torch.ones(2, 3)))
    assert [slot for module, slot, _ in recorded.sites() if module == ""] == slots


def test_model_output_of_transformers(record) -> None:
    """Fields of a ModelOutput are named; those inside its tuples by index."""
    from transformers.modeling_outputs import BaseModelOutput

    model = Returns(lambda h: BaseModelOutput(last_hidden_state=h, hidden_states=(h, h * 2)))
    recorded = record(model, lambda trace: model(torch.ones(2, 3)))
    slots = [slot for module, slot, _ in recorded.sites() if module == ""]
    assert slots == ["output.last_hidden_state", "output.hidden_states.0", "output.hidden_states.1"]


def test_a_container_that_holds_itself_ends(record) -> None:
    """A list that contains itself is followed to a fixed depth and no further."""
    model = Returns(recursive)
    recorded = record(model, lambda trace: model(torch.ones(2, 3)))
    assert ("", "output.0", 0) in recorded.sites()


def test_generators_are_not_consumed(record) -> None:
    """What a module returns can still be iterated by the caller."""
    model = Returns(lambda h: (t for t in (h, h)))
    seen = []
    record(model, lambda trace: seen.extend(model(torch.ones(2, 3))))
    assert len(seen) == 2


def test_repeated_and_tied_modules(record) -> None:
    """A module called several times in a pass, under one name or two, is told apart by call."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x).tanh())

    model = Twice()
    recorded = record(model, lambda trace: [model(torch.ones(2, 3)) for _ in range(2)])
    assert recorded.sites() == [("a", "output", 0), ("a", "output", 1), ("", "output", 0)] * 2
    assert recorded.run.info["model"]["parameter_count"] == 12


def test_inplace_module_after_a_hooked_one(record, train) -> None:
    """Statistics are taken before ReLU(inplace) overwrites them; gradients equal the out-of-place model's."""
    hashes = []
    for inplace in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace), nn.Linear(8, 2))
        recorded = record(model, train(model, torch.randn(4, 3, generator=torch.Generator().manual_seed(1))))
        forward = recorded.rows(phase="forward")
        assert (forward[forward["module"] == "0"]["min"] < 0).all()
        assert (forward[forward["module"] == "1"]["min"] == 0).all()
        hashes.append(recorded.rows(phase="backward").set_index(["module", "slot"])["hash"].to_dict())
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(record, train, reentrant) -> None:
    """Recomputed outputs are marked; every output has its gradient once; an early stop leaves the counting right."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(3, 8), nn.Linear(8, 2)
            self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

        def forward(self, x):
            return self.c(checkpoint.checkpoint(self.body, self.a(x), use_reentrant=reentrant))

    model = Checkpointed()
    recorded = record(model, train(model, torch.randn(4, 3), steps=2))
    for step in (0, 1):
        first = [site[0] for site in recorded.sites(step=step)]
        rows = recorded.rows(phase="forward", step=step)
        assert [m for m, again in zip(first, rows["recompute"], strict=True) if not again] == [
            *("a", "body.0", "body.1", "body.2", "body", "c", "")
        ]
        assert {"body.0", "body.1"} <= {m for m, again in zip(first, rows["recompute"], strict=True) if again}
        gradients = recorded.rows(phase="backward", step=step)
        assert sorted(gradients["module"]) == sorted(["a", "body.0", "body.1", "body.2", "body", "c", ""])
        assert (gradients[gradients["module"].str.startswith("body")]["recompute"] == reentrant).all()
    rows = recorded.rows(phase="forward", module="body.0")
    assert rows["hash"].nunique() == 2  # the same twice in each of two steps


def test_modules_of_every_kind_are_hooked(record) -> None:
    """Modules without parameters have rows; lists of modules, which are never called, have none."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Sequential(nn.Tanh()))
    recorded = record(model, lambda trace: model(torch.ones(2, 3)))
    assert [module for module, _, _ in recorded.sites()] == ["0", "1", "2.0", "2", ""]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool,
        torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    ],
)  # fmt: skip
def test_dtypes(record, dtype) -> None:
    """A row of every dtype has its dtype, its shape and its numbers; complex tensors are measured by component."""
    model = Returns(lambda h: torch.tensor([1.0, 2.0, 4.0, 1.0]).to(dtype))
    (row,) = record(model, lambda trace: model(torch.ones(2, 3))).rows(phase="forward", module="").to_dict("records")
    assert row["dtype"] == str(dtype).removeprefix("torch.")
    assert list(row["shape"]) == [4]
    assert row["count"] == (8 if dtype.is_complex else 4)
    assert row["max"] == (1 if dtype == torch.bool else 4)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:torch.quantize:UserWarning")
def test_odd_tensors(record) -> None:
    """Empty and 0-dim tensors have rows; meta tensors have none; sparse, quantised and nested ones have their values."""

    def wrap(h):
        return {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2.0),
            "meta": torch.empty(3, device="meta"),
            "sparse": torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 1.0, 5.0], (4,)),
            "csr": torch.eye(3).to_sparse_csr(),
            "quantised": torch.quantize_per_tensor(torch.tensor([0.0, 1.0]), 0.5, 0, torch.qint8),
            "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "expanded": torch.ones(1).expand(5),
        }

    model = Returns(wrap)
    recorded = record(model, lambda trace: model(torch.ones(2, 3)))
    rows = recorded.rows(phase="forward", module="").set_index("slot")
    assert "output.meta" not in rows.index
    counts = {slot.removeprefix("output."): count for slot, count in rows["count"].items()}
    assert counts == {
        "empty": 0, "scalar": 1, "sparse": 2, "csr": 3, "quantised": 2, "jagged": 5, "expanded": 5,
    }  # fmt: skip
    assert rows.loc["output.sparse", "absmax"] == 5
    assert rows.loc["output.empty", ["min", "max", "mean", "rms"]].isna().all()


def test_inference_no_grad_and_vmap(record) -> None:
    """Inference mode, no_grad and functorch transforms give rows of all samples together, and no error."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(5, 3)

    def call(one):
        return torch.func.functional_call(model, parameters, (one,))

    def work(trace):
        with trace.step_scope():
            with torch.inference_mode():
                model(x)
            torch.func.vmap(call)(x)
            torch.func.grad(lambda one: call(one).sum())(x[0])
            torch.func.vmap(torch.func.grad(lambda one: call(one).sum()))(x)
            torch.func.jvp(call, (x[0],), (x[1],))

    rows = record(model, work).rows(phase="forward", module="0")
    assert list(rows["count"]) == [20, 20, 4, 20, 4]
    assert rows["hash"].iloc[0] == rows["hash"].iloc[1]


def test_parametrized_modules(record, train) -> None:
    """The parametrisation's output, the effective weight, has a row, and so have the parameters behind it."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    recorded = record(model, train(model, torch.randn(2, 3)))
    assert "0.parametrizations.weight" in {module for module, _, _ in recorded.sites()}
    assert "original0" in set(recorded.rows(phase="parameter")["slot"])


def test_replaced_parameters_and_modules_are_noticed(record) -> None:
    """A parameter replaced and a module added after attach are recorded from the next pass on, and said as events."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def work(trace):
        for i in range(3):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            if i == 0:
                model[0].weight = nn.Parameter(torch.zeros(3, 3))
            if i == 1:
                model.append(nn.Linear(3, 2))

    recorded = record(model, work)
    assert recorded.kinds().count("parameters_replaced") == 2
    assert "modules_changed" in recorded.kinds()
    assert recorded.rows(phase="parameter", step=1, module="0", slot="weight")["absmax"].item() == 0
    assert "2" in {module for module, _, _ in recorded.sites(step=2)}
    assert not any(len(module._forward_hooks) for module in model.modules())


def test_scripted_modules_are_opaque(record) -> None:
    """A module that takes no hooks is said once; its parents are recorded."""

    class Inner(nn.Module):
        def forward(self, x):
            return x * 2

    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(Inner()))
    recorded = record(model, lambda trace: model(torch.ones(2, 3)))
    assert [module for module, _, _ in recorded.sites()] == ["0", ""]
    event = recorded.events[recorded.events["kind"] == "module_not_hooked"].iloc[0]
    assert event["module"] == "1"
    assert "ScriptModule" in event["message"]


def test_fused_path_of_transformer_encoder_stays(record) -> None:
    """A TransformerEncoderLayer in eval mode takes the same fused path as without a trace, and has its row."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = nn.Sequential(nn.Linear(8, 8), layer)
    x = torch.randn(2, 5, 8)

    def fused_calls():
        with torch.no_grad(), torch.profiler.profile() as profile:
            model(x)
        return [e.key for e in profile.key_averages() if e.key == "aten::_transformer_encoder_layer_fwd"]

    bare = fused_calls()
    seen = []
    recorded = record(model, lambda trace: seen.append(fused_calls()))
    assert seen == [bare] == [["aten::_transformer_encoder_layer_fwd"]]
    assert [module for module, _, _ in recorded.sites()] == ["0", "1", ""]
    model.train()
    recorded = record(model, lambda trace: model(x))
    assert "1.self_attn" in {module for module, _, _ in recorded.sites()}


def test_module_patterns(record, tmp_path) -> None:
    """modules and exclude take globs and predicates; one that matches nothing names the nearest and creates nothing."""
    model = nn.Sequential(collections.OrderedDict(encoder=nn.Linear(3, 3), decoder=nn.Linear(3, 3)))

    def work(trace):
        return model(torch.ones(2, 3))

    assert [m for m, _, _ in record(model, work, modules="enc*").sites()] == ["encoder"]
    assert [m for m, _, _ in record(model, work, exclude=["enc*", ""]).sites()] == ["decoder"]
    assert [m for m, _, _ in record(model, work, modules=lambda path: path == "decoder").sites()] == ["decoder"]
    with pytest.raises(tracehooks.TracehooksError, match="unknown module pattern 'encodr'; did you mean 'encoder'"):
        tracehooks.attach(model, tmp_path / "never", modules="encodr")
    assert not (tmp_path / "never").exists()
    assert not model._forward_pre_hooks


def test_inputs_on_request(record) -> None:
    """Inputs of modules are recorded before the module can change them, except those that are another's output."""

    class Adds(nn.Module):
        def forward(self, x, other):
            x += other
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.adds, self.last = nn.Linear(3, 3), Adds(), nn.Linear(3, 2)

        def forward(self, x, bias):
            return self.last(self.adds(self.first(x), other=bias * 2))

    model = Model()
    recorded = record(model, lambda trace: model(torch.ones(2, 3), bias=torch.ones(3)), record=["outputs", "inputs"])
    assert recorded.sites("input") == [
        ("", "input.x", 0),
        ("", "input.bias", 0),
        ("first", "input.input", 0),
        ("adds", "input.other", 0),
    ]


def test_compiled_model_is_still_compiled(record) -> None:
    """An attached model compiles in one graph; its root's passes, outputs, parameters and gradients are recorded."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def work(trace):
        for _ in range(2):
            compiled(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    recorded = record(compiled, work)
    assert sorted(set(recorded.tensors["step"])) == [0, 1]
    assert ("", "output", 0) in recorded.sites()
    assert set(recorded.rows(phase="gradient", step=1)["module"]) == {"0", "2"}
    torch._dynamo.reset()
