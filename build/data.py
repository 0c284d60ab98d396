"""Token streams and the batches of a training step; it does not know models."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from build.corpus import Document
from build.tokenizer import END_OF_TEXT_ID

#: uint16, or uint32 of a vocabulary that needs it.
Tokens = npt.NDArray[np.unsignedinteger]


def encode_documents(tokenizer: Tokenizer, documents: tuple[Document, ...], end_id: int = END_OF_TEXT_ID) -> Tokens:
    """One stream (n,): each document's tokens, an end-of-text token before the first and after each.

    Documents are encoded as the server encodes a prompt, with the special tokens that the tokenizer adds by itself.
    """
    encodings = tokenizer.encode_batch([document.text for document in documents])
    parts = [[end_id]] + [_ended(encoding.ids, end_id) for encoding in encodings]
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])


def _ended(ids: list[int], end_id: int) -> list[int]:
    """The tokens of a document; a chat's may end by themselves."""
    return ids if ids[-1:] == [end_id] else [*ids, end_id]


def cached_stream(
    path: Path, tokenizer: Tokenizer, documents: tuple[Document, ...], end_id: int = END_OF_TEXT_ID
) -> Tokens:
    """The stream of `documents`, kept in `path` (a .npy file) because encoding takes longer than loading."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, encode_documents(tokenizer, documents, end_id))
    stream: Tokens = np.load(path)
    return stream


def batch(stream: Tokens, seed: int, index: int, rows: int, length: int) -> torch.Tensor:
    """Rows of text (rows, length + 1) int64 number `index` of the phase with windows of `length` tokens.

    A pure function of its arguments: a resumed run needs no generator state to see the same text again.
    """
    numbers = range(index * rows, (index + 1) * rows)
    starts = [_window_start(len(stream), seed, length, number) for number in numbers]
    windows = np.stack([stream[start : start + length + 1] for start in starts])
    return torch.from_numpy(windows.astype(np.int64))


def _window_start(stream_length: int, seed: int, length: int, number: int) -> int:
    """Start of window `number`: each pass cuts the stream at a new offset and visits each window once."""
    windows_per_pass = stream_length // length - 1
    if windows_per_pass < 1:
        raise ValueError(f"a stream of {stream_length} tokens is too short for windows of {length}")
    epoch, position = divmod(number, windows_per_pass)
    offset, order = _pass_order(seed, length, epoch, windows_per_pass)
    return offset + int(order[position]) * length


@lru_cache(maxsize=4)
def _pass_order(seed: int, length: int, epoch: int, windows: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Offset (0..length-1) and order (windows,) of one pass over the stream."""
    rng = np.random.default_rng([seed, length, epoch])
    return int(rng.integers(length)), rng.permutation(windows)
