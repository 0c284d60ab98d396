"""The target's own continuations of the training text, greedy and sampled: such text is what heads draft in service."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
import torch

from build.data import Tokens, save_array
from build.heads.target import FrozenTarget
from build.losses import spread_windows

PROMPT_TOKENS, CONTINUED_TOKENS = 128, 384
#: Rows of a part, continued together; a killed run keeps finished parts. On a GPU, CACHE_BYTES is a limit, too.
ROWS = {"cpu": 32, "cuda": 512}
CACHE_BYTES = 4 << 30


def continuations(
    target: FrozenTarget, stream: Tokens, num_tokens: int, folder: Path, seed: int, limit_s: float = 0.0
) -> Tokens:
    """Return about `num_tokens` tokens of prompts and continuations, (n,); half of the parts are greedy, half sampled.

    Parts are cached in `folder` under the target's identity; a run that was interrupted computes the missing ones.
    limit_s: compute only as many parts, at least two, as fit into this many seconds at the first one's rate; 0: all.
    """
    length = min(PROMPT_TOKENS, (len(stream) - 1) // 2)
    rows = ROWS["cpu"]
    if target.device.type == "cuda":
        rows = min(ROWS["cuda"], CACHE_BYTES // (target.token_bytes * (length + CONTINUED_TOKENS)))
    rows = max(min(rows, num_tokens // (length + CONTINUED_TOKENS)), 1)
    num_parts = max(num_tokens // (rows * (length + CONTINUED_TOKENS)), 1)
    key = f"{target.identity} {hashlib.sha256(stream.tobytes()).hexdigest()} {rows} {num_parts} {length} {seed}"
    folder = folder / f"continuations-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    prompts = torch.cat(list(spread_windows(stream, rows * num_parts, length)))[:, :length]
    parts = []
    for number, part in enumerate(prompts.split(rows)):
        path = folder / f"part-{number:04}.npy"
        if not path.exists():
            generator = torch.Generator(target.device).manual_seed(seed + number) if number % 2 else None
            began_s = time.perf_counter()
            text = target.continued(part.to(target.device), CONTINUED_TOKENS, generator)
            spent_s = time.perf_counter() - began_s
            if number == 0 and limit_s:
                num_parts = min(num_parts, max(int(limit_s / spent_s), 2))
                save_array(folder / "num_parts.npy", np.array([num_parts], np.uint32))
            _announce(number, num_parts, text.numel(), spent_s)
            save_array(path, text.cpu().numpy().astype(stream.dtype).reshape(-1))
        elif number == 0 and (folder / "num_parts.npy").exists():
            num_parts = int(np.load(folder / "num_parts.npy")[0])
        parts.append(np.load(path))
        if number + 1 == num_parts:
            break
    return np.concatenate(parts)


def _announce(number: int, num_parts: int, part_tokens: int, spent_s: float) -> None:
    """Print the rate of the part just computed, and how long the others will take."""
    minutes = (num_parts - number - 1) * spent_s / 60
    rate = part_tokens / spent_s
    print(f"continuations: part {number + 1} of {num_parts}, {rate:.0f} tokens/s, {minutes:.0f} min left", flush=True)
