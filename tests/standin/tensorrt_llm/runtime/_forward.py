"""NOT TensorRT-LLM: what one run of an engine computes, sequence by sequence, over the KV pool it is given."""

import ctypes

import torch
from tensorrt_llm.bindings._engine import load

CONTEXT, STEP = 0, 1


def agree(condition, words):
    if not condition:
        raise RuntimeError(f"[TensorRT-LLM][ERROR] {words}")


class Run:
    def __init__(self, engine, inputs):
        self.engine, self.sizes, self.inputs = engine, engine.sizes, inputs
        types = set(inputs["host_request_types"].tolist())
        if types not in ({CONTEXT}, {STEP}):
            raise NotImplementedError("this stand-in runs contexts or steps, not both at once")
        self.is_step = types == {STEP}
        self.lengths = self._lengths()
        totals = inputs["sequence_length"].tolist()
        self.pasts = [total - length for total, length in zip(totals, self.lengths, strict=True)]
        self._check()

    def _lengths(self):
        if not self.is_step:
            return self.inputs["context_lengths"].tolist()
        uses = self.inputs["spec_decoding_use"].item()
        lengths = self.inputs["spec_decoding_generation_lengths"].tolist()
        agree(uses or set(lengths) == {1}, "a step of several tokens a sequence has spec_decoding_use 1")
        return lengths

    def _check(self):
        given, step = self.inputs, self.is_step
        agree(sum(self.lengths) == len(given["input_ids"]), "lengths add up to the tokens")
        agree(min(self.pasts) >= 0, "sequence_length is past and present")
        reported = self.pasts if step else given["sequence_length"].tolist()
        agree(given["host_past_key_value_lengths"].tolist() == reported, "host_past_key_value_lengths")
        agree(given["host_context_lengths"].equal(given["context_lengths"]), "host_context_lengths")
        agree(given["host_kv_cache_block_offsets"].equal(given["kv_cache_block_offsets"]), "block offsets on the host")
        agree(step or not given["spec_decoding_use"].item(), "spec_decoding_use is 0 in contexts")
        agree(len(given["position_ids"]) == (len(self.lengths) if step else sum(self.lengths)), "position_ids")
        agree(given["cache_indirection"].eq(0).all(), "one beam")
        agree(given["host_kv_cache_pool_mapping"].tolist() == [[0, i] for i in range(self.sizes.num_layers)], "mapping")
        agree(given["host_max_attention_window_sizes"].ge(max(given["sequence_length"])).all(), "window")
        agree(given["host_sink_token_length"].item() == 0 and given["host_context_progress"].item() == 0, "zeros")
        packed = sum(given["spec_decoding_generation_lengths"].tolist())
        agree(len(given["spec_decoding_packed_mask"]) == packed, "rows of the packed mask")

    @torch.inference_mode()
    def logits(self):
        """Return (tokens, V) float64."""
        rows, start, mask_start = [], 0, 0
        for place, length in enumerate(self.lengths):
            ids = self.inputs["input_ids"][start : start + length].long()
            if self.is_step:
                seen = self._unpacked(mask_start, length)
                positions = (
                    self.inputs["position_ids"][place] + self.inputs["spec_decoding_position_offsets"][place, :length]
                )
            else:
                seen = torch.ones(length, length, dtype=torch.bool).tril()
                positions = self.inputs["position_ids"][start : start + length]
            rows.append(self._forward(place, ids, positions.long(), seen))
            start, mask_start = start + length, mask_start + length
        return torch.cat(rows)

    def _unpacked(self, start, length):
        """Return (length, length) bool: bit j of word w of a row is node 32 w + j."""
        words = self.inputs["spec_decoding_packed_mask"][start : start + length].long()
        nodes = torch.arange(length)
        return (words[:, nodes // 32] >> (nodes % 32)) & 1 == 1

    def _forward(self, place, ids, positions, seen):
        from transformers import DynamicCache

        past, length = self.pasts[place], len(ids)
        cache = DynamicCache()
        for layer in range(self.sizes.num_layers):
            keys, values = self._slots(place, layer, 0, past)
            cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        visible = torch.cat([torch.ones(length, past, dtype=torch.bool), seen], dim=1)
        bias = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
        output = load(self.engine.checkpoint)(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=bias[None, None],
            past_key_values=cache,
            use_cache=True,
        )
        for layer, kept in enumerate(cache.layers):
            fresh = (kept.keys[0, :, past:], kept.values[0, :, past:])
            for field, new in enumerate(fresh):
                self._write(place, layer, field, past, new.transpose(0, 1))
        return output.logits[0]

    def _slots(self, place, layer, start, stop):
        """Return keys and values of slots start … stop − 1, (n, kv_heads, head_dim)."""
        size = self.sizes.tokens_per_block
        found = [
            [self._block(place, layer, field, i // size)[:, i % size] for i in range(start, stop)] for field in (0, 1)
        ]
        empty = torch.empty(0, self.sizes.num_kv_heads, self.sizes.head_dim, dtype=torch.float64)
        return [torch.stack(rows) if rows else empty for rows in found]

    def _write(self, place, layer, field, start, rows):
        size = self.sizes.tokens_per_block
        for i, row in enumerate(rows, start):
            self._block(place, layer, field, i // size)[:, i % size] = row

    def _block(self, place, layer, field, index):
        """Return the memory of one layer's keys or values of a block, (kv_heads, tokens, head_dim) float64."""
        sizes = self.sizes
        shape = (sizes.num_kv_heads, sizes.tokens_per_block, sizes.head_dim)
        num_bytes = shape[0] * shape[1] * shape[2] * 8
        offset = self.inputs["kv_cache_block_offsets"][0, place, field, index].item() + 2 * layer
        address = self.inputs["host_kv_cache_pool_pointers"][0, 0].item() + offset * num_bytes
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.float64).view(shape)
