#!/usr/bin/env python3
"""Times training steps of `micro` here and in NeMo AutoModel (PyTorch) in alternating pairs.

    build-peers-venv/bin/python tools/oracle/train_speed.py --binary build/cachalot

Both train the same architecture at the same sizes in FP32 on one thread: 2048 random tokens in
samples of 256 per step, forward, backward and update (the full optimizer here; AdamW there, where
neither the indexer nor the drafter learns). Time is that of the processor, as other work may share
the machine; what precedes the first step is subtracted here and not counted there. Prints a JSON
line per pair and one with the medians.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

import peer_nemo

SEQUENCE, TOKENS = 256, 2048
VOCABULARY = 352
RUN = """
[model]
preset = "micro"
[data]
train = ["{folder}/tokens.jsonl"]
sequence = {sequence}
batch_tokens = {tokens}
micro_tokens = {micro}
[schedule]
steps = {steps}
peak = 1e-3
[objective]
indexer_queries = 32
[run]
out = "run"
threads = 1
"""


def processor_seconds(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Here:
    def __init__(self, binary, folder, micro):
        self.binary, self.folder, self.micro = binary, folder, micro
        r = random.Random(1)
        with open(folder / "tokens.jsonl", "w") as file:
            for _ in range(200):
                file.write(json.dumps({"tokens": [r.randrange(VOCABULARY) for _ in range(SEQUENCE)]}) + "\n")

    def run(self, steps):
        path = self.folder / f"run-{steps}.toml"
        path.write_text(RUN.format(folder=self.folder, sequence=SEQUENCE, tokens=TOKENS, micro=self.micro, steps=steps))
        with tempfile.TemporaryDirectory() as out:
            return processor_seconds([self.binary, "train", path, "--set", f'run.out="{out}/run"'])

    def tokens_per_second(self, steps):
        return TOKENS * steps / (self.run(1 + steps) - self.run(1))


class Peer:
    def __init__(self, binary, folder):
        directory = folder / "micro"
        subprocess.run([binary, "synth", "--preset", "micro", "--seed", "1", "--out", directory],
                       check=True, stderr=subprocess.DEVNULL)
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.model = peer_nemo.build(directory, "float32").train().requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step()

    def step(self):
        ids = torch.randint(0, VOCABULARY, (TOKENS // SEQUENCE, SEQUENCE))
        logits = self.model(input_ids=ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tokens_per_second(self, steps):
        begin = time.process_time()
        for _ in range(steps):
            self.step()
        return TOKENS * steps / (time.process_time() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--binary", default="build/cachalot")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-tokens", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here, peer = Here(args.binary, folder, args.micro_tokens), Peer(args.binary, folder)
        pairs = []
        for _ in range(args.pairs):
            pairs.append((here.tokens_per_second(args.steps), peer.tokens_per_second(args.steps)))
            print(json.dumps({"cachalot": pairs[-1][0], "nemo": pairs[-1][1], "ratio": pairs[-1][0] / pairs[-1][1]}),
                  flush=True)
    print(json.dumps({"tokens_per_second": {"cachalot": statistics.median(p[0] for p in pairs),
                                            "nemo": statistics.median(p[1] for p in pairs)},
                      "ratio": statistics.median(p[0] / p[1] for p in pairs), **peer_nemo.versions()}))


if __name__ == "__main__":
    main()
