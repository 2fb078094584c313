"""The handle that attach() returns."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

import numpy as np
from torch import Tensor

from tracehooks import stats
from tracehooks.capture import torch_internals
from tracehooks.capture.leaves import leaves
from tracehooks.capture.session import Session
from tracehooks.core.errors import ClosedTraceError, InvalidOptionError, shown
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

    def scalar(self, name: str, value: SupportsFloat | Tensor) -> None:
        """Record a number of the current step. A 0-dim tensor is read when the step is written.

        Raises:
            InvalidOptionError: a name that is no text, a value that is not one real number.
        """
        self._check("scalar()")
        self._session.recorder.scalar(_text("scalar(name)", name), _number(f"scalar({name!r})", value))

    def samples(
        self,
        batch: Any,
        split: str = "train",
        source_id: Iterable[str | numbers.Number | None] | str | numbers.Number | None = None,
    ) -> None:
        """Fingerprint the samples of a batch: every tensor in it, by its first dimension.

        Args:
            batch: a tensor, or a tuple, list, mapping, dataclass of tensors.
            split: train, validation or a name of yours.
            source_id: where each sample comes from: one id a sample (None: not known), or one for all; a text or a number,
                ``NAME@START+LENGTH`` for a window.

        Raises:
            InvalidOptionError: no samples in the batch, a split that is no text, ids that are none or not one a sample.
        """
        self._check("samples()")
        _text("samples(split)", split)
        found = [(name, tensor) for name, tensor in leaves(batch, "batch") if tensor.ndim]
        if not found:
            raise InvalidOptionError("samples(batch)", shown(batch), "tensors whose first dimension counts samples")
        given = [_source_ids(source_id, len(tensor)) for _, tensor in found]
        for (name, tensor), ids in zip(found, given, strict=True):
            self._session.recorder.samples(tensor, name, split, self._session.steps.micro, ids)

    def checkpoint(self, name: str, state: Mapping[str, Any]) -> None:
        """Note that this state dict was kept: the hash of each tensor, and whether it shares memory with the live model
        (then what was kept goes on changing).

        Raises:
            InvalidOptionError: a state that is no mapping.
        """
        self._check("checkpoint()")
        if not isinstance(state, Mapping):
            raise InvalidOptionError("checkpoint(state)", shown(state), "a state dict, as model.state_dict() gives")
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
        """Record a note of yours at the current step.

        Raises:
            InvalidOptionError: a note that is no text.
        """
        self._check("note()")
        self._session.recorder.event("note", "info", _text("note(text)", text))

    def verdict(self, found: Answer) -> None:
        """Keep what an experiment found as an event of the current step.

        Raises:
            InvalidOptionError: something that no experiment and no diff has answered.
        """
        self._check("verdict()")
        said = found.to_json() if isinstance(found, Answer) else None
        if not isinstance(said, Mapping):
            raise InvalidOptionError("verdict(found)", shown(found), "a Verdict of an experiment, or a diff")
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


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidOptionError(where, shown(value), "a text")
    return value


def _number(where: str, value: Any) -> float | Tensor:
    """One real number: of a tensor its only element, still on its device."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise InvalidOptionError(where, f"a {value.dtype} tensor of shape {tuple(value.shape)}", "one real number")
        return value.reshape(())
    try:
        if not np.iscomplexobj(value) and isinstance(value, SupportsFloat):
            return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOptionError(where, shown(value), f"one real number ({error})") from error
    raise InvalidOptionError(where, shown(value), "one real number")


def _source_ids(given: object, samples: int) -> list[str | None] | None:
    """The ids of some samples as text; None where none are given."""
    if given is None:
        return None
    if isinstance(given, str | numbers.Number):
        return [str(given)] * samples
    if not isinstance(given, Iterable):
        raise InvalidOptionError("source_id", shown(given), "one id a sample, or one for all")
    ids = list(given.tolist() if isinstance(given, Tensor | np.ndarray) else given)
    if len(ids) != samples:
        raise InvalidOptionError("source_id", f"{len(ids)} ids", f"one for each of the {samples} samples")
    for one in ids:
        if not (one is None or isinstance(one, str | numbers.Number)):
            raise InvalidOptionError("source_id", f"{shown(one)} among the ids", "texts, numbers or None")
    return [None if one is None else str(one) for one in ids]


def _memory(tensor: Tensor) -> int:
    """Address of the memory that holds a tensor's values; 0 where there is none."""
    values = torch_internals.unwrapped(tensor)
    if values is None or values.is_sparse or values.is_quantized:
        return 0
    return values.untyped_storage().data_ptr()
