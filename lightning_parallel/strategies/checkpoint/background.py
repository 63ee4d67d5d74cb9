"""Saves that go on while training does: one at a time, in the order in which they were begun."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock, Thread

Act = Callable[[], None]


class Background:
    """A thread that saves, if anything is being saved, and then does what follows the save.

    It is a daemon and no `ThreadPoolExecutor`, whose threads Python joins as it ends: a process whose run has failed
    must not wait for ranks that will not come.
    """

    def __init__(self) -> None:
        self._lock, self._acts = Lock(), deque[Act]()  # the first one runs
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the last save failed, and nobody has been told yet."""
        return self._failure is not None

    def begin(self, save: Act) -> None:
        """Begin a save once the one before it is over; raise the failure of that."""
        self.wait()
        self._acts.append(save)
        self._thread = Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def afterwards(self, act: Act) -> None:
        """Act at once if nothing is being saved, else when it is saved, and never if that fails or has failed."""
        with self._lock:
            if self._acts:
                self._acts.append(act)
                return
        if not self.failed:
            act()

    def wait(self) -> None:
        """Return when nothing is being saved; raise the failure of the last save, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while self._acts:
            try:
                self._acts[0]()
            except BaseException as error:
                self._failure = error  # before nothing is being saved: `afterwards` asks in the other order
                with self._lock:
                    self._acts.clear()
                return
            with self._lock:
                self._acts.popleft()
