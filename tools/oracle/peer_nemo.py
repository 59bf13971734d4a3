"""NVIDIA NeMo AutoModel's DeepSeek-V4.1 (PyPI: nemo-automodel), a PyTorch model for training.

It loads the official checkpoint format with its own adapter, keeps the cache quantizers, and has
no FP8 quantization of linear inputs; hence it is compared in `f32`. It runs whole sequences only.
"""

import importlib.metadata
import json
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # eager everywhere: no compiler runs

import numpy as np
import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention, engram
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from tap import Tap, blocks_of, mask_of, tidy, token_classes, weight_files

NAME = "nemo-automodel"
PRECISIONS = ("f32",)
CHUNKS = False  # whole sequences only
FORCED = 1e6  # a router bias that outweighs every score


def versions():
    packages = ("nemo-automodel", "torch", "transformers")
    return {name: importlib.metadata.version(name) for name in packages}


def build(directory, dtype):
    """The model with the weights of a checkpoint directory."""
    directory = Path(directory)
    document = json.loads((directory / "config.json").read_text())
    document.pop("quantization_config", None)
    document["dtype"] = document["text_config"]["dtype"] = dtype
    document["vision_config"] = {"num_hidden_layers": 0}
    config = DeepseekV41Config(**document)
    backend = BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch_fp32",
        rope_fusion=False,
        experts="torch",
        dispatcher="torch",
        enable_hf_state_dict_adapter=True,
    )
    # The adapter always derives the token classes from the tokenizer.
    classes = token_classes(directory)
    tokenizer = classes
    if classes is None:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    else:
        engram._compressed_token_map = lambda _: (classes, len(classes))
    with torch.device("meta"):  # no storage and no initialization before the weights come
        model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=tokenizer)
    if model.model.engram_hash is not None:  # its buffers are computed
        model.model.engram_hash = engram.DeepseekV41NgramHash(config.text_config, tokenizer)
    weights = {}
    for file in weight_files(directory):
        weights.update(load_file(file))
    text = {n: w for n, w in weights.items() if not n.startswith(("vision.", "aligner.", "image_"))}
    weights = model.state_dict_adapter.from_hf(text)
    types = {name: value.dtype for name, value in model.state_dict().items()}
    weights = {name: value.to(types.get(name)) for name, value in weights.items()}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval().requires_grad_(False)


class Peer:
    def __init__(self, directory, precision="f32"):
        if precision not in PRECISIONS:
            raise ValueError(f"{NAME} has no {precision} precision")
        self.model = build(directory, "float32")
        self.config = self.model.config.text_config
        self.tap = None
        self.layer = None
        self._instrument()

    @torch.no_grad()
    def run(self, tokens, tap=None):
        """Runs a sequence; the tensors seen are in tap.seen."""
        self.tap = tap or Tap(self.config)
        self.model(torch.tensor([tokens]))
        return self.tap.seen

    def _point(self, name, value):
        """value [1, T, ...]"""
        fed = self.tap.point(name, value[0].double().numpy())
        return value if fed is None else torch.from_numpy(np.array(fed)).to(value.dtype)[None]

    def _instrument(self):
        inner, streams = self.model.model, self.config.hc_mult

        def embed(_, __, output):
            wide = output[:, :, None].expand(-1, -1, streams, -1)
            return self._point("embed", wide)[:, :, 0]

        inner.embed_tokens.register_forward_hook(embed)
        self.model.lm_head.register_forward_hook(lambda _, __, y: self._point("logits", y))
        for i, layer in inner.layers.items():
            self._instrument_layer(int(i), layer)

        quantize = attention.quantize_cache

        def quantize_cache(values, *, format, block_size):
            values = quantize(values, format=format, block_size=block_size)
            names = {("fp8", 3): "window", ("nvfp4", 3): "main", ("mxfp4", 3): "index"}
            name = names.get((format, values.ndim))  # the index query has 4 dimensions
            if name is None:
                return values
            return self._point(f"layers.{self.layer}.{name}_codes", values)

        attention.quantize_cache = quantize_cache

    def _instrument_layer(self, i, layer):
        prefix = f"layers.{i}."

        def output(name):
            return lambda _, __, value: self._point(prefix + name, value)

        def enter(*_):
            self.layer = i

        def attended(_, __, out):
            hidden = self._point(prefix + "attn_out", out.hidden_states)
            if self.config.compress_ratios[i] and layer.attn.indexer is None:
                # A Reuse layer: what the source published.
                self.tap.point(prefix + "selected", tidy(out.state.topk_indices[0].numpy()))
            return replace(out, hidden_states=hidden)

        def selected(_, __, state):
            size = self.config.candidate_block_size
            if i == self.config.candidate_source_layer_id:
                mask = state.candidates[0].numpy()
                fed = self.tap.point(prefix + "candidates", blocks_of(mask, size))
                if fed is not None:
                    mask = torch.from_numpy(mask_of(fed, size, mask.shape[1]))[None]
                    state = replace(state, candidates=mask)
            fed = self.tap.point(prefix + "selected", tidy(state.topk_indices[0].numpy()))
            if fed is not None:
                state = replace(state, topk_indices=torch.from_numpy(np.array(fed))[None])
            return state

        layer.attn.register_forward_pre_hook(enter)
        layer.attn.register_forward_hook(attended)
        layer.attn_norm.register_forward_hook(output("attn_in"))
        layer.ffn_norm.register_forward_hook(output("ffn_in"))
        layer.ffn.register_forward_hook(output("ffn_out"))
        if layer.engram is not None:
            layer.engram.register_forward_hook(output("engram"))
        if layer.attn.indexer is not None:
            layer.attn.indexer.register_forward_hook(selected)
        for site, module in (("attn", layer.attn_hc), ("ffn", layer.ffn_hc)):
            expand = module.expand

            def expanded(*args, name=site, expand=expand):
                return self._point(prefix + name, expand(*args))

            module.expand = expanded
        self._instrument_router(prefix, layer.ffn.gate)

    def _instrument_router(self, prefix, gate):
        route, bias = gate._route_scores, gate._local_score_correction_bias

        def routed(scores):
            result = route(scores)
            fed = self.tap.point(prefix + "experts", tidy(result[1].numpy()))
            if fed is None:
                return result
            forced = torch.zeros(scores.shape).scatter(1, torch.from_numpy(np.array(fed)), FORCED)
            gate._local_score_correction_bias = lambda: forced
            result = route(scores)
            gate._local_score_correction_bias = bias
            return result

        gate._route_scores = routed
