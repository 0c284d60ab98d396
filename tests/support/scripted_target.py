"""What the tests tell the target in tests/server/scripted/target.py, and what it answers."""

from __future__ import annotations

from pathlib import Path

from tests.support.clients import until

PROMPT = "abc"


def text_at(start: int, count: int) -> list[int]:
    """Return the scripted target's tokens at positions start, start + 1, …."""
    return [1 + position % 60 for position in range(start, start + count)]


class Script:
    """The folder whose files control the scripted target."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def go(self, name: str, num_steps: int = 10_000) -> None:
        """Release the first `num_steps` steps of a request."""
        (self.folder / "go.new").write_text(str(num_steps))
        (self.folder / "go.new").rename(self.folder / f"{name}.go")

    def began(self, name: str) -> int:
        """Return how many steps of a request have begun."""
        file = self.folder / f"{name}.began"
        return int(file.read_text()) if file.exists() else 0

    def await_step(self, name: str, number: int) -> None:
        """Wait until this step is under way."""
        until(lambda: self.began(name) >= number, f"step {number} of {name}")

    def await_end(self, name: str) -> int:
        """Wait until the sequence is released; return how many steps it had."""
        until((self.folder / f"{name}.ended").exists, f"the end of {name}")
        return self.began(name)
