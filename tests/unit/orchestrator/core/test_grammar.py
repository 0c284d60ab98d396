"""Grammars: masks and pruned drafts equal what a fresh parser says, walks end in what was asked, bad guides are told."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from orchestrator.core.errors import ConfigError, RequestError
from orchestrator.core.grammar import MAX_COMPILED, Grammars
from orchestrator.core.grammar_matcher import Matcher
from orchestrator.core.sampling_params import Grammar
from orchestrator.core.tree import TokenTree

pytestmark = pytest.mark.unit

FILE = Path(__file__).resolve().parents[4] / "models/target/tokenizer.json"
VOCAB_SIZE = 4100  # four rows that the tokenizer does not know
EOS = 0
DEMO = Tokenizer.from_file(str(FILE))
RAW = LLTokenizer(FILE.read_text(encoding="utf-8"), eos_token=EOS)
GRAMMARS = Grammars(FILE, VOCAB_SIZE, [EOS])

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["alpha", "beta", "ζήτα"]},
        "size": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
    "required": ["name", "kind", "size", "tags", "inner"],
    "additionalProperties": False,
}
OBJECT = Grammar("json_schema", json.dumps(SCHEMA))
ANY = Grammar("json", "")
WORDS = Grammar("regex", "(foo|bar|naïve|日本)+-[0-9]{2,4}(é|🙂)*")
ALL = pytest.mark.parametrize("grammar", [OBJECT, ANY, WORDS], ids=["schema", "json", "regex"])


def ids(text: str) -> list[int]:
    return DEMO.encode(text).ids


def letters(text: str) -> list[int]:
    """One token a byte, so that characters are torn."""
    alone = {RAW.decode_bytes([token]): token for token in range(RAW.vocab_size)}
    return [alone[bytes([byte])] for byte in text.encode()]


def fresh(grammar: Grammar, tokens: list[int]) -> LLMatcher | None:
    """The library alone, at the state after the tokens; None where they break the grammar."""
    text = '{"type": ["object", "array"]}' if grammar.kind == "json" else grammar.text
    if grammar.kind == "regex":
        definition = LLMatcher.grammar_from_regex(text)
    else:
        definition = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": " "})
    library = LLMatcher(RAW, definition, log_level=0)
    known = all(0 < token < RAW.vocab_size for token in tokens)
    return library if known and library.try_consume_tokens(tokens) == len(tokens) else None


def expected(grammar: Grammar, tokens: list[int], end_ids: tuple[int, ...]) -> np.ndarray:
    """The law, token by token."""
    library = None if set(tokens) & set(end_ids) else fresh(grammar, tokens)
    if library is None:
        return np.ones(VOCAB_SIZE, np.bool_)
    legal = [0 < t < RAW.vocab_size and library.validate_tokens([t]) == 1 for t in range(VOCAB_SIZE)]
    return np.array([ok or (t in end_ids and library.is_accepting()) for t, ok in enumerate(legal)])


def walk(grammar: Grammar, rng: random.Random, length: int, end_ids: tuple[int, ...] = ()) -> list[int]:
    """Up to `length` random legal content tokens, by the library alone."""
    library, tokens = fresh(grammar, []), []
    while library is not None and len(tokens) < length:
        bits = np.unpackbits(np.frombuffer(library.compute_bitmask(), np.uint8), bitorder="little")
        content = [t for t in np.flatnonzero(bits).tolist() if t != EOS and t not in end_ids]
        if not content:
            break
        tokens.append(rng.choice(content))
        library.consume_token(tokens[-1])
    return tokens


def random_path(grammar: Grammar, output: list[int], rng: random.Random) -> list[int]:
    """A path of which some are legal, some break off, some end."""
    matcher = GRAMMARS.matcher(grammar, [EOS])
    path: list[int] = []
    for _ in range(rng.randrange(5)):
        matcher.follow([*output, *path])
        legal = np.flatnonzero(matcher.legal([])).tolist()
        path.append(rng.choice(legal) if legal and rng.random() < 0.8 else rng.choice([EOS, 5, 300, 4098]))
    return path


def random_tree(grammar: Grammar, output: list[int], rng: random.Random) -> TokenTree:
    return TokenTree.from_paths([random_path(grammar, output, rng) for _ in range(6)])


@ALL
@pytest.mark.parametrize("end_ids", [(EOS,), (EOS, 93, 4099), (16, 300), ()])
def test_legal_is_what_a_fresh_parser_accepts_token_by_token(grammar: Grammar, end_ids: tuple[int, ...]) -> None:
    rng = random.Random(7)
    for _ in range(3):
        output = walk(grammar, rng, rng.randrange(12), end_ids)
        matcher = GRAMMARS.matcher(grammar, end_ids)
        matcher.follow(output)
        for path in ([], random_path(grammar, output, rng), random_path(grammar, output, rng)):
            legal = matcher.legal(path)
            assert legal.shape == (VOCAB_SIZE,) and legal.dtype == np.bool_
            assert np.array_equal(legal, expected(grammar, output + path, end_ids)), (output, path)


@ALL
def test_legal_and_kept_leave_the_state_as_it_was(grammar: Grammar) -> None:
    rng = random.Random(3)
    matcher = GRAMMARS.matcher(grammar, [EOS])
    output = walk(grammar, rng, 6)
    matcher.follow(output)
    before = matcher.legal([])
    for _ in range(20):
        matcher.legal(random_path(grammar, output, rng))
        matcher.legal_nodes(random_tree(grammar, output, rng))
        assert np.array_equal(matcher.legal([]), before)


@ALL
@pytest.mark.parametrize("end_ids", [(EOS,), (EOS, 93), (300,)])
def test_kept_equals_brute_force(grammar: Grammar, end_ids: tuple[int, ...]) -> None:
    rng = random.Random(11)
    matcher = GRAMMARS.matcher(grammar, end_ids)
    for _ in range(12):
        output = walk(grammar, rng, rng.randrange(15), end_ids)
        matcher.follow(output)
        tree = random_tree(grammar, output, rng)
        paths: list[list[int]] = [[]]
        brute = []
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True), 1):
            paths.append([*paths[parent], token])
            whole = parent == 0 or (parent in brute and paths[parent][-1] not in end_ids)
            library = fresh(grammar, output + paths[parent]) if whole else None
            content = 0 < token < RAW.vocab_size
            if library and (
                (token in end_ids and library.is_accepting()) or (content and library.validate_tokens([token]) == 1)
            ):
                brute.append(node)
        kept = matcher.legal_nodes(tree)
        assert kept.dtype == np.int32 and kept.tolist() == brute
        assert tree.only(kept).num_nodes == len(brute)


@ALL
def test_follow_of_growing_shrinking_and_diverging_outputs_equals_fresh(grammar: Grammar) -> None:
    rng = random.Random(5)
    matcher = GRAMMARS.matcher(grammar, [EOS])
    whole = walk(grammar, rng, 25)
    for _ in range(60):
        output = whole[: rng.randrange(len(whole) + 1)]
        if rng.random() < 0.3:
            output = output + [rng.choice([EOS, 5, 300, 4098, 99999, -1])] + whole[:2]
        if rng.random() < 0.2:
            whole = output[:3] + walk(grammar, rng, 25)[3:]
        matcher.follow(tuple(output) if rng.random() < 0.5 else output)
        again = GRAMMARS.matcher(grammar, [EOS])
        again.follow(output)
        assert np.array_equal(matcher.legal([]), again.legal([])), output
        assert np.array_equal(matcher.legal([]), expected(grammar, output, (EOS,))), output


def decoded(grammar: Grammar, seed: int) -> str:
    """Sample uniformly from what is legal, leaning to the end after a while."""
    rng = random.Random(seed)
    matcher, output = GRAMMARS.matcher(grammar, [EOS]), []
    closing = [*ids('"'), *ids("}"), *ids("]"), *ids("0"), *ids("-")]
    for _ in range(2000):
        matcher.follow(output)
        legal = np.flatnonzero(matcher.legal([])).tolist()
        assert legal, output
        wish = [token for token in [EOS, *closing] if token in legal] if len(output) > 30 else []
        token = wish[0] if wish and rng.random() < 0.7 else rng.choice(legal)
        if token == EOS:
            return RAW.decode_bytes(output).decode("utf-8")
        output.append(token)
    raise AssertionError("no end")


def fits(value: object) -> bool:
    """The check of SCHEMA, by hand."""
    assert isinstance(value, dict) and set(value) == set(SCHEMA["required"])
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert value["kind"] in ("alpha", "beta", "ζήτα")
    assert type(value["size"]) in (int, float)
    assert len(value["tags"]) <= 3 and all(float(tag).is_integer() for tag in value["tags"])
    return type(value["inner"]["ok"]) is bool


@pytest.mark.parametrize("seed", range(12))
def test_random_walks_end_in_what_was_asked_for(seed: int) -> None:
    assert fits(json.loads(decoded(OBJECT, seed)))
    assert isinstance(json.loads(decoded(ANY, seed)), (dict, list))
    assert re.fullmatch(WORDS.text, decoded(WORDS, seed))


def test_a_finished_grammar_leaves_the_end_ids_alone() -> None:
    matcher = GRAMMARS.matcher(Grammar("regex", "abc"), [EOS, 7, 4099, 5000])
    for output, path in ((ids("abc"), []), ([], ids("abc")), (letters("abc"), [])):
        matcher.follow(output)
        assert np.flatnonzero(matcher.legal(path)).tolist() == [0, 7, 4099]
    matcher.follow(letters("abc"))
    assert matcher.legal_nodes(TokenTree.from_paths([[7, 7], [65], [0], [4098]])).tolist() == [1, 4]
    for back in (2, 1, 3, 0):
        matcher.follow(letters("abc")[:back])
        assert np.array_equal(matcher.legal([]), expected(Grammar("regex", "abc"), letters("abc")[:back], (0, 7, 4099)))


def test_the_end_of_the_tokenizer_is_never_content() -> None:
    matcher = GRAMMARS.matcher(Grammar("regex", "(?s:.*)"), [5])
    assert not matcher.legal([])[EOS] and matcher.legal([])[5]
    matcher.follow([EOS])
    assert matcher.legal([]).all()


@pytest.mark.parametrize("vocab_size", [4000, 4096, 4097, 8192])
def test_masks_are_as_wide_as_the_model(vocab_size: int) -> None:
    legal = Grammars(FILE.read_text(encoding="utf-8"), vocab_size, [EOS]).matcher(WORDS, [EOS]).legal([])
    assert legal.shape == (vocab_size,)
    assert np.flatnonzero(legal).tolist() == np.flatnonzero(expected(WORDS, [], ())[:vocab_size]).tolist()


BROKEN = {
    "open group": Grammar("regex", "(a|"),
    "open class": Grammar("regex", "["),
    "many open": Grammar("regex", "(" * 30000),
    "deep": Grammar("regex", "(" * 30000 + ")" * 30000),
    "look-ahead": Grammar("regex", "(?=a)b"),
    "boundary": Grammar("regex", r"\bfoo"),
    "back-reference": Grammar("regex", r"(a)\1"),
    "many joined": Grammar("json_schema", json.dumps({"allOf": [{"pattern": f".*{i}.*"} for i in range(9)]})),
    "joined to a number": Grammar("json_schema", '{"allOf": 5}'),
    "joined to true": Grammar("json_schema", '{"items": {"allOf": true}}'),
    "huge count": Grammar("regex", "a{99999999999}"),
    "nothing matches": Grammar("regex", r"[^\x00-\x{10FFFF}]"),
    "half a surrogate": Grammar("regex", "\ud800"),
    "half a surrogate in JSON": Grammar("json_schema", '{"\ud800": 1}'),
    "1 MB expression": Grammar("regex", "a" * 2**20),
    "1 MB schema": Grammar("json_schema", json.dumps({"enum": ["a" * 2**20]})),
    "no text": Grammar("json_schema", ""),
    "no JSON": Grammar("json_schema", "{"),
    "a list": Grammar("json_schema", "[]"),
    "a number": Grammar("json_schema", "1"),
    "null": Grammar("json_schema", "null"),
    "false": Grammar("json_schema", "false"),
    "itself": Grammar("json_schema", '{"$ref": "#"}'),
    "itself twice": Grammar("json_schema", '{"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}'),
    "deep list": Grammar("json_schema", "[" * 60000),
    "deep object": Grammar("json_schema", '{"a":' * 10000 + "1" + "}" * 10000),
    "no such type": Grammar("json_schema", '{"type": "nope"}'),
    "not served": Grammar("json_schema", '{"not": {}}'),
    "elsewhere": Grammar("json_schema", '{"$ref": "http://127.0.0.1:1/x"}'),
    "a file": Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'),
    "nowhere": Grammar("json_schema", '{"$ref": "#/$defs/x"}'),
    "broken pattern": Grammar("json_schema", '{"type": "string", "pattern": "("}'),
    "empty range": Grammar("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
    "too big a number": Grammar("json_schema", '{"const": 1e999}'),
}
HARD = {
    "nested counts": Grammar("regex", "(a{1,9999}){1,9999}"),
    "nested stars": Grammar("regex", "((((x*)*)*)*)*y"),
    "many states": Grammar("regex", "(a|b)*a(a|b){30}"),
    "long": Grammar("regex", "a" * 60000),
    "many words": Grammar("regex", "|".join(f"w{i}" for i in range(8000))),
    "unicode classes": Grammar("regex", r"\p{L}{1,1000}"),
    "no text": Grammar("regex", ""),
    "nested schema": Grammar("json_schema", '{"items":' * 60 + "true" + "}" * 60),
    "tree of itself": Grammar("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}}'),
    "hard pattern": Grammar("json_schema", '{"type": "string", "pattern": "(a{1,9999}){1,9999}"}'),
    "many values": Grammar("json_schema", json.dumps({"enum": [f"v{i}" for i in range(6000)]})),
    "many properties": Grammar("json_schema", json.dumps({"properties": {f"v{i}": {} for i in range(2000)}})),
    "long string": Grammar("json_schema", '{"type": "string", "minLength": 100000000}'),
}


def step(grammar: Grammar) -> None:
    """Check it, and go a few tokens into it."""
    GRAMMARS.check(grammar)
    matcher, output = GRAMMARS.matcher(grammar, [EOS]), []
    for _ in range(4):
        matcher.follow(output)
        output.append(int(np.flatnonzero(matcher.legal([]))[-1]))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_guide_is_refused_at_once_and_quietly(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"guided_decoding_guide\)$") as caught:
        GRAMMARS.check(BROKEN[name])
    assert time.monotonic() - start < 5 and len(str(caught.value)) < 500
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", HARD)
def test_a_hard_guide_works_or_is_refused_fast_and_quietly(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    try:
        step(HARD[name])
    except RequestError as error:
        assert "guided_decoding_guide" in str(error)
    assert time.monotonic() - start < 10
    assert capfd.readouterr() == ("", "")


def test_an_unknown_kind_is_told_with_the_nearest() -> None:
    with pytest.raises(
        RequestError, match=r"did you mean 'regex'.*json, json_schema, regex; input guided_decoding_guide_type"
    ):
        GRAMMARS.check(Grammar("regexp", "a"))


@pytest.mark.parametrize("source", ["/nowhere/tokenizer.json", "{}", "{"])
def test_a_broken_tokenizer_is_the_deployments_error(source: str) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Grammars(source, 10, []).check(ANY)


def test_compiled_grammars_are_bounded_and_pristine() -> None:
    grammars = Grammars(FILE, VOCAB_SIZE, [EOS])
    first = grammars.matcher(WORDS, [EOS])
    first.follow(ids("foo"))
    assert np.array_equal(grammars.matcher(WORDS, [EOS]).legal([]), expected(WORDS, [], (EOS,)))
    for number in range(3 * MAX_COMPILED):
        grammars.check(Grammar("regex", f"a{number}"))
    assert len(grammars._compiled) == MAX_COMPILED
    assert np.array_equal(first.legal([]), expected(WORDS, ids("foo"), (EOS,)))


def test_many_threads_share_one_grammar() -> None:
    grammars, wrong = Grammars(FILE, VOCAB_SIZE, [EOS]), []

    def work(seed: int) -> None:
        matcher: Matcher = grammars.matcher(OBJECT, [EOS])
        output = walk(OBJECT, random.Random(seed), 15)
        for length in range(len(output)):
            matcher.follow(output[:length])
            if not matcher.legal([])[output[length]]:
                wrong.append((seed, length))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
