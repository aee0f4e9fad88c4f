"""Shows how far the rehearsal is: one live line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

BAR_WIDTH = 24
REDRAW_S = 0.1
NUM_PLAIN_LINES = 3


class Progress:
    """The display of one rehearsal. Phases are shown one at a time."""

    def __init__(self, stream: TextIO, live: bool | None = None) -> None:
        self._stream = stream
        self._live = stream.isatty() if live is None else live
        self._title = self._detail = ""
        self._first = self._last = self._done = self._said = 0
        self._started_s = self._drawn_s = 0.0

    def begin(self, title: str, detail: str = "", first: int = 0, last: int = 0) -> None:
        """A phase that will do the steps `first` to `last`; 0 and 0 where it has no steps."""
        self._title, self._detail, self._first, self._last = title, detail, first, last
        self._done = self._said = first - 1
        self._started_s = time.monotonic()
        self._drawn_s = 0.0
        if not self._live:
            steps = f", steps {first} to {last}" if last else ""
            self._line(f"{self._name()}{steps} ...")
        self.tick()

    def step(self, step: int) -> None:
        """The phase has done this step."""
        if step == self._done:
            return
        self._done = step
        interval = max(1, (self._last - self._first + 1) // NUM_PLAIN_LINES)
        if not self._live and step - self._said >= interval and step < self._last:
            self._said = step
            self._line(f"  step {step} of {self._last} ({self._elapsed()})")
        self._drawn_s = 0.0
        self.tick()

    def tick(self) -> None:
        """Called often while something runs: keeps the clock of the live line going."""
        now = time.monotonic()
        if self._live and now - self._drawn_s >= REDRAW_S:
            self._drawn_s = now
            # The detail comes last: a narrow terminal cuts it off.
            self._redraw(f"  {self._title}  {self._bar()}{self._elapsed():<5}  {self._detail}")

    def end(self, result: str = "done") -> float:
        """The phase is over. Returns its seconds."""
        seconds = time.monotonic() - self._started_s
        self.say(
            f"  {self._name()}: {result} ({seconds:.1f} s)"
            if self._live
            else f"  {result} ({seconds:.1f} s)"
        )
        return seconds

    def say(self, text: str) -> None:
        """A lasting line (or several) above the live one."""
        if self._live:
            self._redraw("")
        self._line(text)

    def clear(self) -> None:
        """Takes the live line away, for what somebody else prints."""
        if self._live:
            self._redraw("")

    def _name(self) -> str:
        return f"{self._title}  {self._detail}" if self._detail else self._title

    def _bar(self) -> str:
        if not self._last:
            return ""
        total = self._last - self._first + 1
        done = self._done - self._first + 1
        filled = BAR_WIDTH * done // total
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        what = f"step {self._done}/{self._last}" if done else "starting ranks"
        return f"[{bar}] {what:<14}  "

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started_s:.0f} s"

    def _redraw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._stream.write("\r\x1b[K" + text[:width])
        self._stream.flush()

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()
