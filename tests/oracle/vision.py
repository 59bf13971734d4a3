"""The image encoder in exact mode, float64: patches to the rows that the language model reads.

As in model.py: `official` rounds to BF16 at the reference's rounding points (vision.py of the
official code: everything but the norms and the rotation is arithmetic of BF16 tensors), `f32`
nowhere. The code shares nothing with the engine.

Shapes in comments: N patches, H hidden, h heads, K head dim, S cell side, D width of the language
model.
"""

import math

import numpy as np

from . import formats
from .model import KEY_BLOCK, rms_factor, sigmoid

# Deliberate faults, one per name.
ABLATIONS = (
    "swap-axes",
    "interleaved-rope",
    "cell-columns-first",
    "patches-before-channels",
    "tanh-gelu",
    "text-eps",
    "swap-gate-up",
    "heads-before-qkv",
    "causal",
    "no-final-norm",
    "no-bias",
    "pad-top-left",
    "newline-first",
    "swap-start-end",
)

# Rounding points that are left out; they show in `official` alone.
ROUNDING_ABLATIONS = ("exact-probabilities", "exact-silu", "exact-gelu", "exact-rotation", "exact-sum")

EPS = 1e-6  # the language model has 1e-20

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x):
    return x * 0.5 * (1 + _erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def cells_of(vision, grid):
    """Rows and columns of cells."""
    side = vision["downsample_ratio"]
    return -(-grid[0] // side), -(-grid[1] // side)


def slots(vision, grid):
    rows, columns = cells_of(vision, grid)
    return rows * (columns + 1) + 2


class Tower:
    def __init__(self, checkpoint, precision="f32", ablate=()):
        if unknown := set(ablate) - {*ABLATIONS, *ROUNDING_ABLATIONS}:
            raise ValueError(f"unknown ablation {', '.join(sorted(unknown))}")
        self.checkpoint = checkpoint
        self.vision = checkpoint.config.document["vision_config"]
        self.official = precision == "official"
        self.ablate = frozenset(ablate)

    def bf16(self, x, what=""):
        """A rounding point, of the given name where an ablation has one."""
        return formats.bf16(x) if self.official and f"exact-{what}" not in self.ablate else x

    def weight(self, name):
        return self.checkpoint.weight(name)

    def linear(self, stem, x):
        y = x @ self.weight(stem + ".weight").T
        if stem + ".bias" in self.checkpoint and "no-bias" not in self.ablate:
            y = y + self.weight(stem + ".bias")
        return self.bf16(y)

    def norm(self, name, x):
        eps = 1e-20 if "text-eps" in self.ablate else EPS
        return self.bf16(x * rms_factor(x, eps) * self.weight(name))

    def angles(self, grid, width):
        """[N, K/2], FP32: a quarter of the frequencies' count turns by the row, a quarter by the
        column of the patch."""
        pairs = np.arange(width // 4)
        base = np.float64(self.vision["rope_theta"])
        frequency = (base ** (-2 * pairs / (width // 2))).astype(np.float32)
        axes = [a.ravel().astype(np.float32) for a in np.indices(grid)]
        if "swap-axes" in self.ablate:
            axes.reverse()
        return np.concatenate([axis[:, None] * frequency for axis in axes], axis=1)

    def rotate(self, x, angle):
        """x [N, h, K]: element i turns with element i + K/2."""
        cos, sin = (f(angle.astype(np.float64)).astype(np.float32) for f in (np.cos, np.sin))
        cos, sin = (t.astype(np.float64)[:, None] for t in (cos, sin))
        out = np.empty_like(x)
        half = x.shape[2] // 2
        first, second = slice(0, half), slice(half, None)
        if "interleaved-rope" in self.ablate:
            first, second = slice(0, None, 2), slice(1, None, 2)
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return self.bf16(out, "rotation")

    def attention(self, name, x, grid):
        heads = self.vision["num_attention_heads"]
        qkv = self.linear(name + "wqkv", x)
        if "heads-before-qkv" in self.ablate:
            q, k, v = qkv.reshape(len(x), heads, 3, -1).transpose(2, 0, 1, 3)
        else:
            q, k, v = qkv.reshape(len(x), 3, heads, -1).transpose(1, 0, 2, 3)
        angle = self.angles(grid, q.shape[2])
        q, k = self.rotate(q, angle), self.rotate(k, angle)
        scores = np.einsum("nhk,mhk->hnm", q, k) * q.shape[2] ** -0.5
        if "causal" in self.ablate:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -1e30)
        largest = np.full(scores.shape[:2] + (1,), -1e30)
        total, out = np.zeros_like(largest), np.zeros((heads, *q.shape[::2]))
        for begin in range(0, len(x), KEY_BLOCK):
            block = scores[:, :, begin : begin + KEY_BLOCK]
            previous = largest
            largest = np.maximum(previous, block.max(axis=2, keepdims=True))
            p, fade = np.exp(block - largest), np.exp(previous - largest)
            # The numerator sees rounded probabilities, the denominator does not.
            total = total * fade + p.sum(axis=2, keepdims=True)
            values = v[begin : begin + KEY_BLOCK].transpose(1, 0, 2)
            out = out * fade + self.bf16(p, "probabilities") @ values
        out = self.bf16(out / total).transpose(1, 0, 2)
        return self.linear(name + "wo", out.reshape(len(x), -1))

    def mlp(self, name, x):
        gate, up = np.split(self.linear(name + "w1", x), 2, axis=1)
        if "swap-gate-up" in self.ablate:
            gate, up = up, gate
        hidden = self.bf16(self.bf16(gate * sigmoid(gate), "silu") * up)
        return self.linear(name + "w2", hidden)

    def cells(self, x, grid):
        """[cells, H S S] in (channel, row, column) order; zeros beyond the right and lower edge."""
        side = self.vision["downsample_ratio"]
        rows, columns = cells_of(self.vision, grid)
        missing = (rows * side - grid[0], columns * side - grid[1])
        where = [(n, 0) if "pad-top-left" in self.ablate else (0, n) for n in missing]
        image = np.pad(x.reshape(*grid, -1), (*where, (0, 0)))
        image = image.reshape(rows, side, columns, side, -1)
        order = (0, 2, 4, 1, 3)
        if "cell-columns-first" in self.ablate:
            order = (0, 2, 4, 3, 1)
        if "patches-before-channels" in self.ablate:
            order = (0, 2, 1, 3, 4)
        return image.transpose(order).reshape(rows * columns, -1)

    def aligned(self, patches, grid):
        """[cells, D], before they are laid out."""
        x = self.linear("vision.patch_embed.proj", self.bf16(np.asarray(patches, np.float64)))
        for block in range(self.vision["num_hidden_layers"]):
            name = f"vision.blocks.{block}."
            u = self.norm(name + "norm1.weight", x)
            x = self.bf16(x + self.attention(name + "attn.", u, grid), "sum")
            u = self.norm(name + "norm2.weight", x)
            x = self.bf16(x + self.mlp(name + "mlp.", u), "sum")
        if "no-final-norm" not in self.ablate:
            x = self.norm("vision.norm.weight", x)
        hidden = self.linear("aligner.w1", self.cells(x, grid))
        hidden = (tanh_gelu if "tanh-gelu" in self.ablate else gelu)(hidden)
        hidden = self.bf16(hidden, "gelu")
        return self.linear("aligner.w2", hidden)

    def encode(self, patches, grid):
        """[slots, D]: START, (the cells of a row, NEWLINE) for each row, END."""
        rows, columns = cells_of(self.vision, grid)
        names = ("image_start", "image_newline", "image_end")
        start, newline, end = (self.bf16(self.weight(name))[None] for name in names)
        if "swap-start-end" in self.ablate:
            start, end = end, start
        cells = self.aligned(patches, grid)
        lines = []
        for row in range(rows):
            line = [cells[row * columns : (row + 1) * columns], newline]
            lines += line[::-1] if "newline-first" in self.ablate else line
        return np.concatenate([start, *lines, end])


def encode(checkpoint, patches, grid, precision="f32", ablate=()):
    """The rows [slots, D] of one image: patches [N, 3 P P] row by row of grid (rows, columns)."""
    return Tower(checkpoint, precision, ablate).encode(patches, grid)
