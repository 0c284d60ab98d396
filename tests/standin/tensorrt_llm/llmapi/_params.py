"""NOT TensorRT-LLM: its decoding configurations, by the project's table of their fields, and SamplingParams."""

import json
from dataclasses import dataclass
from pathlib import Path

TABLE = json.loads((Path(__file__).parents[3] / "data/trtllm/llm_api.json").read_text())


class DecodingConfig:
    """Takes the fields of its class alone, as pydantic's models with forbidden extras do."""

    decoding_type = ""
    table = ""

    def __init__(self, **fields):
        known = {
            *TABLE["common_fields"],
            *TABLE["older_fields"].values(),
            *TABLE["classes"][self.table or type(self).__name__],
        }
        if unknown := fields.keys() - known:
            raise ValueError(f"{type(self).__name__}: extra fields not permitted: {sorted(unknown)}")
        for name in ("max_draft_len", "max_matching_ngram_size", "num_nextn_predict_layers"):
            if name in fields and not (type(fields[name]) is int and fields[name] > 0):
                raise ValueError(f"{type(self).__name__}: {name} must be a positive integer, got {fields[name]!r}")
        self.fields = fields

    @property
    def draft_len(self):
        return self.fields.get("max_draft_len", self.fields.get("num_nextn_predict_layers", 1))


class EagleDecodingConfig(DecodingConfig):
    decoding_type = "Eagle"


class Eagle3DecodingConfig(EagleDecodingConfig):
    decoding_type, table = "Eagle3", "EagleDecodingConfig"


class NGramDecodingConfig(DecodingConfig):
    decoding_type = "NGram"


class DraftTargetDecodingConfig(DecodingConfig):
    decoding_type = "Draft_Target"


class MTPDecodingConfig(DecodingConfig):
    decoding_type = "MTP"


class MedusaDecodingConfig(DecodingConfig):
    decoding_type = "Medusa"


class LookaheadDecodingConfig(DecodingConfig):
    decoding_type = "Lookahead"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Checks of tensorrt_llm/sampling_params.py."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    ignore_eos: bool = False
    detokenize: bool = True

    def __post_init__(self):
        for name, kinds in (("top_k", int), ("top_p", (float, int)), ("seed", int), ("temperature", (float, int))):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise TypeError(f"SamplingParams.{name} = {value!r}")
        if self.temperature is not None and self.temperature <= 0:
            raise ValueError("temperature > 0")
        if self.max_tokens < 1:
            raise ValueError("max_tokens >= 1")

    @property
    def greedy(self):
        """As the library's own `_greedy_decoding`."""
        return self.top_k in (None, 1) and self.top_p in (None, 0.0)
