"""The handle that attach() returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from tracehooks import stats
from tracehooks.capture import torch_internals
from tracehooks.capture.leaves import leaves
from tracehooks.capture.session import Session
from tracehooks.core.errors import ClosedTraceError, InvalidOptionError
from tracehooks.core.records import Answer, FirstNonFinite


class Trace:
    """A recording under way. Also a context manager, which closes it and notes an exception that ended the block."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def path(self) -> Path | None:
        """The run's directory; None where the trace is kept in memory."""
        return self._session.outbox.sink.path

    @property
    def step(self) -> int:
        """Number of the current step, from 0."""
        return self._session.steps.step

    @property
    def first_nonfinite(self) -> FirstNonFinite | None:
        """Where the first non-finite value was seen, None while there is none. It is known at the end of its step."""
        return self._session.outbox.first

    def scalar(self, name: str, value: float | Tensor) -> None:
        """Record a number of the current step. A 0-dim tensor is read when the step is written."""
        self._check("scalar()")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise InvalidOptionError(f"scalar({name!r})", f"a tensor of shape {tuple(value.shape)}", "one number")
        self._session.recorder.scalar(name, value.reshape(()) if isinstance(value, Tensor) else float(value))

    def samples(self, batch: Any, split: str = "train", source_id: Sequence[str] | str | None = None) -> None:
        """Fingerprint the samples of a batch: every tensor in it, by its first dimension.

        Args:
            batch: a tensor, or a tuple, list, mapping, dataclass of tensors.
            split: train, validation or a name of yours.
            source_id: where each sample comes from: one string a sample, or one for all; ``NAME@START+LENGTH`` for a window.
        """
        self._check("samples()")
        for name, tensor in leaves(batch, "batch"):
            if not tensor.ndim:
                continue
            ids = [source_id] * len(tensor) if isinstance(source_id, str) else source_id
            if ids is not None and len(ids) != len(tensor):
                raise InvalidOptionError("source_id", f"{len(ids)} ids", f"one for each of the {len(tensor)} samples")
            self._session.recorder.samples(tensor, name, split, self._session.steps.micro, ids)

    def checkpoint(self, name: str, state: Mapping[str, Any]) -> None:
        """Note that this state dict was kept: the hash of each tensor, and whether it shares memory with the live model
        (then what was kept goes on changing)."""
        self._check("checkpoint()")
        hashes, shared = {}, []
        live = {_memory(held.tensor) for held in self._session.state.census.parameters}
        for key, tensor in leaves(state, ""):
            values = torch_internals.unwrapped(tensor)
            if values is None or not stats.measurable(values):
                continue
            packed = stats.summarize(values, stats.Spec(hash=True))
            hashes[key.lstrip(".")] = int(stats.unpack(packed.cpu().numpy()[None], stats.Spec())["hash"][0])  # type: ignore[index]
            if _memory(values) in live:
                shared.append(key.lstrip("."))
        self._session.recorder.event(
            "checkpoint",
            "info",
            f"checkpoint {name}: {len(hashes)} tensors"
            + (f", {len(shared)} share memory with the model" if shared else ""),
            {"name": name, "tensors": len(hashes), "hashes": hashes, "shares_memory_with_model": shared},
        )

    def note(self, text: str) -> None:
        """Record a note of yours at the current step."""
        self._check("note()")
        self._session.recorder.event("note", "info", text)

    def verdict(self, found: Answer) -> None:
        """Keep what an experiment found as an event of the current step."""
        self._check("verdict()")
        said = found.to_json()
        title = str(found).partition("\n")[0]
        kept = {"title": title, "passed": said.get("passed"), "checks": said.get("checks", ())}
        severity = "warning" if kept["passed"] is False else "info"
        self._session.recorder.event("verdict", severity, title, {**kept, "evidence": said.get("evidence", said)})

    def pause(self) -> None:
        """Record no tensors until `resume`; steps are still counted."""
        self._check("pause()")
        self._session.pause(True)

    def resume(self) -> None:
        """Record tensors again."""
        self._check("resume()")
        self._session.pause(False)

    @contextlib.contextmanager
    def step_scope(self) -> Iterator[Self]:
        """A block that is one step, for loops without an optimizer: what the hooks see inside belongs to it."""
        self._check("step_scope()")
        self._session.scope_begins()
        try:
            yield self
        finally:
            self._session.scope_ends()

    def flush(self) -> None:
        """Write what was recorded so far; when it returns it survives the death of the process."""
        self._check("flush()")
        with torch_internals.undisturbed():
            self._session.flush()

    def close(self) -> None:
        """Take every hook off the model and seal the trace. A second call does nothing."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not self._session.closed:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._session.recorder.event("exception", "error", text, {"type": type(error).__name__})
        self._session.close("closed" if error is None else "crashed")

    def __repr__(self) -> str:
        state = "closed" if self._session.closed else f"step {self.step}"
        return f"<Trace {self.path or 'in memory'}, {state}>"

    def _check(self, call: str) -> None:
        if self._session.closed:
            raise ClosedTraceError(call, self.path)


def _memory(tensor: Tensor) -> int:
    """Address of the memory that holds a tensor's values; 0 where there is none."""
    values = torch_internals.unwrapped(tensor)
    if values is None or values.is_sparse or values.is_quantized:
        return 0
    return values.untyped_storage().data_ptr()
