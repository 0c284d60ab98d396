"""`python -m build.trtllm.repository`: model folders for NVIDIA's Triton backend `tensorrtllm`, ready to be loaded.

From an engine plan to `tensorrt_llm` (the target) and, with a draft model, `tensorrt_llm_draft`: each a complete
config.pbtxt without placeholders. EXPERIMENTAL: names, types and dims are checked against a table made from NVIDIA's
own configuration; no server has loaded one of these folders.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from build.trtllm.backend_tensors import Tensor, inputs, outputs
from build.trtllm.engines import Engine
from build.trtllm.plan import Plan, make_plan
from build.trtllm.spec import load_spec
from orchestrator.core.deployment.config import BACKEND_MODELS
from orchestrator.core.deployment.engine_trees import TREES, read_tree
from orchestrator.core.errors import ConfigError
from runtime.trtllm.executor.library import WORKER


def write_repository(plan: Plan, engines: Path, out: Path) -> list[Path]:
    """Write a model folder for each engine of the plan; return the config.pbtxt files.

    engines: the output folder of the plan's build, as the server sees it.
    Raises ConfigError for a release whose tensors are not known, or a method that the backend has no parameter for.
    """
    if plan.spec.method == "eagle2" or plan.spec.eagle_posterior:
        raise ConfigError("NVIDIA's backend has no parameter for EAGLE's dynamic tree or sampling (key method)")
    texts = {BACKEND_MODELS[engine.role]: _config_text(plan, engine, engines) for engine in plan.engines}
    for name, text in texts.items():
        (out / name / "1").mkdir(parents=True, exist_ok=True)  # Triton wants a version; the engine is elsewhere
        (out / name / "config.pbtxt").write_text(text, encoding="utf-8")
    return [out / name / "config.pbtxt" for name in texts]


def _config_text(plan: Plan, engine: Engine, engines: Path) -> str:
    """Return the config.pbtxt of one engine of the plan."""
    version = plan.spec.trtllm_version
    lines = (
        f"# The {engine.role} for method {plan.spec.method}, TensorRT-LLM {version}; made by build.trtllm.repository",
        f"name: {_quoted(BACKEND_MODELS[engine.role])}",
        'backend: "tensorrtllm"',
        f"max_batch_size: {engine.limits.max_batch_size}",
        # Our calls are nested, and nested decoupled calls can hang Triton (orchestrator/server/clients.py).
        "model_transaction_policy { decoupled: false }",
        "dynamic_batching { max_queue_delay_microseconds: 0 }",  # the executor forms the batches
        "",
        *_list("input", [_input(tensor) for tensor in inputs(version)]),
        "",
        *_list("output", [_tensor(tensor) for tensor in outputs(version)]),
        "",
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
        "",
        *(
            f"parameters {{ key: {_quoted(key)}, value {{ string_value: {_quoted(value)} }} }}"
            for key, value in _parameters(plan, engine, engines).items()
        ),
    )
    return "\n".join(lines) + "\n"


def _parameters(plan: Plan, engine: Engine, engines: Path) -> dict[str, str]:
    """Return the parameters that differ from the backend's defaults, and those whose value our adapter relies on.

    A parameter that is left out is not specified, except the three of guided decoding, without which the backend makes
    no instance (inflight_batcher_llm/src/model_instance_state.cc, getGuidedDecodingConfigFromParams).
    """
    parameters = {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(engines / engine.engine_folder),
        "executor_worker_path": str(WORKER),
        "max_beam_width": str(engine.limits.max_beam_width),
        "batch_scheduler_policy": "guaranteed_no_evict",
        "exclude_input_in_output": "false",
        **dict.fromkeys(("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend"), ""),
        **plan.servers[engine.role],
    }
    paths = read_tree(plan.spec.choices)
    if engine.mode in TREES and paths:  # without them the backend uses a tree of its own; it reads {0},{0,0},{1}
        parameters[f"{engine.mode}_choices"] = ",".join("{" + ",".join(map(str, path)) + "}" for path in paths)
    return parameters


def _list(field: str, items: Sequence[str]) -> list[str]:
    return [f"{field} [", ",\n".join(f"  {{ {item} }}" for item in items), "]"]


def _tensor(tensor: Tensor) -> str:
    return f'name: "{tensor.name}", data_type: TYPE_{tensor.data_type}, dims: {list(tensor.dims)}'


def _input(tensor: Tensor) -> str:
    flags = {
        "reshape { shape: [] }": tensor.is_scalar,
        "allow_ragged_batch: true": tensor.is_ragged,
        "optional: true": tensor.is_optional,
    }
    return ", ".join((_tensor(tensor), *(flag for flag, is_set in flags.items() if is_set)))


def _quoted(text: str) -> str:
    """Quote a string of the text format, which escapes as JSON does."""
    return json.dumps(text, ensure_ascii=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folders; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m build.trtllm.repository", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="the engines, in TOML, as they were built")
    parser.add_argument(
        "--engines", type=Path, required=True, metavar="DIR", help="the build's --out, as the server sees it"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model repository")
    options = parser.parse_args(arguments)
    try:
        plan = make_plan(load_spec(options.file, {}))
        files = write_repository(plan, options.engines, options.out)
    except (ConfigError, OSError) as error:
        print(f"trtllm: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, files)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
