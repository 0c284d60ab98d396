"""NOT TensorRT-LLM: for tests in another process, what an executor did, and how far it may go.

In the folder STANDIN_FOLDER, `<engine>.journal` gets a line of JSON for each event; while `<engine>.passes` is there, the
executor runs no more passes in all than the number in it. It dies once `<engine>.break` appears.
"""

import json
import os
import time
from pathlib import Path

POLL_S = 0.005


class Journal:
    def __init__(self, model_path):
        folder = os.environ.get("STANDIN_FOLDER")
        self._file = Path(folder, f"{Path(model_path).name}.journal") if folder else None

    def note(self, event, **values):
        if self._file:
            with self._file.open("a") as file:
                file.write(json.dumps({"event": event, **values}) + "\n")

    def await_leave(self, num_passes, is_over):
        """Wait until another pass may run, or nobody wants it any more."""
        while not (self.may_pass(num_passes) or is_over()):
            time.sleep(POLL_S)

    def may_pass(self, num_passes):
        return not self._file or num_passes < self._most()

    def is_to_break(self):
        """Tell, once, that the executor shall die."""
        order = self._file and self._file.with_suffix(".break")
        if not (order and order.exists()):
            return False
        order.unlink()
        return True

    def _most(self):
        try:
            return int(self._file.with_suffix(".passes").read_text() or 0)
        except FileNotFoundError:
            return float("inf")
