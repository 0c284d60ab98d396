"""What an engine cannot serve is refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.context import Context
from orchestrator.core.deployment.capabilities import Capabilities, capabilities_of, executor_capabilities
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.engine_manifest import read_manifest
from orchestrator.core.errors import RequestError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.methods import METHODS
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Rule
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import StepOptions
from runtime.trtllm.client import TrtllmClient
from tests.support.engines import ask, own_text
from tests.support.executor import (
    GREEDY,
    PROMPT,
    config_of,
    request,
    sampled,
    standin,
)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            {"drafts": TokenTree.from_paths([[1], [2]])},
            "the step with siblings in its tree: TensorRT-LLM's executor sam",
        ),
        ({"sampling": sampled(rule=Rule.COUPLED)}, "rule 'coupled': TensorRT-LLM's executor samples by itself"),
        ({"sampling": sampled(rule=Rule.BLOCK)}, "; its own: rejection, engine (input rule)"),
        ({"sampling": sampled(rule=Rule.TYPICAL)}, "rule 'typical'"),
        ({"options": StepOptions(target_tokens=True)}, "which learns from the target's tokens"),
        ({"options": StepOptions(features_from=0)}, "which drafts from hidden states"),
        ({"sampling": sampled(1.0, typical_p=0.5)}, "typical_p: the executor has no such rule"),
        ({"sampling": sampled(1.0, min_p=0.1)}, "min_p: it is not established in which order"),
        ({"sampling": sampled(presence_penalty=1.0)}, "presence_penalty: a step hands it the whole text as a prompt"),
        ({"sampling": sampled(frequency_penalty=1.0)}, "frequency_penalty: a step hands it"),
        (
            {"sampling": sampled(logits_options=LogitsOptions(allowed=(1,)))},
            "allowed_token_ids: the executor has no such mask",
        ),
        (
            {"sampling": sampled(logits_options=LogitsOptions(grammar=Grammar("json", "")))},
            "guided_decoding_guide_type: a step hands",
        ),
        ({"sampling": sampled(logits_options=LogitsOptions(bad_words=((1, 2),)))}, "bad_words of several tokens"),
        (
            {"sampling": sampled(min_tokens=1, logits_options=LogitsOptions(end_ids=(1, 2)))},
            "min_tokens with several end ids",
        ),
    ],
)
def test_option_that_the_executor_lacks_is_refused_with_the_reason(
    client: TrtllmClient[StepRequest], step: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(client, request(PROMPT, **step))
    assert str(caught.value).startswith("the target's engine does not serve ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_context_beyond_the_engine_is_refused_with_its_length(
    client: TrtllmClient[StepRequest], checkpoint: Path
) -> None:
    with pytest.raises(RequestError, match="has 256 tokens, the engine was built for at most 255"):
        ask(client, request([1] * 256))
    answer = ask(client, request([1] * 255, [1] * 20))
    assert (answer.path, answer.next_token) == ((), own_text(checkpoint, [1] * 255, 1)[0]), "no room is left for drafts"


def test_capabilities_say_which_methods_an_engine_serves(folder: Path, tmp_path: Path) -> None:
    external = capabilities_of(config_of(folder))
    plain = executor_capabilities(read_manifest(folder).model_copy(update={"mode": ""}))
    medusa = executor_capabilities(read_manifest(folder).model_copy(update={"mode": "medusa", "method": "medusa"}))
    asked = GREEDY, StepOptions()
    assert external.refusal(*asked, method="suffix") == ""
    tree = external.refusal(*asked, method="suffix", branches="tree true")
    assert "method 'suffix' with tree true: " in tree and "chains alone; engine = 'torch' serves it" in tree
    lookahead = external.refusal(*asked, method="lookahead", branches="a window")
    assert "; engines built for lookahead_decoding serve it, or engine = 'torch'" in lookahead
    assert plain.refusal(*asked, method="none") == ""
    assert plain.method_refusal("suffix") == (
        "the target's engine does not serve the method 'suffix': it was built for no drafts; engines built for "
        "draft_tokens_external serve it, or engine = 'torch' (input speculation)"
    )
    assert medusa.method_refusal("medusa") == medusa.method_refusal("none") == ""
    assert medusa.refusal(*asked, method="medusa") == medusa.refusal(*asked, method="none") == ""
    assert "drafts by itself, with the method 'medusa'" in medusa.method_refusal("suffix")
    assert "hidden states to itself; engines built for eagle serve it" in external.method_refusal("eagle")
    assert "; engine = 'torch' serves it" in external.method_refusal("prompt_lookup+eagle3")
    chains = [name for name, method in METHODS.items() if method.needs_only_tokens]
    assert chains == ["auto", "prompt_lookup", "ngram", "suffix", "predicted", "draft_model"]
    assert [external.method_refusal(method) for method in chains] == [""] * len(chains)
    assert "temperature: it is not established" in medusa.refusal(sampled(1.0), StepOptions(), method="none")
    assert (
        Capabilities().refusal(
            sampled(1.0, min_p=0.1, rule=Rule.BLOCK), StepOptions(target_tokens=True), method="jacobi"
        )
        == ""
    )
    ours = Capabilities().refusal(GREEDY, StepOptions())
    assert ours.endswith(
        "to engines that sample by themselves; its own: coupled, rejection, block, typical (input rule)"
    )
    assert capabilities_of(ServingConfig(target=str(tmp_path))) == Capabilities()


def test_salts_share_no_blocks(client: TrtllmClient[StepRequest]) -> None:
    salts, executor = [], standin(client)
    enqueue = executor.enqueue_request
    executor.enqueue_request = lambda asked: salts.append(asked.cache_salt_id) or enqueue(asked)
    for salt in ("", "a", "b", "a"):
        ask(client, StepRequest(delta_of(Context(PROMPT), 0, 1, salt), TokenTree.bare(), GREEDY, StepOptions(), 1000))
    assert salts[0] is None and salts[1] == salts[3] and len(set(salts)) == 3
