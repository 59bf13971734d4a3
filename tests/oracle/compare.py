"""Compares a dump with the oracle.

The strict comparison feeds the other implementation's dump to the oracle, so that each sublayer is
judged on identical inputs:

    reference = forward(checkpoint, tokens, precision, feed=dump, margins=True)
    bad = [f for f in compare(reference, dump, checkpoint.config, precision) if not f.ok]

Rules, per last-axis vector ("row") of a tensor:

  continuous  f32: max|a - b| / rms(b) <= 1e-5. official: every |a_i - b_i| is at most one BF16 ulp
              at the larger of |b_i| and rms(b).
  codes       equal, or one code step apart where the oracle's value lies within NEAR of a
              rounding boundary (unit: see formats.relative_to). Block scales likewise. The sign
              of a zero is free.
  sets        equal, or different only in ids whose score is within NEAR of the k-th best
              (relative to the row's largest score). Where the index query is itself near a
              rounding boundary, a flipped code moves the scores: there the bound is QUERY_FLIP.

In `official` a BF16 value inside a sublayer may round the other way, and the FP8 code behind it
then moves by a whole step; in a narrow model that is several ulps of the output. So there a share
FLIPPED of the rows (codes: CODES_FLIPPED) may break the rule, continuous ones by up to FLIP_ULPS.
The rows that such a flip does not reach show whether the rounding points are right; `f32`, where
no row is excused, shows everything else.
"""

from dataclasses import dataclass

import numpy as np

from . import formats

NEAR = {"f32": 1e-5, "official": 2.0**-7}
QUERY_FLIP = 0.05
# On `t1` FP32 noise alone breaks the rule in up to 0.22 of the rows, a missing or misplaced
# rounding point in 0.39 or more.
FLIPPED, CODES_FLIPPED, FLIP_ULPS = 0.33, 0.01, 64
QUANTIZERS = {
    "window_codes": (formats.FP8, "head_dim"),
    "context_codes": (formats.FP8, "head_dim"),
    "main_codes": (formats.FP4_MAIN, "head_dim"),
    "index_codes": (formats.FP4_INDEX, "index_head_dim"),
}
SETS = {
    "selected": "index_topk",
    "candidates": "candidate_topk_blocks",
    "experts": "num_experts_per_tok",
}
DRAFT_SETS = SETS | {"experts": "dspark_num_experts_per_tok"}


@dataclass
class Finding:
    name: str
    worst: float = 0.0  # largest error of a continuous tensor, in units of what is allowed
    differing: int = 0  # codes or rows that are not equal
    faults: int = 0  # codes or rows that break the rule
    excused: int = 0  # faults that the precision allows
    note: str = ""

    @property
    def ok(self):
        return self.faults <= self.excused


def relative_error(a, b):
    """max|a - b| / rms(b) per row."""
    difference = np.abs(a - b).max(axis=-1)
    rms = np.sqrt(np.mean(np.square(b, dtype=np.float64), axis=-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(difference == 0, 0, difference / rms)


def ulp_error(a, b):
    """max|a_i - b_i| per row, in BF16 ulps at the larger of |b_i| and rms(b)."""
    b = np.asarray(b, np.float64)
    rms = np.sqrt(np.mean(b * b, axis=-1, keepdims=True))
    return (np.abs(a - b) / formats.bf16_ulp(np.maximum(np.abs(b), rms))).max(axis=-1)


def compare_continuous(name, a, b, precision):
    if precision == "f32":
        error, excused = relative_error(a, b) / NEAR["f32"], 0
    else:
        error = ulp_error(a, b)
        excused = max(1, int(FLIPPED * error.size)) if np.max(error, initial=0) <= FLIP_ULPS else 0
    # Written so that a NaN is a fault.
    faults = int(np.sum(~(error <= 1)))
    worst = float(np.max(error, initial=0))
    return Finding(name, worst, int(np.sum(error != 0)), faults, excused)


def compare_codes(name, a, b, distances, quantizer, width, near, share=0.0):
    """share: with rounded inputs, the largest part of the codes that may differ for any reason."""
    codes, scales = zip(quantizer.row_parts(a, width), quantizer.row_parts(b, width))
    element_near, scale_near = (d <= near for d in distances)

    def place(codes):
        magnitude = (codes & (quantizer.element.sign_bit - 1)).astype(int)
        return np.where(codes & quantizer.element.sign_bit, -magnitude, magnitude)

    steps = np.abs(place(codes[0]) - place(codes[1]))
    scale_steps = np.abs(scales[0].astype(int) - scales[1])
    scale_fault = (scale_steps > 1) | ((scale_steps == 1) & ~scale_near)
    fault = (steps > 1) | ((steps == 1) & ~element_near)

    # Under different scales the values are compared, by the spacing of the coarser grid.
    scale = [quantizer.spread(quantizer.scale_values(s), width) for s in scales]
    values = [quantizer.element.decode(c) * s for c, s in zip(codes, scale)]
    coarse = np.maximum(*scale)
    largest = np.maximum(np.abs(values[0]), np.abs(values[1])) / coarse
    spacing = coarse * np.ldexp(1.0, quantizer.element.step(largest))
    moved = quantizer.spread(scale_steps > 0, width)
    fault = np.where(moved, ~(np.abs(values[0] - values[1]) <= spacing), fault)
    different = np.where(moved, values[0] != values[1], steps > 0)
    differing = int(different.sum() + np.sum(scale_steps > 0))
    finding = Finding(name, 0.0, differing, int(fault.sum() + scale_fault.sum()))
    if share:
        # One flipped block scale moves a whole block.
        finding.excused = max(quantizer.block + 1, int(share * different.size))
        if differing > finding.excused:
            finding.faults, finding.note = differing, "too many codes differ"
    return finding


def compare_sets(name, a, b, k, scores=None, near=0.0):
    """scores [rows, ids] are the oracle's; near may differ per row."""
    near = np.broadcast_to(near, len(b))
    finding = Finding(name)
    for row in range(len(b)):
        ids, count = a[row], np.sum(a[row] >= 0)
        if np.any(ids[count:] != -1) or np.any(np.diff(ids[:count]) <= 0):
            finding.faults += 1
            finding.note = f"row {row} is not ascending with -1 at its end"
            continue
        wanted = b[row][b[row] >= 0]
        odd = np.setxor1d(ids[:count], wanted)
        if not len(odd):
            continue
        finding.differing += 1
        if scores is not None and count == len(wanted) == k and odd.max() < scores.shape[1]:
            ranked = scores[row]
            size = np.abs(ranked[np.isfinite(ranked)]).max()
            if np.all(np.abs(ranked[odd] - ranked[wanted].min()) <= near[row] * size):
                continue
        finding.faults += 1
        finding.note = finding.note or f"row {row}: {ids[:count].tolist()}, not {wanted.tolist()}"
    return finding


def compare(reference, dump, config, precision):
    """One finding per tensor of the reference (a model.Result made with margins)."""
    findings = []
    near = NEAR[precision]
    for name, b in reference.dump.items():
        kind = name.rpartition(".")[2]
        a = dump.get(name)
        if a is None:
            findings.append(Finding(name, faults=1, note="missing"))
        elif a.shape != b.shape and not (kind in SETS and len(a) == len(b)):
            findings.append(Finding(name, faults=1, note=f"shape {a.shape}, not {b.shape}"))
        elif kind in QUANTIZERS:
            quantizer, width = QUANTIZERS[kind]
            distances = reference.distances[name]
            width = getattr(config, width)
            share = 0.0 if precision == "f32" else CODES_FLIPPED
            findings.append(compare_codes(name, a, b, distances, quantizer, width, near, share))
        elif name == "mtp.tokens":
            # One token per row of logits; a fed token may differ only in a near tie.
            findings.append(
                compare_sets(name, a.reshape(-1, 1), b.reshape(-1, 1), 1, reference.scores[name], near)
            )
        elif kind in SETS:
            k = getattr(config, (DRAFT_SETS if name.startswith("mtp.") else SETS)[kind])
            query = reference.distances.get(name.rpartition(".")[0] + ".index_q")
            bound = near
            if query is not None and kind != "experts":
                bound = np.where(query <= near, QUERY_FLIP, near)
            finding = compare_sets(name, a, b, k, reference.scores.get(name), bound)
            if precision == "official" and finding.differing > max(1, FLIPPED * len(b)):
                finding.faults, finding.note = finding.differing, "too many rows differ"
            findings.append(finding)
        else:
            findings.append(compare_continuous(name, a, b, precision))
    return findings


def prescreen(result, decision=1e-4, quant=1e-6, logits=1e-3):
    """True if no choice and no rounding of this prompt is near a boundary, so that another
    implementation that runs freely must agree."""
    bounds = {"quant": quant, "logits": logits}
    return all(
        np.all(margin > bounds.get(name.rpartition(".")[2], decision))
        for name, margin in result.margins.items()
    )
