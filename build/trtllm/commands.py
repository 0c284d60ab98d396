"""The commands that make an engine, as argument lists; it runs none. Paths are relative to the output folder."""

from __future__ import annotations

import re
from dataclasses import dataclass

from build.trtllm.engines import Engine
from build.trtllm.shapes import LLAMA
from build.trtllm.spec import EngineSpec
from build.trtllm.versions import find_release

# Fetches with the hub's Python package, since its command was renamed between releases.
_FETCH = (
    "import sys; from huggingface_hub import snapshot_download; snapshot_download(sys.argv[1], local_dir=sys.argv[2])"
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

Flags = dict[str, object]
#: Suffix of the stage and folder of a base model that is converted before its heads.
BASE = "-base"
#: Method → folder of the conversion script in TensorRT-LLM's examples.
HEAD_FOLDERS = {"medusa": "medusa", "eagle": "eagle", "eagle2": "eagle"}


@dataclass(frozen=True)
class Stage:
    """One command. output: the folder that it fills. inputs: the folders that it reads."""

    name: str
    argv: tuple[str, ...]
    output: str
    inputs: tuple[str, ...]


def stages_of(engine: Engine, spec: EngineSpec) -> list[Stage]:
    """Return the stages of one engine in order: fetch what is on the hub, convert or quantise, build."""
    sources = {engine.role: engine.source} | ({"heads": spec.drafter} if engine.heads.parameters else {})
    folders = {role: f"sources/{role}" if is_hub_id(source) else source for role, source in sources.items()}
    fetches = [
        Stage(f"fetch-{role}", ("python3", "-c", _FETCH, source, folders[role]), folders[role], ())
        for role, source in sources.items()
        if is_hub_id(source)
    ]
    if engine.heads.parameters and spec.method == "redrafter":
        conversion = [_convert_stage(engine, spec, folders, BASE), _redrafter_stage(engine, spec, folders["heads"])]
    else:
        conversion = [_convert_stage(engine, spec, folders)]
    return [*fetches, *conversion, _build_stage(engine, spec)]


def is_hub_id(source: str) -> bool:
    """Return whether a source is `owner/name`; every folder of a spec is absolute."""
    return bool(_HUB_ID.fullmatch(source))


def _convert_stage(engine: Engine, spec: EngineSpec, folders: dict[str, str], part: str = "") -> Stage:
    """Convert 16-bit Llama models and heads by their own scripts, all others by quantize.py, which knows all models.

    part: BASE to convert the model without its heads.
    """
    has_heads = bool(engine.heads.parameters) and part != BASE
    if part == BASE:
        folders = {engine.role: folders[engine.role]}
    is_quantised = engine.quantisation != "none" or engine.kv_cache_dtype != "auto"
    if is_quantised or not (has_heads or engine.shape.architecture == LLAMA):
        script, flags = "quantization/quantize.py", _quantize_flags(engine, spec, folders)
    else:
        script = HEAD_FOLDERS[spec.method] if has_heads else find_release(spec.trtllm_version).llama_folder
        script, flags = f"{script}/convert_checkpoint.py", _convert_flags(engine, spec, folders)
    output = f"{engine.checkpoint_folder}{part}"
    flags = {"--model_dir": folders[engine.role], "--output_dir": output, **flags}
    argv = ("python3", f"{spec.examples_dir}/{script}", *_words(flags))
    return Stage(f"convert-{engine.role}{part}", argv, output, tuple(folders.values()))


def _redrafter_stage(engine: Engine, spec: EngineSpec, heads: str) -> Stage:
    """Add the drafter to a base that is already converted; the script reads the base's config.json and rank files."""
    base = f"{engine.checkpoint_folder}{BASE}"
    flags: Flags = {
        "--base_model_checkpoint_dir": base,
        "--drafter_model_dir": heads,
        "--output_dir": engine.checkpoint_folder,
        "--dtype": engine.dtype,
        "--tp_size": engine.tensor_parallel,
        "--redrafter_num_beams": spec.redrafter_beams,
        "--redrafter_draft_len_per_beam": spec.redrafter_beam_len,
        "--workers": engine.num_ranks,
    }
    argv = ("python3", f"{spec.examples_dir}/redrafter/convert_checkpoint.py", *_words(flags))
    return Stage(f"convert-{engine.role}", argv, engine.checkpoint_folder, (base, heads))


def _convert_flags(engine: Engine, spec: EngineSpec, folders: dict[str, str]) -> Flags:
    flags: Flags = {
        "--dtype": engine.dtype,
        "--tp_size": engine.tensor_parallel,
        "--pp_size": engine.pipeline_parallel,
    }
    if "heads" in folders:
        flags |= _head_flags(engine, spec, folders["heads"])
    return flags | {"--workers": engine.num_ranks}


def _quantize_flags(engine: Engine, spec: EngineSpec, folders: dict[str, str]) -> Flags:
    flags: Flags = {
        "--dtype": engine.dtype,
        "--qformat": "full_prec" if engine.quantisation == "none" else engine.quantisation,
        "--tp_size": engine.tensor_parallel,
        "--pp_size": engine.pipeline_parallel,
        "--calib_dataset": spec.calib_dataset,
        "--calib_size": spec.calib_size,
    }
    if engine.kv_cache_dtype != "auto":
        flags["--kv_cache_dtype"] = engine.kv_cache_dtype
    if engine.quantisation == "int4_awq":
        flags["--awq_block_size"] = 128
    if "heads" in folders:
        flags |= _head_flags(engine, spec, folders["heads"])
        flags["--max_draft_len"] = flags.pop("--max_medusa_token_len")  # quantize.py has another name for it
    return flags


def _head_flags(engine: Engine, spec: EngineSpec, heads: str) -> Flags:
    """Return the flags that describe the heads inside the target's engine; heads: their folder."""
    if spec.method == "medusa":
        return {
            "--medusa_model_dir": heads,
            "--num_medusa_heads": engine.heads.heads,
            "--num_medusa_layers": engine.heads.blocks,
            "--max_medusa_token_len": engine.limits.max_draft_len,
        }
    return {
        "--eagle_model_dir": heads,
        "--max_draft_len": engine.limits.max_draft_len,
        "--num_eagle_layers": spec.eagle_layers,
        "--max_non_leaves_per_layer": spec.eagle_non_leaves,
    }


def _build_stage(engine: Engine, spec: EngineSpec) -> Stage:
    """Run `trtllm-build` with every size given, because the defaults differ between releases."""
    limits = engine.limits
    flags: Flags = {
        "--checkpoint_dir": engine.checkpoint_folder,
        "--output_dir": engine.engine_folder,
        "--max_batch_size": limits.max_batch_size,
        "--max_input_len": limits.max_input_len,
        "--max_seq_len": limits.max_seq_len,
        "--max_beam_width": limits.max_beam_width,
        "--max_num_tokens": limits.max_num_tokens,
        "--opt_num_tokens": limits.opt_num_tokens,
        "--kv_cache_type": "paged",
        "--tokens_per_block": spec.tokens_per_block,
        "--remove_input_padding": "enable",
        "--context_fmha": "enable",
        # Block reuse, chunked prompts and EAGLE need it; its default was "disable" before 1.0.
        "--use_paged_context_fmha": "enable",
        "--gpt_attention_plugin": "auto",
        "--gemm_plugin": engine.quantisation if engine.quantisation in ("fp8", "nvfp4") else "auto",
        "--multiple_profiles": "disable",
        "--logits_dtype": "float32",
        "--workers": engine.num_ranks,
    }
    if engine.mode:
        flags |= {"--speculative_decoding_mode": engine.mode, "--max_draft_len": limits.max_draft_len}
    argv = ("trtllm-build", *_words(flags))
    return Stage(f"build-{engine.role}", argv, engine.engine_folder, (engine.checkpoint_folder,))


def _words(flags: Flags) -> list[str]:
    return [word for name, value in flags.items() for word in (name, str(value))]
