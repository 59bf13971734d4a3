"""Writes random checkpoints in the official format, for the oracle's own tests.

The weights keep the network calm: a sublayer adds roughly a fifth of its stream's RMS, attention
is neither flat nor one-hot, router scores are spread, logits differ by a few units. The tokenizer is
left out (the token map is the identity).
"""

import argparse
import json
from pathlib import Path

import numpy as np

from . import formats
from .checkpoint import Config, write_safetensors
from .engram import table_primes

T1 = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 2.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "compress_rope_theta": 160000,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 5],
    "index_source_layer_ids": [2, 5, 7, 9],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 4,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 100,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 512,
    "num_nextn_predict_layers": 0,
}

# With a drafter. Two stages, so that what flows from one to the next is seen.
T1_DRAFT = T1 | {
    "compress_ratios": T1["compress_ratios"] + [0, 0],
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 3,
    "dspark_noise_token_id": 511,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 1,
}

PRESETS = {"t1": T1, "t1-draft": T1_DRAFT}

# A tower for either of them.
VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "intermediate_size": 72,
    "patch_size": 4,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 576,
    "rope_theta": 10000,
    "max_wh_ratio": None,
}
IMAGE_TOKEN = 321


def random_patches(grid, seed, patch_size=4):
    """Patches [N, 3 P P] of an image: a colour each, with noise. Seed 0: gray, whose rows in the
    tower are the smallest."""
    count, width = grid[0] * grid[1], 3 * patch_size**2
    if seed == 0:
        return np.zeros((count, width), np.float32)
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 86, (count, width)) + random.integers(0, 171, (count, 1))
    return ((pixels / 255 - 0.5) / 0.5).astype(np.float32)


class Writer:
    """Collects the tensors of one checkpoint, file by file."""

    def __init__(self, directory, config, seed):
        self.directory, self.config = Path(directory), config
        self.random = np.random.default_rng(seed)
        self.files = [{}]

    def normal(self, shape, std):
        return self.random.standard_normal(shape) * std

    def put(self, name, kind, value, scale=None):
        self.files[-1][name] = (kind, value)
        if scale is not None:
            self.files[-1][name.removesuffix("weight") + "scale"] = ("F8_E8M0", scale)

    def f32(self, name, value):
        self.put(name, "F32", value)

    def bf16(self, name, value):
        if self.config.stored_f32:
            return self.f32(name, value)
        bits = formats.bf16(value).astype(np.float32).view(np.uint32) >> 16
        self.put(name, "BF16", bits)

    def quantized(self, name, value, kind, quantize):
        if self.config.stored_f32:
            return self.f32(name, value)
        self.put(name, kind, *quantize(value))

    def fp8(self, name, value):
        self.quantized(name, value, "F8_E4M3", formats.quantize_fp8)

    def norm(self, name, width, mean):
        """Norm weights with a few large and a few negative channels."""
        weight = mean * (1 + self.normal(width, 0.2))
        weight[self.random.integers(0, width, max(1, width // 32))] *= 4
        weight[self.random.integers(0, width, max(1, width // 32))] *= -1
        self.bf16(name, weight)

    def attention(self, layer, prefix):
        c, name = self.config, prefix + "attn."
        inputs = c.num_attention_heads // c.o_groups * c.head_dim
        unit = (0.025 * c.hidden_size**0.5) ** -1  # undoes the small attn_norm
        self.fp8(name + "wq_a.weight", self.normal((c.q_lora_rank, c.hidden_size), unit))
        self.norm(name + "q_norm.weight", c.q_lora_rank, 0.97)
        q_width = c.num_attention_heads * c.head_dim
        q_std = 3 * c.q_lora_rank**-0.5
        self.fp8(name + "wq_b.weight", self.normal((q_width, c.q_lora_rank), q_std))
        self.fp8(name + "wkv.weight", self.normal((c.head_dim, c.hidden_size), unit))
        self.norm(name + "kv_norm.weight", c.head_dim, 0.4)
        self.f32(name + "attn_sink", self.normal(c.num_attention_heads, 1))
        z_width = c.o_groups * c.o_lora_rank
        self.fp8(name + "wo_a.weight", self.normal((z_width, inputs), inputs**-0.5))
        self.fp8(name + "wo_b.weight", self.normal((c.hidden_size, z_width), 0.06 * z_width**-0.5))
        if layer in c.kv_source_layer_ids:
            shape = (c.head_dim, c.hidden_size)
            self.bf16(name + "compressor.wkv.weight", self.normal(shape, unit))
            if c.ratio(layer) > 1:
                self.bf16(name + "compressor.wgate.weight", self.normal(shape, unit))
            self.norm(name + "compressor.norm.weight", c.head_dim, 0.6)
            shape = (c.index_head_dim, c.head_dim)
            self.bf16(name + "indexer.wk.weight", self.normal(shape, c.head_dim**-0.5))
            self.norm(name + "indexer.k_norm.weight", c.index_head_dim, 0.5)
        if layer in c.index_source_layer_ids:
            shape = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            self.fp8(name + "indexer.wq_b.weight", self.normal(shape, c.q_lora_rank**-0.5))
            shape = (c.index_n_heads, c.hidden_size)
            self.bf16(name + "indexer.weights_proj.weight", self.normal(shape, unit))

    def experts(self, prefix, count):
        c, name = self.config, prefix + "ffn."
        unit = (0.2 * c.hidden_size**0.5) ** -1
        inner = c.moe_intermediate_size
        self.bf16(name + "gate.weight", self.normal((count, c.hidden_size), 3 * unit))
        self.f32(name + "gate.bias", self.normal(count, 0.3))
        self.f32(name + "gate.bias_vl", self.normal(count, 0.3))
        members = [f"experts.{e}." for e in range(count)] + ["shared_experts."]
        for member in members:
            kind, quantize = "I8", formats.quantize_fp4
            if member == "shared_experts.":
                kind, quantize = "F8_E4M3", formats.quantize_fp8
            for matrix, shape, std in (
                ("w1", (inner, c.hidden_size), unit),
                ("w3", (inner, c.hidden_size), unit),
                ("w2", (c.hidden_size, inner), 0.02 * inner**-0.5),
            ):
                tensor = f"{name}{member}{matrix}.weight"
                self.quantized(tensor, self.normal(shape, std), kind, quantize)

    def engram(self, layer, rows):
        c, name = self.config, f"layers.{layer}.engram."
        columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
        table = self.normal((rows, c.engram_head_dim), 0.1)
        self.quantized(name + "embed.weight", table, "F8_E4M3", formats.quantize_rows)
        shape = ((c.hc_mult + 1) * c.hidden_size, columns)
        self.fp8(name + "wkv.weight", self.normal(shape, 0.4 * columns**-0.5))
        for tensor in ("q_weight", "k_weight"):
            self.bf16(name + tensor, 1 + self.normal((c.hc_mult, c.hidden_size), 0.2))

    def streams(self, prefix, site):
        c, name = self.config, f"{prefix}hc_{site}_"
        m, width = c.hc_mult, c.hc_mult * c.hidden_size
        self.f32(name + "fn", self.normal(((2 + m) * m, width), width**-0.5))
        base = self.normal((2 + m) * m, 0.3)
        base[2 * m :] += 2 * np.eye(m).ravel()  # streams mostly keep to themselves
        self.f32(name + "base", base)
        self.f32(name + "scale", 0.3 + self.normal(3, 0.05))

    def block(self, layer, prefix, experts):
        self.attention(layer, prefix)
        self.norm(prefix + "attn_norm.weight", self.config.hidden_size, 0.025)
        self.streams(prefix, "attn")
        self.experts(prefix, experts)
        self.norm(prefix + "ffn_norm.weight", self.config.hidden_size, 0.2)
        self.streams(prefix, "ffn")

    def drafter(self):
        c = self.config
        first, last = "mtp.0.", f"mtp.{c.stages[-1]}."
        taps = c.hidden_size * len(c.dspark_target_layer_ids)
        self.fp8(first + "main_proj.weight", self.normal((c.hidden_size, taps), taps**-0.5))
        # The features meet the stages' wkv, which expects inputs as small as attn_norm makes them.
        self.norm(first + "main_norm.weight", c.hidden_size, 0.025)
        self.norm(last + "norm.weight", c.hidden_size, 1)
        rank = c.dspark_markov_rank
        self.bf16(last + "markov_head.embed.weight", self.normal((c.vocab_size, rank), 0.5))
        self.bf16(last + "markov_head.head.weight", self.normal((c.vocab_size, rank), rank**-0.5))
        self.bf16(last + "confidence_head.proj.weight", self.normal((1, c.hidden_size + rank), 0.3))

    def tower(self, vision):
        width, inner = vision["hidden_size"], vision["intermediate_size"]

        def linear(stem, out, size, gain=1, bias=True):
            self.bf16(stem + ".weight", self.normal((out, size), gain * size**-0.5))
            if bias:
                self.bf16(stem + ".bias", self.normal(out, 0.02))

        linear("vision.patch_embed.proj", width, 3 * vision["patch_size"] ** 2)
        for block in range(vision["num_hidden_layers"]):
            name = f"vision.blocks.{block}."
            self.norm(name + "norm1.weight", width, 1)
            linear(name + "attn.wqkv", 3 * width, width)
            linear(name + "attn.wo", width, width)
            self.norm(name + "norm2.weight", width, 1)
            linear(name + "mlp.w1", 2 * inner, width, bias=False)
            linear(name + "mlp.w2", width, inner, 0.5, bias=False)
        self.norm("vision.norm.weight", width, 1)
        hidden = self.config.hidden_size
        linear("aligner.w1", hidden, width * vision["downsample_ratio"] ** 2)
        linear("aligner.w2", hidden, hidden, 0.2)
        for name in ("image_start", "image_newline", "image_end"):
            self.bf16(name, self.normal(hidden, 0.12))

    def write(self):
        c = self.config
        if vision := c.document.get("vision_config"):
            self.tower(vision)
            self.files.append({})
        self.bf16("embed.weight", self.normal((c.vocab_size, c.hidden_size), 0.12))
        for layer in c.layers:
            self.files.append({})
            self.block(layer, f"layers.{layer}.", c.n_routed_experts)
        self.files.append({})
        self.norm("norm.weight", c.hidden_size, 1)
        shape = (c.vocab_size, c.hidden_size)
        self.bf16("head.weight", self.normal(shape, 1.5 * c.hidden_size**-0.5))
        for layer, rows in zip(c.engram_layer_ids, c.engram_num_embeddings):
            self.files.append({})
            self.engram(layer, rows)
        for stage in c.stages:
            self.files.append({})
            self.block(c.num_hidden_layers + stage, f"mtp.{stage}.", c.dspark_n_routed_experts)
        if c.stages:
            self.drafter()

        self.directory.mkdir(parents=True, exist_ok=True)
        weight_map = {}
        for i, tensors in enumerate(self.files):
            file = f"model-{i + 1:05}-of-{len(self.files):05}.safetensors"
            write_safetensors(self.directory / file, tensors)
            weight_map.update(dict.fromkeys(tensors, file))
        index = {"metadata": {}, "weight_map": weight_map}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index))
        (self.directory / "config.json").write_text(json.dumps(c.document, indent=1))


def document(text, weights="official", vision=None):
    """The nested config.json for a text configuration and a tower."""
    text = dict(text)
    primes = table_primes(
        text["engram_layer_ids"],
        text["engram_max_ngram_size"],
        text["engram_n_heads"],
        text["engram_vocab_size"],
    )
    text["engram_num_embeddings"] = [int(primes[l].sum()) for l in text["engram_layer_ids"]]
    result = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "float32" if weights == "f32" else "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "text_config": text,
    }
    if vision:
        result |= {"image_token_id": IMAGE_TOKEN, "vision_config": vision}
    if weights == "official":
        result["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    return result


def write(directory, text, seed=0, weights="official", vision=None):
    """Writes a checkpoint of any text configuration; weights are "official" or "f32"."""
    Writer(directory, Config(document(text, weights, vision)), seed).write()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="t1")
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", choices=("official", "f32"), default="official")
    parser.add_argument("--vision", action="store_true", help="with an image encoder")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    text = dict(PRESETS[args.preset])
    for assignment in args.set:
        key, _, value = assignment.partition("=")
        if key not in text:
            parser.error(f"unknown key {key}")
        text[key] = json.loads(value)
    write(args.out, text, args.seed, args.weights, VISION if args.vision else None)


if __name__ == "__main__":
    main()
