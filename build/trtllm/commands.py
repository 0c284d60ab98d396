"""The commands that make an engine, as argument lists; runs none. Paths start at the output folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from build.trtllm.engines import Engine
from build.trtllm.shapes import LLAMA
from build.trtllm.spec import EngineSpec
from build.trtllm.versions import find_release

# Fetching by the hub's own package: its command line changed its name between releases.
_FETCH = (
    "import sys; from huggingface_hub import snapshot_download; snapshot_download(sys.argv[1], local_dir=sys.argv[2])"
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Stage:
    """One command. output: the folder that it fills. inputs: the folders that it reads, given ones or other outputs."""

    name: str
    argv: tuple[str, ...]
    output: str
    inputs: tuple[str, ...]


def stages_of(engine: Engine, spec: EngineSpec) -> list[Stage]:
    """Return the stages of one engine in order: fetch what is on the hub, convert or quantise, build."""
    fetched = [_fetch(name, f"sources/{role}") for role, name in _sources(engine, spec).items() if is_hub_id(name)]
    return [*fetched, _checkpoint(engine, spec), _build(engine, spec)]


def is_hub_id(source: str) -> bool:
    """True for `owner/name`; every folder of a spec is absolute."""
    return bool(_HUB_ID.fullmatch(source))


def _sources(engine: Engine, spec: EngineSpec) -> dict[str, str]:
    """Return {role: folder or hub id} of what the engine is made from."""
    heads = {"heads": spec.drafter} if engine.heads.parameters else {}
    return {engine.role: engine.source} | heads


def _local(engine: Engine, spec: EngineSpec) -> dict[str, str]:
    """Return {role: folder} after fetching."""
    return {role: f"sources/{role}" if is_hub_id(name) else name for role, name in _sources(engine, spec).items()}


def _fetch(hub_id: str, folder: str) -> Stage:
    return Stage(f"fetch-{Path(folder).name}", ("python3", "-c", _FETCH, hub_id, folder), folder, ())


def _checkpoint(engine: Engine, spec: EngineSpec) -> Stage:
    """Convert a 16-bit checkpoint by its model's script; anything else by quantize.py, which knows all models."""
    folders = _local(engine, spec)
    quantised = engine.quantisation != "none" or engine.kv_cache_dtype != "auto"
    own_script = engine.heads.parameters or engine.shape.architecture == LLAMA
    if quantised or not own_script:
        script, flags = "quantization/quantize.py", _quantize_flags(engine, spec, folders)
    else:
        script, flags = _script(engine, spec), _convert_flags(engine, spec, folders)
    flags = {"--model_dir": folders[engine.role], "--output_dir": engine.checkpoint_folder, **flags}
    argv = ("python3", f"{spec.examples_dir}/{script}", *_words(flags))
    return Stage(f"convert-{engine.role}", argv, engine.checkpoint_folder, tuple(folders.values()))


def _script(engine: Engine, spec: EngineSpec) -> str:
    folder = spec.method if engine.heads.parameters else find_release(spec.trtllm_version).llama_folder
    return f"{folder}/convert_checkpoint.py"


def _convert_flags(engine: Engine, spec: EngineSpec, folders: dict[str, str]) -> dict[str, object]:
    flags: dict[str, object] = {"--dtype": engine.dtype, "--tp_size": engine.tensor_parallel}
    if engine.mode != "explicit_draft_tokens":  # ReDrafter's script knows no pipeline
        flags["--pp_size"] = engine.pipeline_parallel
    if engine.heads.parameters:
        flags |= _HEAD_FLAGS[spec.method](engine, spec, folders["heads"])
    return flags | {"--workers": engine.num_ranks}


def _quantize_flags(engine: Engine, spec: EngineSpec, folders: dict[str, str]) -> dict[str, object]:
    flags: dict[str, object] = {
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
    if engine.heads.heads:
        flags |= _medusa(engine, spec, folders["heads"]) | {"--max_draft_len": engine.limits.max_draft_len}
        del flags["--max_medusa_token_len"]  # quantize.py has another name for it
    return flags


def _medusa(engine: Engine, spec: EngineSpec, heads: str) -> dict[str, object]:
    return {
        "--medusa_model_dir": heads,
        "--num_medusa_heads": engine.heads.heads,
        "--num_medusa_layers": engine.heads.blocks,
        "--max_medusa_token_len": engine.limits.max_draft_len,
    }


def _eagle(engine: Engine, spec: EngineSpec, heads: str) -> dict[str, object]:
    return {
        "--eagle_model_dir": heads,
        "--max_draft_len": engine.limits.max_draft_len,
        "--num_eagle_layers": spec.eagle_layers,
        "--max_non_leaves_per_layer": spec.eagle_non_leaves,
    }


def _redrafter(engine: Engine, spec: EngineSpec, heads: str) -> dict[str, object]:
    return {
        "--drafter_model_dir": heads,
        "--redrafter_num_beams": spec.redrafter_beams,
        "--redrafter_draft_len_per_beam": spec.redrafter_beam_len,
    }


_HEAD_FLAGS = {"medusa": _medusa, "eagle": _eagle, "redrafter": _redrafter}


def _build(engine: Engine, spec: EngineSpec) -> Stage:
    """`trtllm-build` with every size given: the defaults differ between releases."""
    limits = engine.limits
    flags: dict[str, object] = {
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
    argv = ["trtllm-build", *_words(flags)]
    if spec.gather_context_logits:
        argv.append("--gather_context_logits")
    return Stage(f"build-{engine.role}", tuple(argv), engine.engine_folder, (engine.checkpoint_folder,))


def _words(flags: dict[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in (name, str(value))]
