"""The DSpark drafter: a block of draft tokens behind an anchor, float64.

The target's forward pass (model.forward with `draft`) gives every position one window row per draft
stage. A draft starts from an anchor: the newest token, at position P, which the target has not run
yet. Its block is the anchor and noise tokens at P, P + 1, ...; every row sees the W newest context
rows before P and all rows of its own block. Row k proposes the token at P + k + 1, from the block's
logits plus a bias that depends on the token proposed just before.
"""

import numpy as np

from .model import Forward

# Beside the ablations of model.py.
DRAFT_ABLATIONS = (
    "row-windows",
    "causal-block",
    "late-block",
    "no-noise",
    "image-bias",
    "draft-yarn",
    "normalized-single-expert",
    "no-markov",
    "stale-markov",
    "post-norm-confidence",
)


def draft(checkpoint, context, anchors, precision="f32", **options):
    """Drafts behind every (P, token) of `anchors`; context: Result.context of the tokens before.

    Options as for model.forward(). The dump holds `mtp.*` tensors; rows are those of the blocks one
    after the other, in `mtp.tokens` and `mtp.confidence` one row per block.
    """
    return Draft(checkpoint, context, anchors, precision, **options).run()


class Draft(Forward):
    def __init__(self, checkpoint, context, anchors, precision, **options):
        config = checkpoint.config
        block = config.dspark_block_size
        ids = np.full((len(anchors), block), config.dspark_noise_token_id)
        ids[:, 0] = [token for _, token in anchors]
        if "no-noise" in options.get("ablate", ()):
            ids[:] = ids[:, :1]
        super().__init__(checkpoint, ids.ravel(), precision, **options)
        self.context, self.block = context, block
        self.anchor_ids = ids[:, 0]
        self.start = np.repeat([position for position, _ in anchors], block)
        self.place = np.tile(np.arange(block), len(anchors))  # of a row in its block
        self.positions = self.start + self.place
        if "late-block" in self.ablate:
            self.positions = self.positions + 1
        self.dead = np.full(len(self.positions), "image-bias" in self.ablate)

    @staticmethod
    def known_ablations():
        return {*DRAFT_ABLATIONS, *Forward.known_ablations()}

    def table(self, compressed, positions):
        return super().table(compressed or "draft-yarn" in self.ablate, positions)

    def window_keys(self, layer, window):
        context = self.context[layer - self.config.num_hidden_layers]
        first = self.start[:, None] - self.config.sliding_window
        if "row-windows" in self.ablate:
            first = first + self.place[:, None]
        seen = first + np.arange(self.config.sliding_window)
        seen = np.where((seen < 0) | (seen >= self.start[:, None]), -1, seen)
        own = np.arange(len(window))[:, None] - self.place[:, None] + np.arange(self.block)
        own = own + len(context)
        if "causal-block" in self.ablate:
            own = np.where(np.arange(self.block) > self.place[:, None], -1, own)
        return np.concatenate([context, window]), np.concatenate([seen, own], axis=1)

    def run(self):
        config, point = self.config, self.point
        x, carried = self.embedded("mtp.embed")
        for stage in config.stages:
            self.nearest = np.full(len(x), np.inf)
            x, carried = self.sublayers(config.num_hidden_layers + stage, x, carried)
            if self.margins:
                self.result.margins[f"mtp.{stage}.quant"] = self.nearest
        last = f"mtp.{config.stages[-1]}."
        hidden = point("mtp.hidden", self.collapse(x, carried))
        normed = self.norm(last + "norm.weight", hidden)
        base = point("mtp.base_logits", normed @ self.weight("head.weight").T)
        self.propose(last, normed if "post-norm-confidence" in self.ablate else hidden, base)
        return self.result

    def propose(self, last, hidden, base):
        """Best tokens, left to right: each row's logits depend on the token before it."""
        embed = self.weight(last + "markov_head.embed.weight")
        head = self.weight(last + "markov_head.head.weight")
        proj = self.weight(last + "confidence_head.proj.weight")
        blocks = (-1, self.block)
        logits = np.empty_like(base)
        tokens = np.empty((len(self.anchor_ids), self.block), np.int64)
        confidence = np.empty(tokens.shape)
        fed = self.feed.get("mtp.tokens")
        previous = self.anchor_ids
        for k in range(self.block):
            e = embed[self.anchor_ids if "stale-markov" in self.ablate else previous]
            rows = self.place == k
            bias = 0 if "no-markov" in self.ablate else e @ head.T
            logits[rows] = base[rows] + bias
            confidence[:, k] = (np.concatenate([hidden[rows], e], axis=1) @ proj.T)[:, 0]
            tokens[:, k] = logits[rows].argmax(axis=1)
            previous = tokens[:, k] if fed is None else fed.reshape(blocks)[:, k]
        self.point("mtp.logits", logits)
        self.point("mtp.confidence", confidence)
        if self.margins:
            self.result.scores["mtp.tokens"] = logits
        self.point("mtp.tokens", tokens)
