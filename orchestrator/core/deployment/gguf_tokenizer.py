"""The tokenizer of a GGUF file, as `tokenizers` runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from orchestrator.core.deployment.gguf_file import GgufFile
from orchestrator.core.errors import ConfigError

# Types of a token.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_GPT_2 = ("gpt-2", "phi-2", "olmo", "mpt", "jais")
#: How texts are cut into words before the merges, by tokenizer.ggml.pre; each stands for the original's pre-tokenizer.
PRE_TOKENIZERS = (*_GPT_2, *_DIGIT_BY_DIGIT, "llama-bpe", "qwen2")


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of a file; raises ConfigError for a kind that is not known."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{file.path}: the tokenizer kind {kind!r} (key tokenizer.ggml.model) is not supported (allowed: gpt2, "
            "llama); serve the original checkpoint folder with its tokenizer.json"
        )
    tokens = file.get("tokenizer.ggml.tokens", list)
    kinds = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise ConfigError(f"{file.path}: {len(tokens)} tokens have {len(kinds)} types (key tokenizer.ggml.token_type)")
    tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _sentence_pieces(file, tokens, kinds)
    for token, of in zip(tokens, kinds, strict=True):
        if of in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=of == _CONTROL, normalized=False)])
    if begins(file):
        bos = file.get("tokenizer.ggml.bos_token_id", int)
        if not 0 <= bos < len(tokens):
            raise ConfigError(f"{file.path}: bos_token_id is {bos}, but there are {len(tokens)} tokens")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0",
            pair=f"{tokens[bos]}:0 $A:0 {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def begins(file: GgufFile) -> bool:
    """Return whether every text begins with the BOS token; files that do not say so have their kind's default."""
    usual = file.metadata.get("tokenizer.ggml.model") == "llama" or pre_of(file) == "llama-bpe"
    return bool(file.get("tokenizer.ggml.add_bos_token", bool, usual))


def pre_of(file: GgufFile) -> str:
    """Return the name of the pre-tokenizer, "" if the file does not say."""
    return str(file.get("tokenizer.ggml.pre", str, ""))


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    pre, merges = pre_of(file), file.get("tokenizer.ggml.merges", list)
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{file.path}: the pre-tokenizer {pre!r} (key tokenizer.ggml.pre) is not supported (allowed: "
            f"{', '.join(PRE_TOKENIZERS)}); serve the original checkpoint folder with its tokenizer.json"
        )
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(_vocabulary(file, tokens), pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre in ("llama-bpe", "qwen2"):
        words = Regex(_WORDS.replace("NUMBERS", r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}"))
        cut = [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGIT_BY_DIGIT else []
        cut = [*digits, pre_tokenizers.ByteLevel(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """Return SentencePiece's BPE: the merge whose piece has the best score comes first."""
    vocabulary, scores = _vocabulary(file, tokens), file.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise ConfigError(f"{file.path}: {len(tokens)} tokens have {len(scores)} scores (key tokenizer.ggml.scores)")
    order = sorted((token for token, of in enumerate(kinds) if of == 1), key=lambda token: (-scores[token], token))
    merges = [pair for token in order for pair in _splits(tokens[token], vocabulary)]
    unknown = next((tokens[token] for token, of in enumerate(kinds) if of == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    is_prefixed = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    prefix = [normalizers.Prepend("▁")] if is_prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if is_prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _splits(piece: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the two pieces of each merge that makes a piece."""
    for at in range(1, len(piece)):
        if piece[:at] in vocabulary and piece[at:] in vocabulary:
            yield piece[:at], piece[at:]


def _vocabulary(file: GgufFile, tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConfigError(f"{file.path}: the vocabulary has {len(tokens) - len(vocabulary)} tokens twice")
    return vocabulary
