"""One thread of a worker at a time works on payments; a thread that waits for something outside lets others work.

Python hands its lock over at nearly every call into SQLite. Without this, a thread that has begun a transaction waits
for Python after each of its statements, and the threads of all workers wait with it for the database.
"""

import threading

_baton = threading.Lock()
_here = threading.local()


class held:  # noqa: N801
    """Work on a payment for the length of a with block."""

    def __enter__(self):
        _baton.acquire()
        _here.held = True

    def __exit__(self, *_):
        _here.held = False
        _baton.release()


class aside:  # noqa: N801
    """Let other threads work for the length of a with block, in which this one waits; nothing if it holds no baton."""

    def __enter__(self):
        self.held = getattr(_here, "held", False)
        if self.held:
            held.__exit__(self)

    def __exit__(self, *_):
        if self.held:
            held.__enter__(self)
