"""The tutorial on a MusicGen: what it says to type can be typed, and each planted mistake is found where it says."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

import tracehooks
from tracehooks.surface.cli import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "debugging_musicgen.md"
SCRIPT = "examples/musicgen.py"


def example() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("musicgen_example", ROOT / SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def commands() -> dict[str, list[list[str]]]:
    """The page's commands as words, by section; those before the first are the healthy run's."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titled = zip(["healthy", *parts[1::2]], parts[::2], strict=True)
    return {
        title: [shlex.split(line) for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE)] for title, text in titled
    }


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """Exit status and output of every command of the page, typed in order in one directory."""
    import torch

    folder, script = tmp_path_factory.mktemp("musicgen"), example()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(words: list[str]) -> tuple[int, str]:
        if words[:2] == ["python", SCRIPT]:
            return script.main(words[2:]), ""
        assert words[0] == "tracehooks"
        done = CliRunner().invoke(main, words[1:], prog_name="tracehooks")
        return done.exit_code, done.stdout + done.stderr

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = {title: [run(words) for words in lines] for title, lines in commands().items()}
    torch.set_num_threads(threads)
    found["folder"] = [(0, str(folder))]
    return found


def test_the_page_names_sixteen_boundaries() -> None:
    """The table counts from 1 to 16, and every fault of the script has a section that plants it."""
    text = PAGE.read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == list(range(1, 17))
    planted = {
        words[words.index("--fault") + 1] for lines in commands().values() for words in lines if "--fault" in words
    }
    assert {"none", *planted} == set(example().FAULTS)


def test_a_healthy_run_and_its_boundaries(typed: dict[str, list[tuple[int, str]]]) -> None:
    """Nothing is found in it, and everything that the table names is in its trace."""
    (_, diagnosed, probes, masks) = typed["healthy"]
    assert diagnosed == (0, diagnosed[1])
    assert "nothing was found" in diagnosed[1]
    assert [line.split()[0] for line in probes[1].splitlines()[1:4]] == ["caption", "wave", "codes"]
    assert re.search(r"^caption_kept .*8$", masks[1], re.MULTILINE)
    run = tracehooks.open(Path(typed["folder"][0][1]) / "runs/healthy")
    names = set(run.scalars()["name"].to_pylist())
    rows = run.tensors(["phase", "slot", "shape", "count", "zeros"]).to_pylist()
    slots = {(row["phase"], row["slot"]) for row in rows}
    kept = {row["slot"]: row for row in run.masks().to_pylist()}
    for name in re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)+)`", PAGE.read_text(encoding="utf-8").split("## ")[0]):
        assert name in names, name
    assert {("probe", "codes"), ("probe", "targets.3"), ("probe", "logits.0"), ("backward", "logits.3")} <= slots
    assert {"caption_kept", "valid"} <= set(kept)
    scalars = run.scalars().to_pylist()
    assert {row["value"] for row in scalars if row["name"] in ("music/audio", "music/metadata")} == {8}
    assert {row["value"] for row in scalars if row["name"] == "gradient/carried"} == {0}
    gradient = next(row for row in rows if (row["phase"], row["slot"]) == ("backward", "logits.0"))
    valid = next(row for row in run.masks().to_pylist() if row["slot"] == "valid")
    assert gradient["zeros"] >= gradient["count"] * (1 - valid["kept"] / valid["count"]) > 0


def test_a_condition_that_is_never_there(typed: dict[str, list[tuple[int, str]]]) -> None:
    """The cross-attention has no gradient, and the mask that drops all captions is named as the first difference."""
    _, (status, diagnosed), (differs, diff) = typed["A condition that is never there"]
    assert (status, differs) == (1, 1)
    assert re.search(r"zero_gradient at decoder\.model\.decoder\.layers\.0\.encoder_attn", diagnosed)
    assert re.search(r"first divergence: step 0: \(root\) caption \(probe\)", diff)
    assert re.search(r"caption_kept: kept \d+ → 0", diff)


def test_a_padding_mask_that_is_the_wrong_way_round(typed: dict[str, list[tuple[int, str]]]) -> None:
    """The mask keeps nothing of whole samples, and what it drops is not what is silent, in this run alone; beside the
    healthy one the mask is named."""
    _, (found, diagnosed), (differs, diff), (status, table) = typed["A padding mask that is the wrong way round"]
    assert (found, differs, status) == (1, 1, 0)
    assert "the mask valid keeps nothing of" in diagnosed
    assert re.search(r"\(root\) valid: kept \d+ → \d+", diff)
    for line in table.splitlines()[1:]:
        _, padding, silent = map(float, line.split())
        assert abs(padding - (1 - silent)) < 0.03 < abs(padding - silent)


def test_a_codebook_with_another_samples_labels(typed: dict[str, list[tuple[int, str]]]) -> None:
    """That codebook is learned most slowly, and its targets are where the two runs part."""
    _, (status, table), (differs, diff) = typed["A codebook with another sample's labels"]
    assert (status, differs) == (0, 1)
    losses = {name: float(value) for name, value in (line.split() for line in table.splitlines()[1:])}
    assert losses.pop("cross_entropy/2") > max(losses.values()) + 0.2
    assert re.search(r"first divergence: step 0: \(root\) targets\.2 \(probe\)", diff)


def test_clipping_before_unscaling(typed: dict[str, list[tuple[int, str]]]) -> None:
    """It is found in the run alone, and the norm is that of clipping over the scale."""
    _, (status, diagnosed), (_, table) = typed["Clipping before unscaling"]
    assert status == 1
    assert "clip_on_scaled_grads" in diagnosed
    least, most = map(float, table.splitlines()[1].split())
    assert least == pytest.approx(1 / 1024, rel=1e-3)
    assert most == pytest.approx(1 / 1024, rel=1e-3)
