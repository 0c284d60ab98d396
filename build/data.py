"""Token streams, and the batches of a training step."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from build.corpus import Document
from build.tokenizer import END_OF_TEXT_ID

#: uint16, or uint32 for a vocabulary that needs it.
Tokens = npt.NDArray[np.unsignedinteger]


def encode_documents(tokenizer: Tokenizer, documents: tuple[Document, ...], end_id: int = END_OF_TEXT_ID) -> Tokens:
    """Return one stream, (n,): each document's tokens, with an end-of-text token before the first and after each.

    Documents are encoded as the server encodes a prompt, with the special tokens that the tokenizer adds.
    """
    encodings = tokenizer.encode_batch([document.text for document in documents])
    # A chat's template may have written the end-of-text token already.
    parts = [[end_id]] + [ids if (ids := e.ids)[-1:] == [end_id] else [*ids, end_id] for e in encodings]
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])


def cached_stream(
    path: Path, tokenizer: Tokenizer, documents: tuple[Document, ...], end_id: int = END_OF_TEXT_ID
) -> Tokens:
    """Return the stream of `documents`, cached in `path` (.npy), since encoding takes longer than loading."""
    if not path.exists():
        save_array(path, encode_documents(tokenizer, documents, end_id))
    stream: Tokens = np.load(path)
    return stream


def save_array(path: Path, array: Tokens) -> None:
    """Write an array (.npy) beside `path`, then rename it, so that a killed process leaves no truncated file there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npy")
    np.save(partial, array)
    partial.replace(path)


def batch(stream: Tokens, seed: int, index: int, rows: int, length: int) -> torch.Tensor:
    """Return batch number `index` of the phase with windows of `length` tokens, (rows, length + 1) int64.

    It is a pure function of its arguments, so a resumed run reads the same text without a saved generator state.
    """
    numbers = range(index * rows, (index + 1) * rows)
    starts = [_window_start(len(stream), seed, length, number) for number in numbers]
    windows = np.stack([stream[start : start + length + 1] for start in starts])
    return torch.from_numpy(windows.astype(np.int64))


def _window_start(stream_length: int, seed: int, length: int, number: int) -> int:
    """Return the start of window `number`: each pass cuts the stream at a new offset and visits each window once."""
    windows_per_pass = stream_length // length - 1
    if windows_per_pass < 1:
        raise ValueError(f"a stream of {stream_length} tokens is too short for windows of {length}")
    epoch, position = divmod(number, windows_per_pass)
    offset, order = _pass_order(seed, length, epoch, windows_per_pass)
    return offset + int(order[position]) * length


@lru_cache(maxsize=4)
def _pass_order(seed: int, length: int, epoch: int, windows: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the offset (0..length-1) and the order, (windows,) int64, of one pass over the stream."""
    rng = np.random.default_rng([seed, length, epoch])
    return int(rng.integers(length)), rng.permutation(windows)
