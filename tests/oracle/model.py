"""The text forward pass in exact mode: one request, all positions at once, float64.

It states what the model computes, in the order of the official reference model.py, and shares no
code with the engine. Two precisions:

  official  activations are BF16 at the reference's rounding points, the inputs of quantized
            linears are FP8, attention probabilities are BF16 in blocks of 64 keys;
  f32       nothing of that; the quantizers of the window, main and index caches remain.

Shapes in comments: T tokens, M streams, D hidden, H heads, K head dim, N compressed entries.
"""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from . import formats
from .engram import Addressing

# Deliberate faults, one per name. A comparison that still passes with one of them is no test.
ABLATIONS = (
    "transpose-comb",
    "no-pre-shift",
    "swap-theta",
    "no-inverse-rope",
    "no-sink",
    "quantize-before-rope",
    "e8m0-main-scales",
    "floor-scale",
    "no-router-bias",
    "biased-weights",
    "clamp-gate-both",
    "own-candidates",
    "no-pinned-block",
    "early-visibility",
    "engram-zero",
)

# Faults that only rows of images show.
IMAGE_ABLATIONS = ("text-bias-for-images", "images-in-hashes", "engram-in-images")

# Faults of the drafter (drafter.py); the first ones act on the context that the target computes.
CONTEXT_ABLATIONS = ("tap-outputs", "tap-first-stream", "no-main-norm")

KEY_BLOCK = 64  # keys per block of the reference's online softmax
ROUTER_EPS = 1e-20
ROW_CHUNK = 64  # query rows per gather, to bound memory


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def rms_factor(x, eps):
    return 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def top(scores, k):
    """Ids of the k best scores per row, ascending, padded with -1.

    Equal scores: the lower id wins. -inf is never taken.
    """
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    missing = np.take_along_axis(scores, order, 1) == -np.inf
    order = np.sort(np.where(missing, scores.shape[1], order), axis=1)
    return np.where(order == scores.shape[1], -1, order)


def gap(scores, k):
    """Distance between the k-th and the next best score, relative to the row's largest magnitude.

    Infinite where nothing is left out. Two exact zeros are no near tie: they are entries that no
    head scores above zero, and the id decides between them.
    """
    rows, n = scores.shape
    if n <= k:
        return np.full(rows, np.inf)
    ranked = -np.sort(-scores, axis=1)
    last, following = ranked[:, k - 1], ranked[:, k]
    size = np.max(np.where(np.isfinite(scores), np.abs(scores), 0), axis=1)
    free = (following == -np.inf) | ((last == 0) & (following == 0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(free, np.inf, (last - following) / size)


def widen(dump):
    """A dump's tensors in the types used here; cache rows stay bytes."""
    wide = {"f": np.float64, "i": np.int64, "u": np.uint8}
    return {name: array.astype(wide[array.dtype.kind]) for name, array in (dump or {}).items()}


def rope_frequencies(config, compressed):
    """Rotation per position of each pair, FP32. YaRN belongs to the layers with compression."""
    dims = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    pairs = np.arange(dims // 2)
    frequency = np.float64(base) ** (-2 * pairs / dims)
    scaling = config.rope_scaling
    if compressed and scaling:
        original = scaling["original_max_position_embeddings"]

        def correction(rotations):
            return dims * np.log(original / (2 * np.pi * rotations)) / (2 * np.log(base))

        low = max(np.floor(correction(scaling["beta_fast"])), 0)
        high = min(np.ceil(correction(scaling["beta_slow"])), dims - 1)
        ramp = np.clip((pairs - low) / max(high - low, 1e-3), 0, 1)
        frequency = frequency / scaling["factor"] * ramp + frequency * (1 - ramp)
    return frequency.astype(np.float32)


def rope_table(config, compressed, positions):
    """e^(i p f) per position and pair. The angle is an FP32 product, the table is FP32."""
    angle = positions.astype(np.float32)[:, None] * rope_frequencies(config, compressed)
    angle = angle.astype(np.float64)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return cos.astype(np.float64) + 1j * sin


def rotate(x, table):
    """Rotates the interleaved pairs in the last dims of x [T, ..., width] by table [T, pairs]."""
    dims = 2 * table.shape[1]
    table = np.expand_dims(table, tuple(range(1, x.ndim - 1)))
    turned = (x[..., -dims::2] + 1j * x[..., -dims + 1 :: 2]) * table
    out = x.copy()
    out[..., -dims::2], out[..., -dims + 1 :: 2] = turned.real, turned.imag
    return out


@dataclass
class Result:
    """Everything that one forward pass computed.

    dump       tensors by the names of `cachalot --dump`
    margins    `layers.L.index|candidate|router|quant` and `logits`, [T] each: how far the nearest
               decision is from its boundary. `quant` covers every quantized value of that row
    distances  of the codes in the dump: name -> (per element, per block scale); and
               `layers.L.index_q` [T], the nearest quantizer boundary of the index query
    scores     the scores that `selected`, `candidates` and `experts` were taken from
    context    with `draft`: per draft stage the window rows [T, K] of the positions
    """

    dump: dict = field(default_factory=dict)
    margins: dict = field(default_factory=dict)
    distances: dict = field(default_factory=dict)
    scores: dict = field(default_factory=dict)
    context: dict = field(default_factory=dict)

    def log_probs(self):  # [T, V]
        logits = self.dump["logits"]
        return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def forward(checkpoint, tokens, precision="f32", **options):
    """Runs one request. Options:

    ablate   names from ABLATIONS, with `dead` from IMAGE_ABLATIONS, with `draft` from
             CONTEXT_ABLATIONS
    force    dump tensors `layers.L.selected` and `layers.L.experts` to use instead of own choices
    feed     a dump; each tensor is computed and reported, then the fed one is used from there on,
             so that every sublayer is judged on the same inputs
    dead     [T] true at image positions
    images   [count of those, D] what they are embedded as (vision.py) instead of their tokens
    margins  also fill margins, distances and scores
    draft    also compute what the drafter reads of the target
    """
    return Forward(checkpoint, tokens, precision, **options).run()


class Forward:
    def __init__(
        self,
        checkpoint,
        tokens,
        precision,
        ablate=(),
        force=None,
        feed=None,
        dead=None,
        images=None,
        margins=False,
        draft=False,
    ):
        if precision not in ("official", "f32"):
            raise ValueError(f"unknown precision {precision}")
        if unknown := set(ablate) - self.known_ablations():
            raise ValueError(f"unknown ablation {', '.join(sorted(unknown))}")
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.official = precision == "official"
        self.ablate = frozenset(ablate)
        self.force, self.feed = widen(force), widen(feed)
        self.tokens = np.asarray(tokens, np.int64)
        known = (self.tokens >= 0) & (self.tokens < self.config.vocab_size)
        if not len(self.tokens) or not known.all():
            raise ValueError("tokens must be a non-empty list of vocabulary ids")
        self.positions = np.arange(len(self.tokens))
        self.dead = np.zeros(len(self.tokens), bool) if dead is None else np.asarray(dead, bool)
        self.images = images
        self.margins, self.draft = margins, draft
        self.result = Result()
        self.addressing = Addressing(self.config, checkpoint.directory)
        self.main, self.index_keys = {}, {}  # per KV source layer: [N, K], [N, index head dim]
        self.selected = self.candidates = None  # of the most recent source
        rule = "floor" if "floor-scale" in self.ablate else "ceil"
        self.fp8 = dataclasses.replace(formats.FP8, scale_rule=rule)
        self.fp4_index = dataclasses.replace(formats.FP4_INDEX, scale_rule=rule)
        self.fp4_main = formats.FP4_MAIN
        if "e8m0-main-scales" in self.ablate:
            self.fp4_main = dataclasses.replace(formats.FP4_MAIN, scale_rule=rule)

    # ---- Bookkeeping -----------------------------------------------------------------------------

    @staticmethod
    def known_ablations():
        return {*ABLATIONS, *IMAGE_ABLATIONS, *CONTEXT_ABLATIONS}

    def prefix(self, layer):
        """Of tensor names. Draft stages count on behind the backbone's layers."""
        stage = layer - self.config.num_hidden_layers
        return f"layers.{layer}." if stage < 0 else f"mtp.{stage}."

    def bf16(self, x):
        """A rounding point of the reference."""
        return formats.bf16(x) if self.official else x

    def point(self, name, value):
        """Reports a dump tensor; returns what the computation goes on with."""
        value = self.force.get(name, value)
        self.result.dump[name] = value
        return self.fed(self.feed.get(name, value), value)

    @staticmethod
    def fed(fed, value):
        """What a fed tensor says; the own value where it is not finite, so that a fault stays in
        its sublayer."""
        if fed.dtype != np.float64 or fed.shape != value.shape:
            return fed
        return np.where(np.isfinite(fed), fed, value)

    def decide(self, name, scores, k, kind):
        """The k best of each row, with their margin."""
        if self.margins:
            self.result.scores[name] = scores
            self.result.margins[name.rpartition(".")[0] + "." + kind] = gap(scores, k)
        return top(scores, min(k, scores.shape[1]))

    def note(self, quantizer, x, rows):
        """Records how near the values x are to a rounding boundary, for the token rows given."""
        elements, blocks = distances = quantizer.distance(x)
        if self.official:
            # BF16 values often sit exactly on a boundary; the definition decides those.
            elements, blocks = (np.where(d == 0, np.inf, d) for d in distances)
        if len(x):
            axes = tuple(range(1, x.ndim))
            nearest = np.minimum(elements.min(axes), blocks.min(axes))
            self.nearest[rows] = np.minimum(self.nearest[rows], nearest)
        return distances

    # ---- Building blocks -------------------------------------------------------------------------

    def weight(self, name):
        return self.checkpoint.weight(name)

    def linear(self, name, x, rows=slice(None)):
        """x W^T, unrounded. Quantized weights take quantized inputs."""
        if self.official and self.checkpoint.quantized(name):
            if self.margins:
                self.note(self.fp8, x, rows)
            x = self.fp8.quantize(x)[2]
        return x @ self.weight(name).T

    def norm(self, name, x):
        return self.bf16(x * rms_factor(x, self.config.rms_norm_eps) * self.weight(name))

    def table(self, compressed, positions):
        if "swap-theta" in self.ablate:
            compressed = not compressed
        return rope_table(self.config, compressed, positions)

    def store(self, name, x, table, quantizer, standard, rows):
        """Rotates and quantizes cache rows; returns the values that readers get."""
        if "quantize-before-rope" in self.ablate:
            codes, values = quantizer.rows(x)
            values = self.bf16(rotate(values, table))
        else:
            x = self.bf16(rotate(x, table))
            codes, values = quantizer.rows(x)
        if self.margins:
            self.result.distances[name] = self.note(quantizer, x, rows)
        used = self.point(name, codes)
        if name in self.feed:
            values = self.fed(standard.row_values(used, x.shape[-1]), values)
        return values

    # ---- Residual streams ------------------------------------------------------------------------

    def mix(self, layer, site, x):
        """pre [T, M], post [T, M], comb [T, M, M] of one sublayer, from the streams x [T, M, D]."""
        config, name = self.config, f"{self.prefix(layer)}hc_{site}_"
        streams, eps = config.hc_mult, config.hc_eps
        v = x.reshape(len(x), -1)
        m = v @ self.weight(name + "fn").T * rms_factor(v, config.rms_norm_eps)
        base, scale = self.weight(name + "base"), self.weight(name + "scale")
        pre = sigmoid(m[:, :streams] * scale[0] + base[:streams]) + eps
        post = 2 * sigmoid(m[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
        comb = (m[:, 2 * streams :] * scale[2] + base[2 * streams :]).reshape(-1, streams, streams)
        comb = np.exp(comb - comb.max(axis=2, keepdims=True))
        comb = comb / comb.sum(axis=2, keepdims=True) + eps
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        for _ in range(config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(axis=2, keepdims=True) + eps)
            comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        if "transpose-comb" in self.ablate:
            comb = comb.transpose(0, 2, 1)
        return pre, post, comb

    def collapse(self, x, pre):
        return self.bf16(np.einsum("tm,tmd->td", pre, x))

    def expand(self, y, x, post, comb):
        """comb [source stream, destination stream]."""
        return self.bf16(post[:, :, None] * y[:, None, :] + np.einsum("tjk,tjd->tkd", comb, x))

    # ---- Engram ----------------------------------------------------------------------------------

    def engram(self, layer, x):
        config, name = self.config, f"layers.{layer}.engram."
        tokens, width = len(x), config.hidden_size
        dead = self.dead & ("images-in-hashes" not in self.ablate)
        ids = self.addressing.rows(layer, self.tokens, dead)
        e = self.checkpoint.rows(name + "embed.weight", ids.ravel()).reshape(tokens, -1)
        if "engram-zero" in self.ablate:
            e = np.zeros_like(e)
        kv = self.bf16(self.linear(name + "wkv.weight", self.bf16(e)))
        keys, value = kv[:, :-width].reshape(x.shape), kv[:, None, -width:]
        product = self.weight(name + "q_weight") * self.weight(name + "k_weight")  # [M, D]
        dot = np.sum(x * product * keys, axis=-1, keepdims=True) * width**-0.5
        dot = dot * rms_factor(x, config.rms_norm_eps) * rms_factor(keys, config.rms_norm_eps)
        gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot))
        if "engram-in-images" not in self.ablate:
            gate = np.where(self.dead[:, None, None], 0, gate)
        return self.bf16(x + gate * value)

    # ---- Attention -------------------------------------------------------------------------------

    def attention(self, layer, u):
        config, name = self.config, self.prefix(layer) + "attn."
        compressed = config.ratio(layer) > 0
        table = self.table(compressed, self.positions)
        r = self.norm(name + "q_norm.weight", self.bf16(self.linear(name + "wq_a.weight", u)))
        q = self.bf16(self.linear(name + "wq_b.weight", r))
        q = q.reshape(len(u), config.num_attention_heads, config.head_dim)
        q = self.bf16(rotate(q, table))

        kv = self.norm(name + "kv_norm.weight", self.bf16(self.linear(name + "wkv.weight", u)))
        codes = self.prefix(layer) + "window_codes"
        window = self.store(codes, kv, table, self.fp8, formats.FP8, np.arange(len(u)))

        entries, selected = np.empty((0, config.head_dim)), np.empty((len(u), 0), np.int64)
        if compressed:
            if layer in config.kv_source_layer_ids:
                self.compress(layer, u)
            if layer in config.index_source_layer_ids:
                self.select(layer, r, u, table)
            entries = self.main[config.kv_source(layer)]
            selected = self.selected = self.point(f"layers.{layer}.selected", self.selected)

        window, recent = self.window_keys(layer, window)
        sink = self.weight(name + "attn_sink")
        o = self.bf16(self.attend(q, window, recent, entries, selected, sink))
        if "no-inverse-rope" not in self.ablate:
            o = self.bf16(rotate(o, table.conj()))
        groups = config.o_groups
        o = o.reshape(len(u), groups, -1)
        # wo_a never quantizes its input, whatever its stored type.
        wo_a = self.weight(name + "wo_a.weight").reshape(groups, config.o_lora_rank, -1)
        z = self.bf16(np.einsum("tgi,goi->tgo", o, wo_a, optimize=True))
        return self.bf16(self.linear(name + "wo_b.weight", z.reshape(len(u), -1)))

    def compress(self, layer, u):
        """Main cache entries and index keys of a KV source layer, for all complete groups."""
        config, name = self.config, f"layers.{layer}.attn."
        ratio = config.ratio(layer)
        count = len(u) // ratio
        u = u[: count * ratio]
        kv = self.linear(name + "compressor.wkv.weight", u)
        if ratio == 1:
            kv = self.bf16(kv)
        else:
            # FP32 in both precisions: a softmax over the group's tokens, per channel.
            s = self.linear(name + "compressor.wgate.weight", u)
            s = s.reshape(count, ratio, config.head_dim)
            s = np.exp(s - s.max(axis=1, keepdims=True))
            kv = kv.reshape(s.shape)
            kv = self.bf16((kv * s).sum(axis=1) / s.sum(axis=1))
        latent = self.norm(name + "compressor.norm.weight", kv)  # [N, K]

        first = np.arange(count) * ratio  # position of each group's first token
        last = first + ratio - 1
        table = self.table(True, first)
        # The index key reads the latent before its rotation and quantization.
        key = self.bf16(self.linear(name + "indexer.wk.weight", latent))
        key = self.norm(name + "indexer.k_norm.weight", key)
        self.main[layer] = self.store(
            f"layers.{layer}.main_codes", latent, table, self.fp4_main, formats.FP4_MAIN, last
        )
        self.index_keys[layer] = self.store(
            f"layers.{layer}.index_codes", key, table, self.fp4_index, formats.FP4_INDEX, last
        )

    def visible(self, layer, count):
        """Number of entries that each position may read: those of groups it has completed."""
        ratio = self.config.ratio(layer)
        if "early-visibility" in self.ablate:
            return np.minimum(self.positions // ratio + 1, count)
        return (self.positions + 1) // ratio

    def index_scores(self, layer, r, u, table):
        """[T, N], unmasked. FP32 in both precisions after the quantized queries."""
        config, name = self.config, f"layers.{layer}.attn.indexer."
        heads, width = config.index_n_heads, config.index_head_dim
        q = self.bf16(self.linear(name + "wq_b.weight", r)).reshape(len(r), heads, width)
        if "quantize-before-rope" in self.ablate:
            q = self.bf16(rotate(self.fp4_index.quantize(q)[2], table))
        else:
            q = self.bf16(rotate(q, table))
            if self.margins:
                elements, blocks = self.note(self.fp4_index, q, self.positions)
                self.result.distances[f"layers.{layer}.index_q"] = np.minimum(
                    elements.min((1, 2)), blocks.min((1, 2))
                )
            q = self.fp4_index.quantize(q)[2]
        w = self.bf16(self.linear(name + "weights_proj.weight", u))  # [T, heads]
        keys = self.index_keys[config.kv_source(layer)]
        scores = np.zeros((len(r), len(keys)))
        # Head by head, so that equal keys get equal scores whatever their place.
        for head in range(heads):
            scores += w[:, head, None] * np.maximum(q[:, head] @ keys.T, 0)
        return scores * (width**-0.5 * heads**-0.5)

    def select(self, layer, r, u, table):
        config = self.config
        scores = self.index_scores(layer, r, u, table)
        visible = self.visible(layer, scores.shape[1])
        scores = np.where(np.arange(scores.shape[1]) < visible[:, None], scores, -np.inf)
        if layer == config.candidate_source_layer_id:
            self.candidates = self.choose_candidates(layer, scores, visible)
        own = layer == config.candidate_source_layer_id and "own-candidates" in self.ablate
        if config.uses_candidates(layer) or own:
            scores = np.where(self.candidate_mask(scores.shape), scores, -np.inf)
        self.selected = self.decide(f"layers.{layer}.selected", scores, config.index_topk, "index")

    def choose_candidates(self, layer, scores, visible):
        """Block ids [T, blocks], ascending."""
        config = self.config
        size = config.candidate_block_size
        rows, count = scores.shape
        blocks = -(-count // size)
        padded = np.full((rows, blocks * size), -np.inf)
        padded[:, :count] = scores
        block_scores = padded.reshape(rows, blocks, size).max(axis=2)
        if "no-pinned-block" not in self.ablate:
            seen = np.flatnonzero(visible)
            block_scores[seen, (visible[seen] - 1) // size] = np.inf
        name = f"layers.{layer}.candidates"
        picked = self.decide(name, block_scores, config.candidate_topk_blocks, "candidate")
        return self.point(name, picked)

    def candidate_mask(self, shape):
        rows, count = shape
        size = self.config.candidate_block_size
        mask = np.zeros((rows, -(-count // size) + 1), bool)  # the last column takes the -1 padding
        np.put_along_axis(mask, self.candidates, True, axis=1)
        return np.repeat(mask[:, :-1], size, axis=1)[:, :count]

    def window_keys(self, layer, window):
        """Window rows, and the ids [T, W] of those that each row sees, ascending; -1: none."""
        recent = self.positions[:, None] + np.arange(1 - self.config.sliding_window, 1)
        return window, np.where(recent < 0, -1, recent)

    def attend(self, q, window, recent, entries, selected, sink):
        """[T, H, K]. The keys of a row: its window, ascending, then its selected entries."""
        tokens = len(q)
        keys = np.concatenate([window, entries])
        picked = np.where(selected < 0, -1, selected + len(window))
        index = np.concatenate([recent, picked], axis=1)
        # Blocks hold no padding: the valid keys of a row come first.
        order = np.argsort(index < 0, axis=1, kind="stable")
        index = np.take_along_axis(index, order, axis=1)
        if "no-sink" in self.ablate:
            sink = np.full_like(sink, -np.inf)
        chunks = []
        for begin in range(0, tokens, ROW_CHUNK):
            rows = slice(begin, begin + ROW_CHUNK)
            chunks.append(self.attend_rows(q[rows], keys[index[rows]], index[rows] >= 0, sink))
        return np.concatenate(chunks)

    def attend_rows(self, q, kv, valid, sink):
        """Online softmax over blocks of keys; kv [T, keys, K] serves as keys and values."""
        scores = q @ kv.transpose(0, 2, 1) * self.config.head_dim**-0.5  # [T, H, keys]
        scores = np.where(valid[:, None, :], scores, -np.inf)
        largest = np.full(q.shape[:2] + (1,), -1e30)
        total, out = np.zeros_like(largest), np.zeros_like(q)
        for begin in range(0, scores.shape[2], KEY_BLOCK):
            block = slice(begin, begin + KEY_BLOCK)
            previous = largest
            largest = np.maximum(previous, scores[:, :, block].max(axis=2, keepdims=True))
            p = np.exp(scores[:, :, block] - largest)
            fade = np.exp(previous - largest)
            # The numerator sees rounded probabilities, the denominator does not.
            total = total * fade + p.sum(axis=2, keepdims=True)
            out = out * fade + self.bf16(p) @ kv[:, block]
        with np.errstate(over="ignore"):  # a row without keys gives zeros: any sink outweighs it
            return out / (total + np.exp(sink[:, None] - largest))

    # ---- Mixture of experts ----------------------------------------------------------------------

    def moe(self, layer, x):
        config, name = self.config, self.prefix(layer) + "ffn."
        logits = x @ self.weight(name + "gate.weight").T / config.gate_temp
        softplus = np.logaddexp(0, logits)
        # Scores are FP32: below its range they are zero and the router weights vanish.
        scores = np.sqrt(np.where(softplus < 2.0**-149, 0, softplus))
        biased = scores
        if "no-router-bias" not in self.ablate:
            bias = self.weight(name + "gate.bias")
            if self.dead.any() and "text-bias-for-images" not in self.ablate:
                bias = np.where(self.dead[:, None], self.weight(name + "gate.bias_vl"), bias)
            biased = scores + bias
        key, count = self.prefix(layer) + "experts", config.experts_per_token(layer)
        chosen = self.point(key, self.decide(key, biased, count, "router"))
        source = biased if "biased-weights" in self.ablate else scores
        weights = np.take_along_axis(source, chosen, 1)
        # A single expert keeps its score: normalized it would be the constant 1.
        if count > 1 or "normalized-single-expert" in self.ablate:
            weights = weights / (weights.sum(axis=1, keepdims=True) + ROUTER_EPS)
        weights = weights * config.routed_scaling_factor
        total = np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, slots = np.nonzero(chosen == expert)
            factor = weights[rows, slots][:, None]
            total[rows] += self.expert(f"{name}experts.{expert}.", x[rows], factor, rows)
        return self.bf16(total + self.expert(name + "shared_experts.", x, 1, np.arange(len(x))))

    def expert(self, name, x, factor, rows):
        limit = self.config.swiglu_limit
        gate = self.bf16(self.linear(name + "w1.weight", x, rows))
        up = self.bf16(self.linear(name + "w3.weight", x, rows))
        up = np.clip(up, -limit, limit)
        gate = np.minimum(gate, limit)
        if "clamp-gate-both" in self.ablate:
            gate = np.maximum(gate, -limit)
        h = gate * sigmoid(gate) * up * factor
        return self.bf16(self.linear(name + "w2.weight", self.bf16(h), rows))

    # ---- What the drafter reads ------------------------------------------------------------------

    def tap(self, x):
        """One target layer's share of the drafter's input, from the streams before its attention."""
        if "tap-first-stream" in self.ablate:
            return x[:, 0]
        return self.bf16(x.mean(axis=1))

    def draft_context(self, taps):
        """Every draft stage's window row of every position, from the taps [T, D] of the layers."""
        config, point = self.config, self.point
        self.nearest = np.full(len(self.positions), np.inf)
        taps = point("mtp.taps", np.concatenate(taps, axis=1))
        features = self.bf16(self.linear("mtp.0.main_proj.weight", taps))
        if "no-main-norm" not in self.ablate:
            features = self.norm("mtp.0.main_norm.weight", features)
        features = point("mtp.features", features)
        for stage in config.stages:
            name = f"mtp.{stage}."
            kv = self.bf16(self.linear(name + "attn.wkv.weight", features))
            kv = self.norm(name + "attn.kv_norm.weight", kv)
            table = self.table(False, self.positions)
            self.result.context[stage] = self.store(
                name + "context_codes", kv, table, self.fp8, formats.FP8, self.positions
            )
        if self.margins:
            self.result.margins["mtp.quant"] = self.nearest

    # ---- The whole pass --------------------------------------------------------------------------

    def sublayers(self, layer, x, carried):
        """One layer. Each sublayer's input is collapsed with the coefficients of the one before."""
        name, point = self.prefix(layer), self.point
        for site, sublayer in (("attn", self.attention), ("ffn", self.moe)):
            pre, post, comb = self.mix(layer, site, x)
            u = self.collapse(x, pre if "no-pre-shift" in self.ablate else carried)
            u = point(f"{name}{site}_in", self.norm(f"{name}{site}_norm.weight", u))
            y = point(f"{name}{site}_out", sublayer(layer, u))
            x = point(name + site, self.expand(y, x, post, comb))
            carried = pre
        return x, carried

    def embedded(self, name):
        """Streams [T, M, D] of the tokens, and the collapse weights before the first sublayer."""
        x = self.checkpoint.rows("embed.weight", self.tokens)
        if self.images is not None:
            x[self.dead] = self.images
        x = np.repeat(self.bf16(x)[:, None], self.config.hc_mult, axis=1)
        carried = np.zeros(x.shape[:2])
        carried[:, 0] = 1
        return self.point(name, x), carried

    def run(self):
        config, result = self.config, self.result
        x, carried = self.embedded("embed")
        taps = []
        for layer in config.layers:
            self.nearest = np.full(len(x), np.inf)
            if layer in config.engram_layer_ids:
                x = self.point(f"layers.{layer}.engram", self.engram(layer, x))
            before = x
            x, carried = self.sublayers(layer, x, carried)
            if self.draft and layer in config.dspark_target_layer_ids:
                taps.append(self.tap(x if "tap-outputs" in self.ablate else before))
            if self.margins:
                result.margins[f"layers.{layer}.quant"] = self.nearest
        h = self.norm("norm.weight", self.collapse(x, carried))
        logits = self.point("logits", h @ self.weight("head.weight").T)
        if self.draft:
            self.draft_context(taps)
        if self.margins:
            best = np.sort(logits, axis=1)
            result.margins["logits"] = best[:, -1] - best[:, -2]
        return result
