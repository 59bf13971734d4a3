#!/usr/bin/env python3
"""What the bounded replays cost and change on a trained model: `replay` and `halo` against `exact`.

    tools/replay_modes.py --text heldout.jsonl [-m models/krill] [--prompts 60]

One server per mode runs on the same prompts in turn, cut from texts of the file (JSON lines with "text"): cold,
and after a shorter prompt whose rows are found but whose window states are not kept. Compared are the
distributions of the first output token over the 20 best of `exact` and the rest. Prints a Markdown table; times
are medians of the ratios to `exact` on the same prompt, the servers taking turns.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODES = ("exact", "halo", "replay")
BEST = 20


class Server:
    def __init__(self, binary, model, mode):
        # No window states are kept, so every hit replays.
        self.process = subprocess.Popen(
            [binary, "serve", "-m", model, "--port", "0", "--threads", "1", "--mode", mode, "--window-pool", "0"],
            stdout=subprocess.PIPE, text=True,
        )
        self.url = self.process.stdout.readline().strip()
        while not self.ready():
            time.sleep(0.05)

    def ready(self):
        try:
            with urllib.request.urlopen(self.url + "/ready"):
                return True
        except urllib.error.HTTPError:
            return False

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def first_token(self, ids):
        """Log-probabilities of the best first tokens, seconds, and how much of the prompt was found."""
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": BEST, "ignore_eos": True}
        begin = time.perf_counter()
        answer = self.post("/v1/completions", body)
        seconds = time.perf_counter() - begin
        best = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return best, seconds, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def divergence(exact, other):
    """KL(exact || other) in nats over the tokens that both list, all others being one event."""
    tokens = exact.keys() & other.keys()
    pairs = [(math.exp(exact[t]), math.exp(other[t])) for t in tokens]
    pairs.append(tuple(max(1e-9, 1 - sum(side)) for side in zip(*pairs)))
    return sum(p * math.log(p / q) for p, q in pairs)


def compare(results, truth):
    """One row per mode of what its first tokens and times are, against `exact`."""
    rows = {}
    for mode in MODES:
        pairs = [(r["exact"], r[mode]) for r in results]
        kl = [divergence(a[0], b[0]) for a, b in pairs]
        known = [(b[0][t] - a[0][t]) for (a, b), t in zip(pairs, truth) if t in a[0] and t in b[0]]
        rows[mode] = {
            "time": statistics.median(b[1] / a[1] for a, b in pairs),
            "seconds": statistics.median(b[1] for _, b in pairs),
            "agree": sum(max(a[0], key=a[0].get) == max(b[0], key=b[0].get) for a, b in pairs),
            "kl": statistics.mean(kl),
            "worst": max(kl),
            "truth": statistics.mean(known),
            "known": len(known),
            "cached": statistics.median(b[2] for _, b in pairs),
        }
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=pathlib.Path)
    parser.add_argument("-m", "--model", default=str(ROOT / "models" / "krill"))
    parser.add_argument("--binary", default=str(ROOT / "build" / "cachalot"))
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--cold", type=int, nargs="+", default=[256, 512, 960], help="prompt lengths")
    parser.add_argument("--hit", type=int, nargs=2, default=[900, 960], help="the shorter prompt, the longer one")
    args = parser.parse_args()

    servers = {mode: Server(args.binary, args.model, mode) for mode in MODES}
    try:
        need = max(*args.cold, *args.hit) + 1
        samples = []
        with args.text.open() as lines:
            for line in lines:
                text = json.loads(line).get("text", "")[: 12 * need]
                ids = servers["exact"].post("/tokenize", {"text": text})["token_ids"]
                if len(ids) >= need:
                    samples.append(ids[:need])
                if len(samples) == args.prompts:
                    break
        spell = lambda token: servers["exact"].post("/detokenize", {"token_ids": [token]})["text"]
        order = list(MODES)

        def measure(ids, before=None):
            result = {}
            for mode in order:
                if before is not None:
                    servers[mode].first_token(before)
                result[mode] = servers[mode].first_token(ids)
            order.append(order.pop(0))
            return result

        print(f"{len(samples)} prompts of {args.text.name}\n")
        print("| prompt | mode | first token after, ms | time / `exact` | best token as in `exact` | KL from `exact`, nats: "
              "mean, worst | log-probability of the true token, less that of `exact` |")
        print("|---|---|---|---|---|---|---|")
        cases = [(f"{n} tokens, cold", n, None) for n in args.cold]
        cases.append((f"{args.hit[1]} tokens, {{:.0f}} found", args.hit[1], args.hit[0]))
        for index, (name, length, before) in enumerate(cases):
            # A leading token of its own keeps the cases from finding one another's prompts.
            mark = [index + 10]
            results = [measure(mark + ids[:length], mark + ids[:before] if before else None) for ids in samples]
            truth = [spell(ids[length]) for ids in samples]
            for mode, r in compare(results, truth).items():
                print(f"| {name.format(r['cached'])} | `{mode}` | {1e3 * r['seconds']:.0f} | {r['time']:.2f} | "
                      f"{r['agree']} of {len(samples)} | {r['kl']:.2e}, {r['worst']:.2e} | "
                      f"{r['truth']:+.4f} ({r['known']} prompts) |", flush=True)
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    main()
