"""How a run is shown."""

from __future__ import annotations

import io

from rwkv_clip.training.progress import show


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def shown(stream, log):
    with show(log, 3, stream=stream) as display:
        for step in range(3):
            display.line(f"step [{step}] " + "x" * 200)
            display.advance(f"loss {step}")
    return stream.getvalue()


def test_piped_lines_are_plain(tmp_path):
    """In a pipe there is no bar and no escape code: the lines alone, unwrapped, with their brackets."""
    lines = shown(io.StringIO(), tmp_path / "training.log").splitlines()
    assert lines == [f"step [{step}] " + "x" * 200 for step in range(3)]


def test_a_terminal_has_a_bar(tmp_path, monkeypatch):
    """On a terminal a bar counts the steps, with the note beside it, and the lines are there as well."""
    monkeypatch.setenv("TERM", "xterm")
    text = shown(Terminal(), tmp_path / "training.log")
    assert "training" in text
    assert "3/3" in text
    assert "loss 2" in text
    assert "step [1]" in text


def test_the_log_file_holds_every_line(tmp_path):
    """training.log gets each line with the time before it, after what was there."""
    log = tmp_path / "training.log"
    log.write_text("earlier\n")
    shown(io.StringIO(), log)
    earlier, *lines = log.read_text().splitlines()
    assert earlier == "earlier"
    assert len(lines) == 3
    assert all(line.startswith("Training: ") and f"step [{i}]" in line for i, line in enumerate(lines))
