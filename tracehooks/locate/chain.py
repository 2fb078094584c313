"""From damage back to its cause: which of the recorded ops made what is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracehooks.locate.ops import Op, Status, Unseen


@dataclass(frozen=True)
class Birth:
    """Where a non-finite value was born."""

    op: Op | None
    """None: it came in with a tensor that no recorded op wrote."""
    unseen: Unseen | None
    """The tensor that no recorded op wrote, where ``op`` is None."""
    path: tuple[Op, ...]
    """The ops it passed on its way to the damage, first to last, the damaged one included."""

    @property
    def turned_nan(self) -> Op | None:
        """The first op on the way that made a NaN of an infinity."""
        return next((op for op in self.path if op.output.nan and not _any_nan(op)), None)


def birth(ops: Sequence[Op], unseen: Sequence[Unseen], damaged: int) -> Birth:
    """Follow a damaged op's inputs back to where the first non-finite value on that way was born.

    NaN inputs are followed before infinite ones; an infinity that was meant (a mask's fill, an infinite constant, -inf
    in a tensor that came from outside) is not followed: then the op that made NaN of it is the birth.
    """
    path: list[Op] = []
    index = damaged
    while True:
        op = ops[index]
        path.append(op)
        source = _culpable(op, ops, unseen)
        if source is None:
            return Birth(op, None, tuple(reversed(path)))
        if source < 0:
            return Birth(None, unseen[-source - 1], tuple(reversed(path)))
        if source >= index:  # written again since: it cannot have caused this
            return Birth(op, None, tuple(reversed(path)))
        index = source


def _culpable(op: Op, ops: Sequence[Op], unseen: Sequence[Unseen]) -> int | None:
    """The input to blame: the earliest written NaN, else the earliest infinity that was not meant; None: the op itself."""
    nan = [writer for writer, status in op.sources if status.nan]
    if nan:
        return _earliest(nan)
    if op.meant and not op.output.nan:
        return None
    infinite = [w for w, status in op.sources if status.bad and not _was_meant(w, status, ops, unseen)]
    return _earliest(infinite) if infinite else None


def _earliest(writers: list[int]) -> int:
    return min(writers, key=lambda writer: (writer >= 0, abs(writer)))


def _was_meant(writer: int, status: Status, ops: Sequence[Op], unseen: Sequence[Unseen], depth: int = 0) -> bool:
    """Whether an infinity was put there on purpose: filled in, or handed on from where it was; -inf from outside is."""
    if writer < 0:
        return status.only_neginf
    op = ops[writer]
    if op.output.nan or op.name.startswith("aten.logsumexp"):  # over a row of -inf only, it makes a -inf of its own
        return False
    if op.meant:
        return True
    infinite = [(w, s) for w, s in op.sources if s.bad and w < writer]
    if not infinite or depth > 200:
        return False
    return all(_was_meant(w, s, ops, unseen, depth + 1) for w, s in infinite)


def _any_nan(op: Op) -> bool:
    return any(status.nan for _, status in op.sources)
