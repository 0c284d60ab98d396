"""TensorRT-LLM commands: every flag of every kind of plan against the names, types and choices in flags.json."""

import json
from dataclasses import replace

import pytest

from build.trtllm.commands import stages_of
from build.trtllm.plan import make_plan
from build.trtllm.spec import EngineSpec
from build.trtllm.versions import RELEASES
from tests.unit.build.test_trtllm_plan import DATA, DRAFT, EAGLE, LLAMA_8B, MEDUSA, REDRAFTER, all_plans, planned

FACTS = json.loads((DATA / "flags.json").read_text())


def known_flags(argv):
    """Return (flags of this command, its words after the program)."""
    if argv[0] == "trtllm-build":
        return FACTS["trtllm-build"], argv[1:]
    script = next(row for row in FACTS["scripts"].values() if argv[1] in in_container(row["script"]))
    return script["flags"], argv[2:]


def in_container(script):
    return [f"/app/{script}", f"/app/{script.replace('models/core/', '')}"]  # until 0.18: examples/llama


def pairs(words):
    """Return {flag: value, or None for a switch}."""
    found = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            assert word not in found, word
            follows = words[at + 1] if at + 1 < len(words) else "--"
            found[word] = None if follows.startswith("--") else follows
    return found


def check_flag(name, value, fact):
    kind = fact.get("type") or {int: "int", bool: "flag"}.get(type(fact.get("default")), "str")
    if kind == "flag":
        assert value is None, name
    elif kind == "int":
        assert value.isdecimal(), name
    elif kind == "enable/disable":
        assert value in ("enable", "disable"), name
    assert not fact.get("choices") or value in fact["choices"], (name, value)


def check_command(argv):
    """Check a command's flags; return their names."""
    known, words = known_flags(argv)
    for name, value in pairs(words).items():
        assert name in known, name
        check_flag(name, value, known[name])
    return pairs(words).keys()


def test_every_flag_is_known_and_its_value_of_its_type():
    seen = set()
    for plan in all_plans():
        for stage in plan.stages:
            seen |= check_command(stage.argv)
    assert len(seen) == 40  # a flag that no plan uses any more has lost its test


def test_every_size_is_given_and_never_what_drafts_forbid():
    for plan in all_plans():
        for stage in plan.stages:
            if stage.argv[0] != "trtllm-build":
                continue
            flags = pairs(stage.argv[1:])
            sizes = {"batch_size", "input_len", "seq_len", "beam_width", "num_tokens"}
            assert {f"--max_{size}" for size in sizes} <= flags.keys()
            assert (flags["--max_beam_width"], flags["--use_paged_context_fmha"]) == ("1", "enable")
            drafts = int(flags.get("--max_draft_len", 0))
            assert bool(drafts) == ("--speculative_decoding_mode" in flags)
            assert int(flags["--max_num_tokens"]) >= int(flags["--max_batch_size"]) * (drafts + 1)


def test_mode_stands_on_the_target_only():
    target, draft = (stage.argv for stage in planned(DRAFT).stages if stage.argv[0] == "trtllm-build")
    assert pairs(target)["--speculative_decoding_mode"] == "draft_tokens_external"
    assert not {"--speculative_decoding_mode", "--max_draft_len"} & pairs(draft).keys()


def test_server_parameters_have_the_servers_names():
    for plan in all_plans():
        for parameters in plan.servers.values():
            assert parameters.keys() <= set(FACTS["server_parameters"])
            assert parameters.get("decoding_mode", "eagle") in FACTS["decoding_modes"]


def test_lookahead_sizes_reach_the_server_by_their_names():
    sizes = {"lookahead_window": 5, "lookahead_ngram": 3, "lookahead_guesses": 4}
    server = planned({**LLAMA_8B, "method": "lookahead", **sizes}).servers["target"]
    names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    assert [server[name] for name in names] == ["5", "3", "4"]


def test_releases_name_the_newest_container_of_their_version():
    newest = {version: tag for tag, version in sorted(FACTS["containers"].items())}
    assert {r.version: r.container for r in RELEASES.values()}.items() <= newest.items()


@pytest.mark.parametrize(
    ("quantisation", "script"),
    [("none", "models/core/llama/convert_checkpoint.py"), ("fp8", "quantization/quantize.py")],
)
def test_redrafter_is_added_to_a_base_that_is_converted_or_quantised_before(quantisation, script):
    base, heads, build = planned({**REDRAFTER, "quantisation": quantisation}).stages
    assert [stage.name for stage in (base, heads, build)] == ["convert-target-base", "convert-target", "build-target"]
    assert base.argv[1] == f"/app/examples/{script}" and "--drafter_model_dir" not in base.argv
    assert heads.argv[1] == "/app/examples/redrafter/convert_checkpoint.py" and "--model_dir" not in heads.argv
    assert pairs(heads.argv)["--base_model_checkpoint_dir"] == base.output == heads.inputs[0]
    assert pairs(build.argv)["--checkpoint_dir"] == heads.output


def test_prompts_of_any_length_are_computed_in_parts():
    for plan in all_plans():
        assert all(parameters["enable_chunked_context"] == "true" for parameters in plan.servers.values())


def test_dynamic_tree_is_a_matter_of_the_executor_not_of_the_build():
    static, dynamic = (planned({**EAGLE, "method": method}) for method in ("eagle", "eagle2"))
    assert [stage.argv for stage in static.stages] == [stage.argv for stage in dynamic.stages]
    assert dynamic.servers["target"]["decoding_mode"] == "eagle"


def test_hub_id_is_fetched_first():
    spec = EngineSpec(**DRAFT)
    plan = make_plan(spec)
    stages = stages_of(replace(plan.engines[0], source="meta-llama/Llama-3.1-8B"), spec)
    assert [stage.name for stage in stages] == ["fetch-target", "convert-target", "build-target"]
    assert stages[0].argv[3:] == ("meta-llama/Llama-3.1-8B", "sources/target")
    assert pairs(stages[1].argv)["--model_dir"] == stages[0].output == stages[1].inputs[0]


@pytest.mark.parametrize(
    ("argv", "wrong"),
    [
        (["trtllm-build", "--max_draft_length", "3"], "--max_draft_length"),
        (["trtllm-build", "--max_draft_len", "three"], "--max_draft_len"),
        (["trtllm-build", "--speculative_decoding_mode", "lookahead"], "--speculative_decoding_mode"),
        (["trtllm-build", "--use_paged_context_fmha", "true"], "--use_paged_context_fmha"),
        (["trtllm-build", "--gather_context_logits", "1"], "--gather_context_logits"),
        (["python3", "/app/examples/eagle/convert_checkpoint.py", "--qformat", "fp8"], "--qformat"),
    ],
)
def test_check_fails_on_a_flag_that_would(argv, wrong):
    with pytest.raises(AssertionError, match=wrong):
        check_command(argv)


def test_quantised_medusa_keeps_its_heads():
    flags = pairs(planned({**MEDUSA, "quantisation": "fp8"}).stages[0].argv)
    assert (flags["--qformat"], flags["--num_medusa_heads"], flags["--max_draft_len"]) == ("fp8", "4", "63")
