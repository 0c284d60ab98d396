"""Text: whole characters only, stop strings wherever they are torn, and an end that does not depend on the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from orchestrator.server.text import (
    MAX_HELD_IDS,
    Chunk,
    Detokenizer,
    FinishReason,
    Output,
    StopFilter,
    StopRule,
)

ROOT = Path(__file__).resolve().parents[5]
#: The demo's byte-level BPE: characters outside its merges are torn into bytes.
DEMO = Tokenizer.from_file(str(ROOT / "models/target/tokenizer.json"))
EOS = 0
TORN = "�"


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 and Mistral have it: a space begins a word, other characters are bytes, the first space is dropped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"ab▁", "▁the", "the", "▁a"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FALLBACK = byte_fallback_tokenizer()


def fallback_ids(*words: str) -> list[int]:
    """Ids of FALLBACK's words; any other text as its bytes."""
    vocab = FALLBACK.get_vocab()
    return [i for w in words for i in ([vocab[w]] if w in vocab else [vocab[f"<0x{b:02X}>"] for b in w.encode()])]


# Emoji with joiners, CJK, combining marks, controls and the replacement character itself, all but surrogates.
texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("👩‍👧🇨🇭é漢字\u0301\x00\x7f�\t a"), max_size=40
)
demo_ids = st.lists(st.integers(0, DEMO.get_vocab_size() - 1), max_size=24)


def pieces_of(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> tuple[list[str], str]:
    """The pieces, one per id, and what the end adds."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in ids], detokenizer.flush()


@settings(deadline=None)
@given(texts)
@example("🙂")
@example("�")
@example("a\x00👩‍👩‍👧‍👦漢")
def test_detokenizer_text_comes_back_whole_and_never_half_a_character(text: str) -> None:
    ids = DEMO.encode(text).ids
    pieces, rest = pieces_of(DEMO, [], ids)
    assert "".join(pieces) + rest == DEMO.decode(ids) == text
    assert sum(piece.count(TORN) for piece in pieces) <= text.count(TORN)


KANJI, KANJI_BYTES = DEMO.encode("漢").ids, fallback_ids("漢")


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "output", "shown"),
    [
        (DEMO, DEMO.encode("a\ufffd").ids, DEMO.encode("ab").ids, "ab"),
        (DEMO, DEMO.encode("\ufffd\ufffd").ids, KANJI, "漢"),
        (DEMO, [*DEMO.encode("a\ufffd").ids, *KANJI[:2]], KANJI[2:], "漢"),
        (DEMO, DEMO.encode("é").ids, DEMO.encode("\ufffd").ids, "\ufffd"),
        (FALLBACK, fallback_ids("a", "\ufffd"), fallback_ids("a", "b"), "ab"),
        (FALLBACK, fallback_ids("\ufffd", "\ufffd"), KANJI_BYTES, "漢"),
        (FALLBACK, [*fallback_ids("a"), *KANJI_BYTES[:1]], [*KANJI_BYTES[1:], *fallback_ids("a")], "漢a"),
    ],
)
def test_the_output_begins_after_the_prompt_whatever_that_ends_in(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], shown: str
) -> None:
    """A replacement character of the prompt's own is no incomplete one, which belongs to the output."""
    pieces, rest = pieces_of(tokenizer, prompt, output)
    assert "".join(pieces) + rest == shown


def test_a_token_may_end_the_prompts_text_and_begin_a_character_of_the_output() -> None:
    pieces = [piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("x漢")]
    vocab = {piece: index for index, piece in enumerate(["".join(pieces)[:2], *"".join(pieces)[2:]])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode([0, 1, 2]) == "x漢"
    assert pieces_of(tokenizer, [0], [1, 2]) == (["", "漢"], "")


@settings(deadline=None)
@given(demo_ids, demo_ids)
def test_detokenizer_any_ids_give_the_decoded_text(prompt: list[int], ids: list[int]) -> None:
    """Broken bytes and special tokens among them, after any prompt."""
    pieces, rest = pieces_of(DEMO, [], ids)
    assert "".join(pieces) + rest == DEMO.decode(ids)
    before = DEMO.decode(prompt)
    if not before.endswith(TORN):
        pieces, rest = pieces_of(DEMO, prompt, ids)
        assert before + "".join(pieces) + rest == DEMO.decode(prompt + ids)


class Counting:
    """Decodes with DEMO, and notes how many ids at once."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def decode(self, ids: Sequence[int]) -> str:
        self.lengths.append(len(ids))
        return DEMO.decode(ids)


#: The bytes of characters outside DEMO's merges, in any order: most never make a character.
torn_ids = st.lists(st.sampled_from([*DEMO.encode("漢🙂Ж�").ids, EOS]), min_size=100, max_size=300)


@settings(deadline=None, max_examples=50)
@given(torn_ids)
@example(DEMO.encode("�" * 100).ids)
@example(DEMO.encode("漢").ids[:1] * 300)
@example([EOS] * 200 + DEMO.encode(" a漢").ids)
def test_detokenizer_output_that_completes_no_character_is_shown_in_time_and_as_it_is(ids: list[int]) -> None:
    counting = Counting()
    detokenizer = Detokenizer(counting, [])  # type: ignore[arg-type]
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == DEMO.decode(ids)
    assert max(counting.lengths) <= 2 * (MAX_HELD_IDS + 1)


def test_detokenizer_special_tokens_give_no_text_and_tear_nothing() -> None:
    ids = DEMO.encode("a漢b").ids
    pieces, rest = pieces_of(DEMO, [], [EOS, *ids, EOS])
    assert "".join(pieces) + rest == "a漢b"


def test_detokenizer_space_of_a_word_tokenizer_is_kept_behind_a_prompt_and_dropped_without() -> None:
    assert pieces_of(FALLBACK, fallback_ids("<s>", "▁the"), fallback_ids("▁a", "▁the")) == ([" a", " the"], "")
    assert pieces_of(FALLBACK, fallback_ids("<s>"), fallback_ids("▁a", "▁the")) == (["a", " the"], "")


def test_detokenizer_byte_fallback_half_a_character_at_the_end_keeps_the_space_before_it() -> None:
    pieces, rest = pieces_of(FALLBACK, fallback_ids("▁the"), [*fallback_ids("▁"), *fallback_ids("🙂")[:2]])
    assert "".join(pieces) + rest == f" {TORN}{TORN}"


byte_words = st.sampled_from([fallback_ids(w) for w in ("a", "▁the", "▁", "é", "🙂", "<s>")])
any_byte = st.integers(3, 258).map(lambda token: [token])


@settings(deadline=None)
@given(st.lists(byte_words | any_byte, max_size=10), st.lists(byte_words | any_byte, max_size=10))
def test_detokenizer_byte_fallback_broken_bytes_never_fail_nor_hide_what_follows(
    prompt: list[list[int]], words: list[list[int]]
) -> None:
    """A broken byte turns its whole run into � after the fact; what is out stays out, and the rest goes on."""
    ids = [*sum(words, []), *fallback_ids("▁the", "a")]
    pieces, rest = pieces_of(FALLBACK, sum(prompt, []), ids)
    assert ("".join(pieces) + rest).endswith("thea")


# Stop strings


def cut_at_first_stop(text: str, strings: Sequence[str], num_early: int = 0) -> tuple[str, bool]:
    """The truth: the stop string that is complete first ends the text; of several complete at once, the longest.

    One that is complete within the first num_early characters is text like any other.
    """
    for end in range(num_early + 1, len(text) + 1):
        if lengths := [len(s) for s in strings if s and text[:end].endswith(s)]:
            return text[: end - max(lengths)], True
    return text, False


def filtered(pieces: Sequence[str], strings: Sequence[str]) -> tuple[str, bool]:
    """What the filter lets through, fed until it stops."""
    stop_filter, shown = StopFilter(strings), ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        assert not any(s and s in shown for s in strings)
        if stop_filter.has_stopped:
            return shown + stop_filter.flush(), True
    return shown + stop_filter.flush(), stop_filter.has_stopped


def splits(text: str) -> list[list[str]]:
    """Every way to tear a text into pieces."""
    if not text:
        return [[]]
    return [[text[:n], *rest] for n in range(1, len(text) + 1) for rest in splits(text[n:])]


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("say STOP it", ["STOP"]),
        ("aaab", ["aab"]),  # the held prefix must slide
        ("ababac!", ["abac"]),
        ("xabcd", ["abcd", "bc"]),  # one inside the other: the inner one is complete first
        ("xabc", ["abc", "bc", "c"]),  # complete at once: all of it goes
        ("abcabd", ["abd", "bca"]),
        ("no stop", ["stopped", "oops"]),  # held back, then released
        ("ab", ["abc", "b\n"]),
        ("漢🙂漢", ["🙂漢"]),
        ("anything", ["", "th"]),
        ("anything", [""]),
        ("anything", []),
    ],
)
def test_stop_filter_every_split_gives_the_cut_of_the_whole_text(text: str, strings: list[str]) -> None:
    expected = cut_at_first_stop(text, strings)
    for pieces in splits(text):
        assert filtered(pieces, strings) == expected, pieces


@settings(max_examples=400)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_stop_filter_random_splits_and_overlapping_stops(pieces: list[str], strings: list[str]) -> None:
    assert filtered(pieces, strings) == cut_at_first_stop("".join(pieces), strings)


@settings(max_examples=400)
@given(
    st.lists(st.text("ab", max_size=4), max_size=4),
    st.lists(st.text("ab", max_size=4), max_size=6),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
@example(["ab"], ["c"], ["ab", "abd"])  # complete too early, held back as the beginning of another, then released
@example(["ab"], ["d"], ["ab", "abd"])  # the same, and the other comes
@example(["aba"], ["ba"], ["aba"])  # once more, from its own end on
def test_stop_filter_a_stop_that_is_complete_too_early_is_text_for_ever(
    early: list[str], pieces: list[str], strings: list[str]
) -> None:
    text = "".join(early + pieces)
    expected = cut_at_first_stop(text, strings, len("".join(early)))
    stop_filter, shown = StopFilter(strings), ""
    for index, piece in enumerate(early + pieces):
        shown += stop_filter.push(piece, index >= len(early))
        assert expected[0].startswith(shown)  # nothing of a stop that counts
        if stop_filter.has_stopped:
            break
    assert (shown + stop_filter.flush(), stop_filter.has_stopped) == expected


# The end of a request


def output_of(rule: StopRule, steps: Sequence[Sequence[int]]) -> tuple[list[int], str, FinishReason | None, list[str]]:
    """Feed steps until the end: ids, text, reason, and the text of every step."""
    output, ids, texts_of_steps = Output(DEMO, [], rule), [], []
    for step in steps:
        chunk = output.push(step, [float(-token) for token in step])
        assert chunk.logprobs == [float(-token) for token in chunk.ids]
        ids += chunk.ids
        texts_of_steps.append(chunk.text)
        assert output.num_tokens == len(ids)
        if output.finish:
            break
    return ids, "".join(texts_of_steps), output.finish, texts_of_steps


def naive_end(rule: StopRule, tokens: Sequence[int]) -> tuple[list[int], str, FinishReason | None]:
    """One token at a time, decoding everything from the start at each."""
    whole, num_early = "", 0  # the longest text so far that ends in no half character; how much of it came too early
    for num in range(1, len(tokens) + 1):
        ids, early = list(tokens[:num]), num <= rule.min_tokens
        if ids[-1] in rule.ids and not early:
            return ids, cut_at_first_stop(DEMO.decode(ids[:-1]), rule.strings, num_early)[0], FinishReason.STOP
        text = DEMO.decode(ids)
        whole = whole if text.endswith(TORN) else text
        num_early = len(whole) if early else num_early
        cut, stopped = cut_at_first_stop(whole, rule.strings, num_early)
        if stopped:
            return ids, cut, FinishReason.STOP
        if num == rule.max_tokens:
            num_early = len(text) if early else num_early
            return ids, cut_at_first_stop(text, rule.strings, num_early)[0], FinishReason.LENGTH
    return list(tokens), whole, None


def torn(tokens: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Cut tokens into steps of the given lengths, then one each."""
    steps, start = [], 0
    for length in [*lengths, *[1] * len(tokens)]:
        steps.append(tokens[start : start + length])
        start += length
    return [step for step in steps if step]


@settings(deadline=None, max_examples=300)
@given(
    tokens=texts.map(lambda text: DEMO.encode(text).ids) | demo_ids,
    lengths=st.lists(st.integers(1, 6), max_size=8),
    max_tokens=st.integers(1, 30),
    stop_ids=st.frozensets(st.sampled_from([EOS, *DEMO.encode(" a漢").ids]), max_size=3),
    strings=st.lists(st.sampled_from(["a", "é", "漢字", "\x00", "a ", " ", "👩‍👧", TORN]), max_size=3),
    min_tokens=st.integers(0, 3) | st.integers(0, 30),
)
@example(tokens=[65, 65, 65], lengths=[3], max_tokens=9, stop_ids=frozenset(), strings=["a"], min_tokens=2)  # "aaa"
@example(tokens=[65, EOS, EOS], lengths=[3], max_tokens=9, stop_ids=frozenset([EOS]), strings=[], min_tokens=2)
def test_output_end_does_not_depend_on_the_steps(
    tokens: list[int],
    lengths: list[int],
    max_tokens: int,
    stop_ids: frozenset[int],
    strings: list[str],
    min_tokens: int,
) -> None:
    rule = StopRule(max_tokens, stop_ids, tuple(strings), min_tokens)
    in_steps, one_by_one = output_of(rule, torn(tokens, lengths)), output_of(rule, [[token] for token in tokens])
    assert in_steps[:3] == one_by_one[:3]
    ids, text, reason = naive_end(rule, tokens)
    assert in_steps[0] == ids
    assert in_steps[2] == reason
    assert reason is not FinishReason.STOP or len(ids) > min_tokens
    if reason:
        assert in_steps[1] == text
    else:
        assert text.startswith(in_steps[1])  # a half character or the beginning of a stop may be held back


IDS = DEMO.encode("one two three four").ids


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_output_close_gives_out_what_was_held_back(reason: FinishReason) -> None:
    output = Output(DEMO, [], StopRule(99, strings=("four!",)))
    text = output.push(IDS).text
    assert (text, text + output.close(reason)) == ("one two three ", "one two three four")
    assert output.finish is reason


def test_output_first_end_stays_and_nothing_comes_behind_it() -> None:
    output = Output(DEMO, [], StopRule(99, strings=("two",)))
    output.push(IDS)
    assert output.close(FinishReason.CANCELLED) == ""
    assert output.push(IDS) == Chunk("", [], [])
    assert (output.finish, output.num_tokens) == (FinishReason.STOP, 2)
