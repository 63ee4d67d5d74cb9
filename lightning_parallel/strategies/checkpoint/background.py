"""Saves that go on while training does: one at a time, in the order in which they were begun."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread

Act = Callable[[], None]


class Background:
    """A thread that saves, if anything is being saved."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._lock, self._busy = Lock(), False
        self._afterwards: list[Act] = []
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the last save failed, and nobody has been told yet."""
        return self._failure is not None

    def begin(self, save: Act) -> None:
        """Begins a save once the one before it is over; raises the failure of that."""
        self.wait()
        self._busy = True
        # a daemon: a process whose run has failed does not wait for ranks that will not come
        self._thread = Thread(target=self._run, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def afterwards(self, act: Act) -> None:
        """Acts at once if nothing is being saved, else when it is saved, and never if that fails or has failed."""
        with self._lock:
            if self._busy:
                self._afterwards.append(act)
                return
        if not self.failed:
            act()

    def wait(self) -> None:
        """Returns when nothing is being saved; raises the failure of the last save, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, save: Act) -> None:
        try:
            save()
            while acts := self._taken():
                for act in acts:
                    act()
        except BaseException as error:
            self._failure = error  # before it is idle: what follows a save asks for both, in the other order
            with self._lock:
                self._busy = False
                self._afterwards.clear()

    def _taken(self) -> list[Act]:
        with self._lock:
            acts, self._afterwards = self._afterwards, []
            self._busy = bool(acts)
        return acts
