"""What is said of checkpoints: concerns, differences with their reasons, damage, the first bad one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tracehooks import checkpoint
from tracehooks.core.errors import InvalidOptionError


def saved(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A file by torch.save or safetensors, after the path's ending."""
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(dict(tensors), path)
    return path


def layers(count: int, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of a small stack, tied to a head."""
    generator = torch.Generator().manual_seed(0)
    state = {f"{prefix}embed.weight": torch.randn(16, 8, generator=generator)}
    for number in range(count):
        state[f"{prefix}blocks.{number}.fc.weight"] = torch.randn(8, 8, generator=generator)
        state[f"{prefix}blocks.{number}.fc.bias"] = torch.zeros(8)
    state[f"{prefix}head.weight"] = state[f"{prefix}embed.weight"]
    return state


def concerns(path: Path) -> list[tuple[str | None, str, str]]:
    """Severity, name and words of everything that looks wrong."""
    return [(c.severity, t.name, c.text) for t in checkpoint.inspect(path).suspects for c in t.concerns]


def test_healthy_checkpoints_raise_no_concern(tmp_path: Path) -> None:
    """A trained model with its optimizer: large step counters, masks, zero padding rows, empty tensors are fine."""
    model = nn.Sequential(nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(10)).square().sum().backward()
    optimizer.step()
    optimizer.state[model[1].weight]["step"] += 1e6
    mask = torch.full((4, 4), float("-inf")).triu(1)
    state = {**model.state_dict(), "mask": mask, "causal": torch.ones(4, 4).tril().bool(), "empty": torch.empty(0, 3),
             "zeros": torch.zeros(8, 8)}  # fmt: skip
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    assert checkpoint.inspect(tmp_path / "x.pt").healthy
    assert concerns(tmp_path / "x.pt") == []


def test_what_looks_wrong_comes_first(tmp_path: Path) -> None:
    """NaN, a negative variance, what overflows in half precision, an outlier among siblings."""
    state = layers(6)
    state["blocks.3.fc.weight"][0, :2] = float("nan")
    state["blocks.4.fc.weight"] *= 1000
    state["bn.running_var"] = torch.tensor([1.0, -0.5])
    state["bn2.running_var"] = torch.tensor([1.0, 4.97e5])
    assert concerns(saved(tmp_path / "x.pt", state)) == [
        ("error", "blocks.3.fc.weight", "2 NaN of 64 elements"),
        ("error", "bn.running_var", "a variance of -0.5"),
        ("warning", "blocks.4.fc.weight", concerns(tmp_path / "x.pt")[2][2]),
        ("warning", "bn2.running_var", "absmax 4.97e+05 overflows in float16, which ends at 65504"),
    ]
    assert "times the median of its 6 siblings" in concerns(tmp_path / "x.pt")[2][2]
    assert "  error: blocks.3.fc.weight: 2 NaN of 64 elements" in str(checkpoint.inspect(tmp_path / "x.pt"))


def test_measurements_are_those_of_the_tensor(tmp_path: Path) -> None:
    """Counts and statistics agree with torch's."""
    x = torch.randn(300, 7) * 3 + 1
    x[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    x[1] = 0
    seen = checkpoint.inspect(saved(tmp_path / "x.safetensors", {"x": x})).tensors[0].measured
    finite = x[torch.isfinite(x)].double()
    assert (seen.count, seen.nan, seen.posinf, seen.neginf, seen.zeros) == (2100, 1, 1, 1, 7)
    assert seen.rms == pytest.approx(float(finite.square().mean().sqrt()))
    assert (seen.mean, seen.absmax) == pytest.approx((float(finite.mean()), float(finite.abs().max())))


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_diff_ranks_what_moved(tmp_path: Path, ending: str) -> None:
    """Relative change and angle of each tensor, the largest first, and layers in that order; formats may be mixed."""
    before, after = layers(4), layers(4)
    after["blocks.1.fc.weight"] = before["blocks.1.fc.weight"] * 1.5
    after["blocks.2.fc.weight"] = before["blocks.2.fc.weight"] + 1e-3
    found = checkpoint.diff(saved(tmp_path / "a.pt", before), saved(tmp_path / f"b{ending}", after))
    moved = [tensor for tensor in found.tensors if not tensor.equal]
    assert [tensor.name for tensor in moved] == ["blocks.1.fc.weight", "blocks.2.fc.weight"]
    assert (moved[0].apart.relative, moved[0].apart.angle) == pytest.approx((0.5, 0.0), abs=1e-5)
    assert [layer.name for layer in found.layers[:2]] == ["blocks.1.fc", "blocks.2.fc"]
    assert not found.identical
    assert checkpoint.diff(tmp_path / "a.pt", tmp_path / "a.pt").identical


def test_an_optimizers_state_comes_last(tmp_path: Path) -> None:
    """Moments change more than any weight does; they are told after the weights and are no layers."""
    state = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(5.0)}}, "param_groups": []}
    before = {"model": {"w": torch.ones(3)}, "optimizer": state}
    after = {"model": {"w": torch.ones(3) * 1.1}, "optimizer": {"state": {0: {"exp_avg": torch.ones(3) * 9,
             "step": torch.tensor(50.0)}}, "param_groups": []}}  # fmt: skip
    torch.save(before, tmp_path / "a.pt")
    torch.save(after, tmp_path / "b.pt")
    found = checkpoint.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.tensors[0].name == "model.w"
    assert [layer.name for layer in found.layers] == ["model"]


def test_diff_sees_a_transposed_weight(tmp_path: Path) -> None:
    """A square matrix that was transposed is told as such, though its norm and its values are the same."""
    before, after = layers(2), layers(2)
    after["blocks.0.fc.weight"] = before["blocks.0.fc.weight"].t().contiguous()
    found = checkpoint.diff(saved(tmp_path / "a.pt", before), saved(tmp_path / "b.pt", after))
    assert [tensor.name for tensor in found.tensors if tensor.transposed] == ["blocks.0.fc.weight"]
    assert "b is a transposed" in str(found)


def test_diff_says_why_names_do_not_meet(tmp_path: Path) -> None:
    """A prefix is taken off and told; another depth and a tied weight are named; reshaped tensors have a reason."""
    plain = saved(tmp_path / "a.pt", layers(4))
    wrapped = checkpoint.diff(plain, saved(tmp_path / "b.pt", layers(4, "module.")))
    assert wrapped.prefixes == ("", "module.")
    assert wrapped.identical
    shallow = checkpoint.diff(plain, saved(tmp_path / "c.pt", layers(2)))
    assert shallow.missing == tuple(f"blocks.{n}.fc.{slot}" for n in (2, 3) for slot in ("weight", "bias"))
    assert shallow.reasons == {"missing": "depth: blocks.2 to blocks.3; the other side ends at blocks.1"}
    untied = layers(4)
    del untied["head.weight"]
    tied = checkpoint.diff(plain, saved(tmp_path / "d.pt", untied))
    assert tied.reasons == {"missing": "tied: head.weight is the same tensor as embed.weight, which both have"}
    larger = layers(4)
    larger["embed.weight"] = torch.randn(20, 8)
    reshaped = checkpoint.diff(plain, saved(tmp_path / "e.pt", larger)).reshaped
    assert reshaped["embed.weight"] == ((16, 8), (20, 8), "another number of rows (vocabulary, classes, positions)")


def test_verify(tmp_path: Path) -> None:
    """A flipped bit of an archive, a truncated file, a gap, a NaN: each is said; a whole file is fine."""
    whole = saved(tmp_path / "x.pt", layers(2))
    assert checkpoint.verify(whole).fine
    data = bytearray(whole.read_bytes())
    middle = data.index(layers(2)["blocks.0.fc.weight"].numpy().tobytes())
    data[middle + 5] ^= 1
    (tmp_path / "flipped.pt").write_bytes(data)
    assert "does not have its checksum" in str(checkpoint.verify(tmp_path / "flipped.pt"))
    (tmp_path / "short.pt").write_bytes(data[: len(data) // 2])
    assert checkpoint.verify(tmp_path / "short.pt").damage
    tensors = saved(tmp_path / "x.safetensors", layers(2))
    assert checkpoint.verify(tensors).fine
    (tmp_path / "long.safetensors").write_bytes(tensors.read_bytes() + b"more")
    assert "the file at" in str(checkpoint.verify(tmp_path / "long.safetensors"))
    bad = saved(tmp_path / "nan.pt", {**layers(2), "w": torch.tensor([float("nan"), 1.0])})
    assert checkpoint.verify(bad).unhealthy == ("w: 1 NaN of 2 elements",)


@pytest.mark.parametrize("bad", [0, 1, 7, 12, None])
def test_first_bad(tmp_path: Path, bad: int | None) -> None:
    """Of thirteen checkpoints the first with a NaN is found in at most five tests."""
    paths = []
    for number in range(13):
        state = layers(1)
        if bad is not None and number >= bad:
            state["blocks.0.fc.weight"][0, 0] = float("nan")
        paths.append(saved(tmp_path / f"{number:02d}.pt", state))
    found = checkpoint.first_bad(paths)
    assert found.path == (None if bad is None else str(paths[bad]))
    assert found.before == (str(paths[-1]) if bad is None else str(paths[bad - 1]) if bad else None)
    assert len(found.tested) <= 5


def test_first_bad_by_growth_and_by_a_test(tmp_path: Path) -> None:
    """Weights that explode are unhealthy while they are finite; a test of one's own decides instead where it is given."""
    paths = []
    for number in range(5):
        state = {name: tensor * (1000.0 if number > 2 else 1.0) for name, tensor in layers(1).items()}
        paths.append(saved(tmp_path / f"{number}.pt", state))
    assert checkpoint.first_bad(paths).path == str(paths[3])
    assert "times that of the first checkpoint" in checkpoint.first_bad(paths).why
    found = checkpoint.first_bad(paths, lambda path: "too late" if path.stem >= "1" else "")
    assert (found.path, found.why) == (str(paths[1]), "too late")
    with pytest.raises(InvalidOptionError, match="at least one checkpoint"):
        checkpoint.first_bad([])
    for name, wrong in {"paths": "a.pt", "test": 5}.items():
        given = {"paths": paths, name: wrong}
        with pytest.raises(InvalidOptionError, match=f"option {name}: got {wrong!r}, expected a"):
            checkpoint.first_bad(**given)
    with pytest.raises(InvalidOptionError, match="got 5, expected paths of checkpoints"):
        checkpoint.first_bad([5])
