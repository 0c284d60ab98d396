"""One thread for the tiny models of the unit tests: more only get in each other's way."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
