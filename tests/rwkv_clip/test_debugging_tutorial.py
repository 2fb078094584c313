"""The debugging tutorial: what it says to type can be typed, and leads where it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import rwkv_clip
from rwkv_clip import ModelConfig, train, verify
from rwkv_clip.training.flags import parse_args
from tracehooks.surface.cli import main as tracehooks

ROOT = Path(rwkv_clip.__file__).parents[1]
PAGE = ROOT / "docs" / "debugging_rwkv_clip.md"
TITLES = [
    "Launch with TensorBoard on",
    "Watch the console",
    "Validate the curves",
    "Inspect the checkpoint before the anomaly",
    "Analyse the weights over epochs",
    "Correct and resume",
    "Iterate",
]


def commands() -> list[list[str]]:
    """The page's commands as words, its one variable filled in."""
    lines = re.findall(r"^\$ (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    name, value = lines.pop(0).split("=", 1)
    return [shlex.split(line.replace(f"${name}", value.strip('"'))) for line in lines]


def test_the_page_has_the_seven_steps():
    """The seven steps are there, in order."""
    assert re.findall(r"^## \d\. (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == TITLES


def test_every_command_is_one_that_exists():
    """Training commands parse and describe a model, and the others are verbs that exist."""
    seen = set()
    for words in commands():
        if words[:3] == ["python", "-m", "rwkv_clip.train"]:
            ModelConfig.from_namespace(parse_args(words[3:]))
            seen.add("train")
        elif words[0] == "tracehooks":
            assert CliRunner().invoke(tracehooks, [words[1], "--help"]).exit_code == 0, words
            seen.add(words[1])
        else:
            assert words[:3] == ["python", "-m", "rwkv_clip.verify"]
            seen.add("verify")
    assert seen == {"train", "verify", "first", "query"}


def typed(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command; its exit status and what it printed."""
    if words[0] == "tracehooks":
        done = CliRunner().invoke(tracehooks, words[1:], prog_name="tracehooks")
        return done.exit_code, done.stdout
    status = {"rwkv_clip.train": train.main, "rwkv_clip.verify": verify.main}[words[2]](words[3:])
    return status, capsys.readouterr().out


def last_loss(printed: str) -> str:
    return re.findall(r"loss:(\S+)", printed)[-1]


def accuracies(printed: str) -> list[float]:
    return [float(share) for share in re.findall(r"zero-shot-accuracy:([\d.]+)%", printed)]


@pytest.mark.slow
def test_the_run_goes_nan_and_is_mended(tmp_path, monkeypatch, capsys):
    """Typed one after another, the commands find the overflow in float16, its cause, and a run without it."""
    monkeypatch.chdir(tmp_path)
    results = [typed(words, capsys) for words in commands()]
    statuses, printed = zip(*results, strict=True)
    broken, losses, rates, before, first, weights, keys, other_precision, other_rate, mended, longer = printed
    assert statuses == (0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0)

    assert last_loss(broken) == "nan"
    skipped = [int(count) for count in re.findall(r"skipped:(\d+)", broken)]
    assert skipped[0] == 0
    assert skipped[-1] > 20
    assert accuracies(broken)[1] < accuracies(broken)[0]
    first_nan, nans = map(int, losses.splitlines()[1].split())
    assert first_nan > 8
    assert nans > 20
    assert float(rates.split()[-1]) > 3 * 0.02
    assert "RWKV_CLIP_model_1.pt: sound" in before
    assert re.search(r"step \d+, forward, module \w+", first)
    assert "fp16_overflow" in first
    assert "what changed most first" in weights
    largest = [float(line.split()[1]) for line in keys.splitlines()[1:]]
    assert largest[-1] > 3 * largest[0]

    assert last_loss(other_precision) != "nan"
    assert last_loss(other_rate) != "nan"
    assert "settings differ: lr 0.1 -> 0.02" in other_rate
    assert re.findall(r"skipped:(\d+)", other_rate)[-1] == "0"
    assert accuracies(other_rate)[-1] > 75
    assert accuracies(other_rate)[-1] > accuracies(other_precision)[-1] + 5
    assert mended.strip()
    assert accuracies(longer)[-1] > 75
