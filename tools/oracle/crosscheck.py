#!/usr/bin/env python3
"""Compares a checkpoint's forward pass with an implementation that nobody of this project wrote.

    python3 tools/oracle/crosscheck.py -m DIR --implementation mlx-vlm
    python3 tools/oracle/crosscheck.py -m DIR --implementation nemo --input F.jsonl --dump DUMPS

DUMPS are the files of `cachalot score --dump` or of `tests.oracle.run --dump`, made from F.jsonl
with the same --precision. Without --dump the NumPy oracle runs random prompts. Three comparisons:

  sublayers  every sublayer gets the dump's input, cache rows, selection and routing. Continuous
             tensors are judged per vector, max|a - b| / rms(b); cache rows must be the same codes
             and selections the same sets, except at near ties (tests/oracle/compare.py).
  network    the other model runs as a whole; only cache rows, selections and routing are the
             dump's. Judged: log-probabilities.
  free       nothing is shared. Judged: log-probabilities of the prompts in which, by the oracle,
             no decision is near its boundary; random runs search short prompts of that kind.

Tolerances, f32. Sublayers 1e-5: both sides err by FP32 rounding, 6e-8 times the square root of a
few hundred terms, and by angles of up to 60 rad in FP32; observed are 3e-6. Log-probabilities 1e-4:
ten such layers, and logits of a few units.

Tolerances, official. A BF16 value may round the other way, and an FP8 code behind it then moves by
a whole step, several units in the last place of a narrow vector. So at most 5 % of the vectors of a
tensor may be off by more than one BF16 unit at max(|b|, rms(b)), and none by more than 64 (observed
0.01 %; a missing or misplaced rounding point moves 39 % or more), and at most 1 % of the cache
values may differ. Log-probabilities are printed, not judged: one flip grows from layer to layer.
"""

import argparse
import importlib
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np


from tap import Tap, kind
from tests.oracle import compare
from tests.oracle.checkpoint import Checkpoint, read_dump
from tests.oracle.model import forward

PEERS = {"mlx-vlm": "peer_mlx_vlm", "nemo": "peer_nemo"}
PRECISIONS = ("f32", "official")
FLIPPED = 0.05  # share of vectors
LOGPROB = 1e-4
CALM_LENGTHS, CALM_TRIES = (2, 12), 80
COLUMNS = ("engram", "attn_in", "attn_out", "attn", "ffn_in", "ffn_out", "ffn")
DECISIONS = ("window_codes", "main_codes", "index_codes", "candidates", "selected", "experts")


def load(implementation):
    return importlib.import_module(PEERS[implementation])


def random_prompts(count, longest, vocabulary, seed):
    random = np.random.default_rng(seed)
    lengths = [1, longest] + random.integers(2, longest + 1, count).tolist()
    return [random.integers(0, vocabulary, length).tolist() for length in lengths[:count]]


def is_calm(checkpoint, tokens, precision):
    return compare.prescreen(forward(checkpoint, tokens, precision, margins=True), logits=0)


def calm_prompts(checkpoint, count, precision, seed):
    """Up to `count` short prompts without a near decision."""
    random, found = np.random.default_rng((seed, 1)), []
    for _ in range(CALM_TRIES):
        length = random.integers(*CALM_LENGTHS, endpoint=True)
        tokens = random.integers(0, checkpoint.config.vocab_size, length).tolist()
        if len(found) < count and is_calm(checkpoint, tokens, precision):
            found.append(tokens)
    return found


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def compare_codes(config, name, values, codes, distances, precision):
    """A finding for dequantized cache rows: equal to the dump's, or one step of the format apart
    where the oracle's unquantized value is near that rounding boundary."""
    quantizer, width = compare.QUANTIZERS[kind(name)]
    width = getattr(config, width)
    near = compare.NEAR[precision]
    element_near, block_near = (d <= near for d in distances)
    block_near = quantizer.spread(block_near, width)
    expected = quantizer.row_values(codes, width)
    scale = quantizer.spread(quantizer.scale_values(quantizer.row_parts(codes, width)[1]), width)
    scale = np.where(block_near, 2 * scale, scale)
    with np.errstate(divide="ignore", invalid="ignore"):  # a wrong dump may have scales of zero
        largest = np.maximum(np.abs(values), np.abs(expected)) / scale
    step = scale * np.ldexp(1.0, quantizer.element.step(largest))
    differ = values != expected
    fault = differ & ~((np.abs(values - expected) <= step) & (element_near | block_near))
    finding = compare.Finding(name, differing=int(differ.sum()), faults=int(fault.sum()))
    if precision == "official":
        finding.excused = max(quantizer.block + 1, int(compare.CODES_FLIPPED * differ.size))
        finding.faults = finding.differing
    return finding


def compare_set(config, name, ids, expected, reference, precision):
    k = getattr(config, compare.SETS[kind(name)])
    near = compare.NEAR[precision]
    query = reference.distances.get(name.rpartition(".")[0] + ".index_q")
    if query is not None and kind(name) != "experts":
        near = np.where(query <= near, compare.QUERY_FLIP, near)
    finding = compare.compare_sets(name, ids, expected, k, reference.scores.get(name), near)
    if precision == "official":
        finding.excused = max(1, int(compare.FLIPPED * len(expected)))
        finding.faults = finding.differing
    return finding


class Report:
    """The worst of every tensor over all prompts."""

    def __init__(self, config, precision):
        self.config, self.precision = config, precision
        self.errors = defaultdict(list)  # per vector
        self.different = defaultdict(lambda: [0, 0])  # differing, all
        self.faults = []

    def add(self, seen, dump, reference):
        for name, expected in dump.items():
            value = seen.get(name)
            if value is None and not expected.size:
                continue  # an empty tensor that the other model does not make
            if value is None:
                self.faults.append(f"{name}: missing")
            elif kind(name) in compare.QUANTIZERS:
                finding = compare_codes(
                    self.config, name, value, expected, reference.distances[name], self.precision
                )
                self.count(finding, value.size)
            elif kind(name) in compare.SETS:
                finding = compare_set(
                    self.config, name, value, expected, reference, self.precision
                )
                self.count(finding, len(expected))
            else:
                error = self.error(value, np.asarray(expected, np.float64))
                self.errors[name].append(np.ravel(error))

    def error(self, a, b):
        """Per vector: of its RMS, or in BF16 units in the last place."""
        official = self.precision == "official"
        return compare.ulp_error(a, b) if official else compare.relative_error(a, b)

    def count(self, finding, size):
        self.different[finding.name][0] += finding.differing
        self.different[finding.name][1] += size
        if not finding.ok:
            self.faults.append(f"{finding.name}: {finding.faults} wrong {finding.note}")

    def judge(self):
        for name, parts in self.errors.items():
            error = np.concatenate(parts)
            if self.precision == "f32":
                good = np.max(error) <= compare.NEAR["f32"]
            else:
                good = np.max(error) <= compare.FLIP_ULPS and np.mean(error > 1) <= FLIPPED
            if not good:
                self.faults.append(f"{name}: largest error {np.max(error):.1e}")
        return self.faults

    def print(self):
        unit = "of rms(b)" if self.precision == "f32" else "in BF16 units at max(|b|, rms(b))"
        print(f"largest error max|a - b| of a vector, {unit}:")
        print("layer mode    " + "".join(f"{name:>10}" for name in COLUMNS))
        for layer in self.config.layers:
            cells = []
            for name in COLUMNS:
                parts = self.errors.get(f"layers.{layer}.{name}")
                cells.append(f"{np.max(np.concatenate(parts)):10.1e}" if parts else " " * 10)
            print(f"{layer:5} {self.config.mode(layer):8}" + "".join(cells))
        for name in ("embed", "logits"):
            print(f"{name:14}{np.max(np.concatenate(self.errors[name])):10.1e}")
        if self.precision == "official":
            every = np.concatenate([part for parts in self.errors.values() for part in parts])
            print(f"off by more than one unit: {np.sum(every > 1)} of {len(every)} vectors")
        print("\ndecisions that differ, of all (cache values, or rows of a set):")
        print("layer mode    " + "".join(f"{name:>16}" for name in DECISIONS))
        for layer in self.config.layers:
            cells = []
            for name in DECISIONS:
                counts = self.different.get(f"layers.{layer}.{name}")
                cells.append(f"{f'{counts[0]}/{counts[1]}':>16}" if counts else " " * 16)
            print(f"{layer:5} {self.config.mode(layer):8}" + "".join(cells))


def differences(a, b):
    """Largest difference of log-probabilities per prompt."""
    return [float(np.max(np.abs(x - y))) for x, y in zip(a, b)]


def chunked(peer, tokens, seed):
    """Log-probabilities of a run that gets the prompt in pieces through the model's cache."""
    random, chunks = np.random.default_rng(seed), []
    while sum(chunks) < len(tokens):
        left = len(tokens) - sum(chunks)
        chunks.append(int(min(left, random.choice([1, 1, 2, 3, 7]))))
    return log_softmax(peer.run(tokens, chunks=chunks)["logits"])


def check(args):
    checkpoint = Checkpoint(args.model)
    config, module = checkpoint.config, load(args.implementation)
    if args.precision not in module.PRECISIONS:
        raise SystemExit(f"{module.NAME} runs in {', '.join(module.PRECISIONS)} only")
    if args.input:
        lines = Path(args.input).read_text().splitlines()
        prompts = [json.loads(line)["tokens"] for line in lines if line.strip()]
    else:
        prompts = random_prompts(args.prompts, args.longest, config.vocab_size, args.seed)
        prompts += calm_prompts(checkpoint, args.calm, args.precision, args.seed)
    peer = module.Peer(args.model, args.precision)
    version = ", ".join(f"{name} {v}" for name, v in module.versions().items())
    print(f"{args.model}, {args.precision}, against {version}")
    print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens\n")

    report = Report(config, args.precision)
    network, free, calm, pieces = [], [], [], []
    for i, tokens in enumerate(prompts):
        own = forward(checkpoint, tokens, args.precision, margins=True)
        dump = read_dump(Path(args.dump) / f"{i}.safetensors") if args.dump else own.dump
        reference = forward(checkpoint, tokens, args.precision, feed=dump, margins=True)
        report.add(peer.run(tokens, Tap(config, dump)), dump, reference)
        expected = log_softmax(dump["logits"])
        decided = peer.run(tokens, Tap(config, dump, decisions_only=True))
        network += differences([log_softmax(decided["logits"])], [expected])
        mine = log_softmax(peer.run(tokens)["logits"])
        free += differences([mine], [expected])
        calm.append(compare.prescreen(own, logits=0))
        if module.CHUNKS:
            pieces += differences([chunked(peer, tokens, i)], [expected])

    report.print()
    faults = report.judge()
    calm = np.array(calm)
    judged = args.precision == "f32"
    print("\nlog-probabilities, largest difference per prompt (median, largest):")

    def line(title, values, bound):
        if not len(values):
            return print(f"  {title:54} no such prompt")
        print(f"  {title:54} {np.median(values):9.1e} {np.max(values):9.1e}  of {len(values)}")
        if bound and not np.max(values) <= LOGPROB:
            faults.append(f"log-probabilities, {title}: {np.max(values):.1e}")

    free, pieces = np.array(free), np.array(pieces)
    line("network: cache rows, selection, routing of the dump", network, judged)
    line("free, no decision near its boundary", free[calm], judged)
    line("free, the others", free[~calm], False)
    if module.CHUNKS:
        line("free in pieces through its cache, none near", pieces[calm], judged)
    print()
    for fault in faults:
        print("FAULT", fault)
    print(f"{'differs' if faults else 'agrees'}")
    return 1 if faults else 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", dest="model", metavar="DIR", help="checkpoint directory")
    parser.add_argument("--implementation", choices=PEERS, default="mlx-vlm")
    parser.add_argument("--precision", choices=PRECISIONS, default="f32")
    parser.add_argument("--input", metavar="F.jsonl", help='lines {"tokens":[...]}')
    parser.add_argument("--dump", metavar="DIR", help="dumps of these lines")
    parser.add_argument("--prompts", type=int, default=12, help="random prompts without --input")
    parser.add_argument("--calm", type=int, default=6, help="more, without a near decision")
    parser.add_argument("--longest", type=int, default=60, help="their greatest length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-golden", metavar="FILE", help="write this implementation's part")
    args = parser.parse_args()
    if args.dump and not args.input:
        parser.error("--dump needs --input")
    if args.write_golden:
        import golden

        return golden.write(args.write_golden, load(args.implementation))
    if not args.model:
        parser.error("-m is required")
    return check(args)


if __name__ == "__main__":
    sys.exit(main())
