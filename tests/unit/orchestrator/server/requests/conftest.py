"""A request builder of a small deployment, whose tokenizer has a token per byte."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from orchestrator.core.deployment.checkpoint import Checkpoint
from orchestrator.core.grammar import Grammars
from orchestrator.server.request_builder import RequestBuilder
from tests.support.request_building import CONTEXT, DEPLOYMENT, EOS
from tests.support.tiny_models import VOCAB_SIZE, write_byte_tokenizer


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> RequestBuilder:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    checkpoint = Checkpoint(tokenizer, VOCAB_SIZE, CONTEXT, frozenset([EOS]))
    return RequestBuilder(
        DEPLOYMENT, checkpoint, frozenset(["draft"]), Grammars(folder / "tokenizer.json", VOCAB_SIZE, [EOS])
    )
