"""The background thread that seals closed segments, so that training does not wait for compression."""

from __future__ import annotations

import queue
import threading

from tracehooks.storage.layout import Layout, Piece
from tracehooks.storage.sealing import seal


class Sealer:
    """Seals pieces one after the other from their files: its memory is that of one row group, its queue holds numbers.

    A piece that cannot be sealed (a full disk) stays in the journal, is tried again by `finish`, and its error waits in
    `take_failure` until somebody asks.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._queue: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._failed: list[Piece] = []
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, piece: Piece) -> None:
        """Seal a piece whose segment is closed."""
        self._queue.put(piece)
        if self._thread is None:
            # A daemon: a process that forgets close() must be able to end.
            self._thread = threading.Thread(target=self._work, name="tracehooks-sealer", daemon=True)
            self._thread.start()

    def take_failure(self) -> Exception | None:
        """The error of the last piece that could not be sealed, once."""
        failure, self._failure = self._failure, None
        return failure

    def finish(self) -> None:
        """Seal everything submitted, once more what failed, and end the thread; errors are left in `take_failure`."""
        self._join()
        failed, self._failed, self._failure = self._failed, [], None
        for piece in failed:
            self._seal(piece)

    def stop(self) -> None:
        """End the thread after the piece in hand; the rest stays in the journal."""
        self._stopping.set()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (piece := self._queue.get()) is not None and not self._stopping.is_set():
            self._seal(piece)

    def _seal(self, piece: Piece) -> None:
        try:
            seal(self._layout, piece)
        except Exception as error:  # a thread has nobody to raise to; the writer's next call does
            self._failed.append(piece)
            self._failure = error
