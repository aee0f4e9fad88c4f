"""A part of a file as a stream of its own, which counts what is read through it."""

from __future__ import annotations

import io
import os
from collections.abc import Buffer


class Window(io.RawIOBase):
    """Bytes [start, start + length) of an open file; reads exactly what it is asked for.

    Attributes:
        nbytes_read: bytes read so far.
    """

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._length = descriptor, start, length
        self._position = 0
        self.nbytes_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(22, f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._length - self._position)
        if wanted <= 0:
            return 0
        got = os.preadv(self._descriptor, [view[:wanted]], self._start + self._position)
        self._position += got
        self.nbytes_read += got
        return got

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Reads as many bytes as the buffer takes, from `offset` on.

        Raises:
            EOFError: the file or the window ends before.
        """
        self.seek(offset)
        done = 0
        while done < len(buffer):
            got = self.readinto(buffer[done:])
            if got == 0:
                raise EOFError(f"{len(buffer) - done} bytes are missing at its end")
            done += got
