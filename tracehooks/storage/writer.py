"""The writer of a run: rows to the journal at once, to Parquet in the background."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tracehooks.core.config import DURABILITY
from tracehooks.core.errors import ClosedTraceError, RunExistsError, UnknownNameError, UnwritableError
from tracehooks.core.records import Batch
from tracehooks.core.schema import STATUSES
from tracehooks.storage.durable import write_atomic, writing
from tracehooks.storage.forms import Forms
from tracehooks.storage.info import load_info, new_info, now, resumed_info, save_info
from tracehooks.storage.journal import Segment
from tracehooks.storage.layout import Layout, Piece
from tracehooks.storage.lock import RankLock
from tracehooks.storage.sealer import Sealer
from tracehooks.storage.sealing import seal_all

ROWS_PER_PART = 131_072
BYTES_PER_PART = 64 << 20


class RunWriter:
    """Writes one rank's rows of a run; implements `core.records.Sink`.

    When `write` returns, its rows survive the death of the process (``durability="process"``) or of the machine
    (``"fsync"``). In a forked child every method does nothing. Only rank 0 writes run.json.

    Memory is that of one batch and of one row group being sealed, whatever the length of the run: about 100 MiB at most
    with the default limits (benchmarks/storage.py measures it). Segments that wait to be sealed wait on disk.

    Args:
        path: the run directory, made when it is not there.
        info: fields of run.json; those that every run has are filled in.
        rank: the number of this process among those that write the run.
        resume: add to the run that the directory holds, if it holds one; what a crash left is sealed first.
        rows_per_part: rows after which a journal segment is closed and sealed into a part.
        bytes_per_part: journal bytes after which the same happens.

    Raises:
        RunExistsError: the directory holds a run and ``resume`` is not set.
        RunBusyError: a live process writes this rank of the run.
        UnwritableError: the directory cannot be made or written.
        UnreadableRunError, FormatVersionError: with ``resume``, run.json is damaged or of a newer version.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        info: Mapping[str, Any],
        *,
        rank: int = 0,
        durability: str = "process",
        resume: bool = False,
        rows_per_part: int = ROWS_PER_PART,
        bytes_per_part: int = BYTES_PER_PART,
    ) -> None:
        if durability not in DURABILITY:
            raise UnknownNameError("durability", durability, DURABILITY, "RunWriter()")
        # Absolute: a training script may change its working directory.
        self.path: Path | None = Path(path).absolute()
        self._layout = Layout(self.path)
        self._rank = rank
        self._fsync = durability == "fsync"
        self._limits = (rows_per_part, bytes_per_part)
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._closed = False
        self._open: dict[str, tuple[Piece, Segment]] = {}
        self._next: dict[str, int] = {}
        self._forms = Forms()
        self._refuse_existing(resume)
        with writing(self._layout.root):
            self._lock = RankLock(self._layout.journal_of(rank), self._layout.root, rank)
        try:
            self._begin(info, resume)
        except BaseException:  # whatever it was, also Ctrl-C: the directory must not look as if it were being written
            self._lock.release()
            raise
        self._sealer = Sealer(self._layout)
        # Runs when the writer is dropped or the interpreter ends without close(): a daemon thread must not be inside
        # Arrow's code then, and the run must not look alive.
        self._abandon = weakref.finalize(self, _abandon, self._pid, self._sealer, self._lock)

    def write(self, batches: Sequence[Batch]) -> None:
        """Append the rows of one flush to the journal.

        Raises:
            UnwritableError: rows could not be written, or (all rows of this call are then kept) earlier ones could not
                be sealed. What was written before stays readable and later calls may succeed.
            InvalidRowsError, UnknownNameError: a batch does not fit its table; nothing of this call is written.
            ClosedTraceError: after `close`.
        """
        if os.getpid() != self._pid:
            return
        with self._mutex:
            if self._closed:
                raise ClosedTraceError("write()", self.path)
            encoded = [(batch.table, self._forms.message(batch), len(batch)) for batch in batches if len(batch)]
            with writing(self._layout.root):
                for table, message, rows in encoded:
                    self._append(table, message, rows)
            self._raise_failure()

    def update_info(self, fields: Mapping[str, Any]) -> None:
        """Merge fields into run.json, atomically. Does nothing on other ranks than 0.

        Raises:
            UnwritableError: run.json cannot be written; it is as it was.
        """
        if os.getpid() != self._pid or self._rank != 0:
            return
        with self._mutex, writing(self._layout.run_json):
            self._info |= dict(fields)
            save_info(self._layout.run_json, self._info)

    def keep(self, name: str, data: bytes) -> None:
        """Keep a file under snapshots/, atomically.

        Raises:
            UnwritableError: it cannot be written.
        """
        if os.getpid() != self._pid:
            return
        path = self._layout.root / "snapshots" / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data)

    def close(self, status: str = "closed") -> None:
        """Seal everything, mark run.json, give the run back; a second call does nothing.

        Raises:
            UnwritableError: something could not be sealed or marked; its rows are readable in the journal.
        """
        if status not in STATUSES:
            raise UnknownNameError("status", status, STATUSES, "close()")
        if os.getpid() != self._pid:
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            try:
                for table in list(self._open):
                    self._finish_segment(table)
                self._sealer.finish()
                self.update_info({"status": status, "closed": now()})
            finally:
                self._abandon()
            self._raise_failure()

    def _refuse_existing(self, resume: bool) -> None:
        if resume:
            return
        with writing(self._layout.root):
            if (self._rank == 0 and self._layout.run_json.exists()) or self._layout.holds_rows(self._rank):
                raise RunExistsError(self.path)

    def _begin(self, info: Mapping[str, Any], resume: bool) -> None:
        # Again, now that no other process can create the run.
        self._refuse_existing(resume)
        with writing(self._layout.root):
            if self._rank == 0:
                exists = self._layout.run_json.exists()
                self._info = resumed_info(load_info(self._layout.run_json), info) if exists else new_info(info)
                save_info(self._layout.run_json, self._info)
            seal_all(self._layout, self._rank)

    def _append(self, table: str, message: bytes, rows: int) -> None:
        segment = self._segment(table)
        try:
            segment.append(message, rows)
        except OSError:
            if not segment.usable:
                self._finish_segment(table)
            raise
        if segment.rows >= self._limits[0] or segment.size >= self._limits[1]:
            self._finish_segment(table)

    def _segment(self, table: str) -> Segment:
        if table not in self._open:
            number = self._next.get(table)
            piece = Piece(self._rank, self._layout.next_number(table, self._rank) if number is None else number, table)
            segment = Segment(self._layout.segment(piece), table, fsync=self._fsync)
            self._open[table] = (piece, segment)
            self._next[table] = piece.number + 1
        return self._open[table][1]

    def _finish_segment(self, table: str) -> None:
        piece, segment = self._open.pop(table)
        segment.close()
        self._sealer.submit(piece)

    def _raise_failure(self) -> None:
        if failure := self._sealer.take_failure():
            reason = getattr(failure, "strerror", None) or str(failure)
            raise UnwritableError(self.path, f"sealing: {reason}; its rows are in the journal") from failure


def _abandon(pid: int, sealer: Sealer, lock: RankLock) -> None:
    if os.getpid() == pid:
        sealer.stop()
        lock.release()
