"""The suffix automaton: every match and every count as in a naive scan of the text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.drafting.automaton import MAX_FOLLOWERS, ROOT, Automaton, Follower, Match

TEXTS = st.lists(st.integers(0, 2), max_size=30)


def places(texts: Sequence[Sequence[int]], string: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (number of the text, end) of every occurrence."""
    for number, text in enumerate(texts):
        for end in range(len(string), len(text) + 1):
            if list(text[end - len(string) : end]) == list(string):
                yield number, end


def scanned(texts: Sequence[Sequence[int]], string: Sequence[int]) -> dict[int, Follower]:
    """The truth: what followed a string, how often, and where last, ends counted through all texts."""
    starts = [sum(map(len, texts[:number])) for number in range(len(texts))]
    found: dict[int, Follower] = {}
    for number, end in places(texts, string):
        if end < len(texts[number]):
            token = texts[number][end]
            times = found[token].times if token in found else 0
            found[token] = Follower(token, times + 1, starts[number] + end + 1)
    return found


def longest(texts: Sequence[Sequence[int]], tokens: Sequence[int], max_depth: int) -> list[int]:
    """The longest suffix of `tokens`, of at most max_depth, that something followed."""
    sizes = range(min(max_depth, len(tokens)), 0, -1)
    suffixes = (list(tokens[len(tokens) - size :]) for size in sizes)
    return next((suffix for suffix in suffixes if scanned(texts, suffix)), [])


def check(automaton: Automaton, match: Match, texts: Sequence[Sequence[int]], string: Sequence[int]) -> None:
    assert match.length == len(string)
    assert (match.state == ROOT) == (not string)
    if string:
        truth = scanned(texts, string)
        assert {follower.token: follower for follower in automaton.followers(match)} == truth
        assert automaton.continued(match) == sum(follower.times for follower in truth.values())


def texts_of(rng: random.Random) -> list[int]:
    """A random text over a small alphabet, or a periodic one, with a slip now and then."""
    alphabet, length = rng.choice([1, 2, 3, 5]), rng.randint(1, 40)
    text = [rng.randrange(alphabet) for _ in range(length)]
    if rng.random() < 0.4:
        period = rng.randint(1, 4)
        text = [text[i % period % length] for i in range(length)]
        text[rng.randrange(length)] = rng.randrange(alphabet)
    return text


def test_automaton_repeated_suffix_and_followers_equal_a_scan_at_every_length_of_2000_texts() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        text, max_depth = texts_of(rng), rng.randint(1, 6)
        automaton = Automaton(max_depth)
        for end in range(len(text) + 1):
            check(automaton, automaton.repeated(), [text[:end]], longest([text[:end]], text[:end], max_depth))
            automaton.extend(text[end : end + 1])


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=5), TEXTS, st.integers(1, 5))
def test_automaton_of_several_sequences_finds_what_occurs_in_one_of_them(
    texts: list[list[int]], tokens: list[int], max_depth: int
) -> None:
    automaton = Automaton(max_depth)
    for text in texts:
        automaton.begin()
        automaton.extend(text)
    check(automaton, automaton.find(tokens), texts, longest(texts, tokens, max_depth))


@settings(max_examples=300, deadline=None)
@given(TEXTS.filter(bool), st.lists(st.integers(0, 5), max_size=12), st.integers(1, 5))
def test_automaton_following_a_match_keeps_a_suffix_that_occurs(
    text: list[int], choices: list[int], max_depth: int
) -> None:
    """Also after the end of the text, where the match goes on with the longest suffix that has a follower."""
    automaton = Automaton(max_depth)
    automaton.extend(text)
    match, string = automaton.repeated(), longest([text], text, max_depth)
    for choice in choices:
        followers = automaton.followers(match) if match.state != ROOT else []
        if not followers:
            break
        token = followers[choice % len(followers)].token
        match, string = automaton.follow(match, token), [*string, token][-max_depth:]
        while string and not scanned([text], string):
            string = string[1:]
        check(automaton, match, [text], string)


@pytest.mark.parametrize(
    ("text", "length", "followers"),
    [
        ([], 0, {}),
        ([7], 0, {}),
        ([7, 7], 1, {7: 1}),
        ([1, 2, 3, 9, 2, 4, 1, 2], 2, {3: 1}),
        ([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2], 2, {3: 2, 4: 1}),
        ([5, 6, 5, 6, 5, 6], 2, {5: 2}),  # max_depth cuts the match to 2
    ],
)
def test_automaton_by_hand(text: list[int], length: int, followers: dict[int, int]) -> None:
    automaton = Automaton(2)
    automaton.extend(text)
    match = automaton.repeated()
    assert match.length == length
    if length:
        assert {follower.token: follower.times for follower in automaton.followers(match)} == followers


def test_automaton_size_is_linear_in_the_text() -> None:
    rng = random.Random(2)
    for text in ([rng.randrange(4) for _ in range(3000)], [0, 1] * 1500, [0] * 3000, list(range(3000))):
        automaton = Automaton(8)
        automaton.extend(text)
        assert automaton.num_tokens == len(text)
        assert len(automaton._next) <= 2 * len(text)
        assert sum(map(len, automaton._next)) <= 3 * len(text)


def test_automaton_increments_per_token_are_bounded_by_the_depth() -> None:
    class Counting(list):  # type: ignore[type-arg]
        written = 0

        def __setitem__(self, index: object, value: object) -> None:
            self.written += 1
            super().__setitem__(index, value)  # type: ignore[assignment, index]

    automaton = Automaton(5)
    automaton._count = counts = Counting(automaton._count)
    automaton.extend([0] * 1000)  # the chain of links is as long as the text
    assert counts.written <= 6 * 1000


def test_automaton_state_with_very_many_followers_shows_the_first_of_them() -> None:
    automaton = Automaton(2)
    automaton.extend(token for follower in range(1, 2 * MAX_FOLLOWERS) for token in (0, follower))
    automaton.extend([0])
    shown = automaton.followers(automaton.repeated())
    assert [follower.token for follower in shown] == list(range(1, MAX_FOLLOWERS + 1))
