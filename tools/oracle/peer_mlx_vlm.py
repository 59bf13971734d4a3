"""mlx-vlm's DeepSeek-V4.1 (PyPI: mlx-vlm), an inference model that also runs on a CPU.

It loads the official checkpoint format, has every quantizer of the reference including the FP8
inputs of linears, and a cache for decoding; so it is compared in `f32` and `official` and with
prompts given in chunks.

Its differences from the definition, each replaced here so that the rest can be compared:

- f32: its one switch for quantizers (fakequant.DISABLE) turns off all of them; `f32` drops only
  those of linear inputs, so these calls are told apart from the cache ones.
- official: nn.RMSNorm rounds to BF16 before the multiplication by the weight.
- official: language.DeepseekV4RoPE calls mx.fast.rope, which on a CPU rounds the cosines and sines
  to the type of its argument, BF16.
- official: language._sparse_pooled_attention keeps probabilities in FP32; the reference rounds
  them to BF16. Replaced where all keys of a row fit in one block of 64.
- official: language.DeepseekV41Attention._attention rounds attn_sink, an FP32 parameter, to BF16
  in layers without entries.
- official: language._index_scores is BF16 (so is the reference; ours is FP32 by decision).
- official: mlx has no BF16 gather_mm on a CPU; the experts multiply in FP32 and round to BF16.
- language.Indexer, like the reference, takes the best entries and drops only those not yet visible,
  so a Reindex row with fewer candidate entries than index_topk also gets entries that are no
  candidates. They are dropped, by this project's decision. (In the released configuration 2047 full
  blocks of 8 entries and one of at least 1 are always more than 512.)
- language.DeepseekV41MoEGate, like the reference, does not normalize the weight of a single expert
  (num_experts_per_tok 1). Not replaced: no backbone has it.
"""

import importlib.metadata
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.deepseek_v41 import engram, language
from mlx_vlm.models.deepseek_v41.config import ModelConfig
from mlx_vlm.models.deepseek_v41.deepseek_v41 import Model

from tap import Tap, blocks_of, mask_of, tidy, token_classes, weight_files

NAME = "mlx-vlm"
PRECISIONS = ("f32", "official")
CHUNKS = True  # runs through a cache too
KEY_BLOCK = 64  # keys per block of the reference's online softmax
FORCED = 1e6  # a router bias that outweighs every score


def versions():
    return {name: importlib.metadata.version(name) for name in ("mlx-vlm", "mlx")}


def build(directory, precision):
    """The language model with the weights of a checkpoint directory."""
    directory = Path(directory)
    document = json.loads((directory / "config.json").read_text())
    config = ModelConfig.from_dict(document)
    model = Model(config)  # the vision tower stays unevaluated
    weights = {}
    for file in weight_files(directory):
        weights.update(mx.load(str(file)))
    weights = model.sanitize(weights)
    text = {n: w for n, w in weights.items() if n.startswith("language_model.")}
    known = {n for n, _ in tree_flatten(model.parameters()) if n.startswith("language_model.")}
    if set(text) != known:
        raise ValueError(f"names that do not match: {sorted(set(text) ^ known)[:8]}")
    if precision == "f32":
        packed = (mx.uint32, mx.uint8)
        text = {n: w if w.dtype in packed else w.astype(mx.float32) for n, w in text.items()}
    model.load_weights(list(text.items()), strict=False)
    result = model.language_model
    if result.layout is not None:
        classes = token_classes(directory)
        if classes is None:
            result._engram_source = directory  # it derives the classes from tokenizer.json
        else:
            result.engram_hash = engram.NgramHashState(config, result.layout, token_map=classes)
    return result, config


def norm_rounded_once(norm, x):
    wide = x.astype(mx.float32)
    wide = wide * mx.rsqrt(mx.mean(mx.square(wide), axis=-1, keepdims=True) + norm.eps)
    return (wide * norm.weight.astype(mx.float32)).astype(x.dtype)


def attention_rounded_probabilities(q, window, entries, ids, visible, chosen, scale, sink):
    """In place of language._sparse_pooled_attention. One block of the reference's online softmax:
    BF16 probabilities in the numerator, FP32 in the denominator."""
    q, window = q.astype(mx.float32), window.astype(mx.float32)
    scores = mx.where(visible, q @ window.swapaxes(-1, -2), -mx.inf) * scale  # [1, H, T, S]
    count = scores.shape[-1]
    if entries is not None:
        picked = entries[0][mx.maximum(ids[0], 0)][None].astype(mx.float32)  # [1, T, k, K]
        more = (q.transpose(0, 2, 1, 3) @ picked.swapaxes(-1, -2)).transpose(0, 2, 1, 3)
        more = mx.where(chosen, more, -mx.inf) * scale
        scores = mx.concatenate([scores, more], axis=-1)
    largest = scores.max(axis=-1, keepdims=True)
    p = mx.exp(scores - largest)
    total = p.sum(axis=-1, keepdims=True) + mx.exp(sink[None, :, None, None] - largest)
    p = p.astype(mx.bfloat16).astype(mx.float32)
    out = p[..., :count] @ window
    if entries is not None:
        out = out + (p[..., count:].transpose(0, 2, 1, 3) @ picked).transpose(0, 2, 1, 3)
    return out / total


class Peer:
    def __init__(self, directory, precision="f32"):
        mx.disable_compile()  # fused kernels skip BF16 roundings
        self.precision = precision
        self.model, self.config = build(directory, precision)
        if precision == "official":
            self._widen_experts()
            self._round_as_reference()
        self.tap = None
        self.layer, self.site = None, None
        self.sinks = [layer.attn.attn_sink for layer in self.model.layers]
        self._instrument()

    def run(self, tokens, tap=None, chunks=None):
        """Runs a sequence; chunks: how many tokens per call, for a run through the cache (without
        a tap). The tensors seen are in tap.seen."""
        if chunks is not None:
            self.tap = Tap(self.config)
            cache, logits, begin = self.model.make_cache(), [], 0
            for count in chunks:
                part = mx.array([tokens[begin : begin + count]])
                logits.append(self._numpy(self.model(part, cache=cache).logits))
                begin += count
            return {"logits": np.concatenate(logits)}
        self.tap = tap or Tap(self.config)
        mx.eval(self.model(mx.array([tokens])).logits)
        return self.tap.seen

    @staticmethod
    def _numpy(value):
        return np.array(value[0].astype(mx.float32)).astype(np.float64)

    def _point(self, name, value):
        """value [1, T, ...]"""
        fed = self.tap.point(name, self._numpy(value))
        return value if fed is None else mx.array(fed.astype(np.float32))[None].astype(value.dtype)

    def _widen_experts(self):
        def widened(linear):
            def multiply(x, *args, **options):
                return linear(x.astype(mx.float32), *args, **options).astype(mx.bfloat16)

            return multiply

        for layer in self.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                linear = layer.ffn.switch_mlp[name]
                linear.weight = linear.weight.astype(mx.float32)
                setattr(layer.ffn.switch_mlp, name, widened(linear))

    def _round_as_reference(self):
        nn.RMSNorm.__call__ = norm_rounded_once
        rope = language.DeepseekV4RoPE.__call__
        language.DeepseekV4RoPE.__call__ = lambda self, x, *args, **options: rope(
            self, x.astype(mx.float32), *args, **options
        ).astype(x.dtype)
        scores = language._index_scores
        language._index_scores = lambda q, keys, weights, *args: scores(
            q.astype(mx.float32), keys.astype(mx.float32), weights.astype(mx.float32), *args
        )
        if self.config.sliding_window + self.config.index_topk <= KEY_BLOCK:
            language._sparse_pooled_attention = attention_rounded_probabilities
            mx.fast.scaled_dot_product_attention = self._window_attention

    def _window_attention(self, q, keys, values, *, scale, mask, sinks):
        """In place of mx.fast.scaled_dot_product_attention, in layers without entries. It is given
        sinks rounded to BF16."""
        sink = self.sinks[self.layer]
        out = attention_rounded_probabilities(q, keys, None, None, mask, None, scale, sink)
        return out.astype(q.dtype)

    def _instrument(self):
        model, streams = self.model, self.config.hc_mult
        embed, head = model.embed_tokens, model.head

        def embedded(ids):
            value = embed(ids)
            shape = (*value.shape[:2], streams, value.shape[2])
            return self._point("embed", mx.broadcast_to(value[:, :, None], shape))[:, :, 0]

        model.embed_tokens = embedded
        model.head = lambda x: self._point("logits", head(x))
        for i, layer in enumerate(model.layers):
            self._instrument_layer(i, layer)

        expand = language.hc_expand

        def expanded(*args):
            return self._point(f"layers.{self.layer}.{self.site}", expand(*args))

        language.hc_expand = expanded
        self._instrument_quantizers()

    def _instrument_quantizers(self):
        fp8, main, index = (
            language.fake_quant_fp8_ue8m0,
            language.fake_quant_fp4_e4m3,
            language.fake_quant_fp4_ue8m0,
        )

        def linear_input(x):
            return x if self.precision == "f32" else fp8(x)

        def fp8_or_window(x):
            # _window_part quantizes its linear's input first, then the rows for the cache.
            if self.in_window and self.store_next:
                return self._point(f"layers.{self.layer}.window_codes", fp8(x))
            self.store_next = self.in_window
            return linear_input(x)

        def fp4_index(x):
            if x.ndim == 4:  # the query
                return index(x)
            return self._point(f"layers.{self.layer}.index_codes", index(x))

        self.in_window = self.store_next = False
        language.fake_quant_fp8_ue8m0 = fp8_or_window
        engram.fake_quant_fp8_ue8m0 = linear_input
        language.fake_quant_fp4_e4m3 = lambda x: self._point(
            f"layers.{self.layer}.main_codes", main(x)
        )
        language.fake_quant_fp4_ue8m0 = fp4_index

    def _instrument_layer(self, i, layer):
        prefix = f"layers.{i}."

        def wrap(module, name):
            return lambda *args: self._point(prefix + name, module(*args))

        def enter(module, site):
            named = wrap(module, site + "_in")

            def entered(x):
                self.layer, self.site = i, site
                return named(x)

            return entered

        attention = layer.attn
        window = attention._window_part

        def window_part(*args):
            self.in_window, self.store_next = True, False
            result = window(*args)
            self.in_window = False
            return result

        def attend(x, cache):
            out = attention(x, cache)
            if attention.mode == "reuse":
                self._note_selected(prefix, x, cache)
            return self._point(prefix + "attn_out", out)

        attention._window_part = window_part
        if attention.indexer is not None:
            attention.indexer = self._indexer(prefix, attention.indexer)
        if attention.is_kv_source and self.config.compress_ratios[i] > 1:
            part = attention._compress_part

            def compress_part(x, *args):
                result = part(x, *args)
                if result[1].shape[-1] == 0:  # no entry yet: the indexer was not called
                    self.tap.point(prefix + "selected", np.empty((x.shape[1], 0), np.int64))
                return result

            attention._compress_part = compress_part
        layer.attn_norm = enter(layer.attn_norm, "attn")
        layer.attn = attend
        layer.ffn_norm = enter(layer.ffn_norm, "ffn")
        self._instrument_router(prefix, layer.ffn)
        layer.ffn = wrap(layer.ffn, "ffn_out")
        if layer.engram is not None:
            inner = layer.engram
            layer.engram = wrap(inner, "engram")
            layer.engram.layer_hash_index = inner.layer_hash_index

    def _note_selected(self, prefix, x, cache):
        ids = cache.topk_idxs
        empty = np.empty((x.shape[1], 0), np.int64)
        self.tap.point(prefix + "selected", empty if ids is None else tidy(np.array(ids[0])))

    def _indexer(self, prefix, indexer):
        size = self.config.candidate_block_size

        def select(x, qr, latent, start, offset, cache):
            ids = np.array(indexer(x, qr, latent, start, offset, cache)[0]).astype(np.int64)
            if indexer.is_candidate_source:
                mask = np.array(cache.candidates[0])
                fed = self.tap.point(prefix + "candidates", blocks_of(mask, size))
                if fed is not None:
                    cache.candidates = mx.array(mask_of(fed, size, mask.shape[1]))[None]
            if indexer.uses_candidates:
                inside = np.take_along_axis(np.array(cache.candidates[0]), np.maximum(ids, 0), 1)
                ids = np.where(inside, ids, -1)
            fed = self.tap.point(prefix + "selected", tidy(ids))
            ids = mx.array((ids if fed is None else fed).astype(np.int32))[None]
            cache.topk_idxs = ids
            return ids

        return select

    def _instrument_router(self, prefix, ffn):
        gate = ffn.gate
        bias = gate.bias

        def route(x, image_mask=None):
            result = gate(x, image_mask)
            fed = self.tap.point(prefix + "experts", tidy(np.array(result[0][0])))
            if fed is None:
                return result
            forced = np.zeros((len(fed), gate.num_experts), np.float32)
            np.put_along_axis(forced, fed, FORCED, axis=1)
            gate.bias = mx.array(forced)
            result = gate(x, image_mask)
            gate.bias = bias
            return result

        ffn.gate = route
