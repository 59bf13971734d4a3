#!/usr/bin/env python3
"""Does lm-eval, through the server's completions endpoint, see the log-probabilities of `cachalot score`?

lm-eval's `local-completions` sends token ids with `echo` and `logprobs` and adds up what comes back. The same
ids go to `cachalot score`; the sums must be equal to the last bit of their double, and so must what
lm-eval calls greedy. Needs requirements-tools.txt.

Usage: tools/lm_eval_check.py [-m models/krill] [--binary build/cachalot] [--texts 40]
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

ROOT = pathlib.Path(__file__).resolve().parents[1]


def paragraphs(count):
    """Prose of the documents, one line each."""
    out = []
    for path in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in path.read_text().split("\n\n"):
            if block[:1].isalpha() and 100 < len(block) < 1000:
                out.append(" ".join(block.split()))
    return out[:count]


def wait_ready(url):
    while True:
        try:
            with urllib.request.urlopen(url + "/ready"):
                return
        except urllib.error.HTTPError:
            time.sleep(0.1)


def score(binary, model, sequences):
    """Per sequence: the log-probability of each token, and whether it was the best one."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as lines:
        lines.writelines(json.dumps({"tokens": ids}) + "\n" for ids in sequences)
        lines.flush()
        done = subprocess.run(
            [binary, "score", "-m", model, "--input", lines.name, "--output", "-", "--top", "1"],
            check=True, capture_output=True, text=True,
        )
    out = []
    for line in map(json.loads, done.stdout.splitlines()):
        best = [not top or top[0][0] == token for token, top in zip(line["tokens"], line["top"])]
        out.append((line["logprobs"], best))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=str(ROOT / "models" / "krill"))
    parser.add_argument("--binary", default=str(ROOT / "build" / "cachalot"))
    parser.add_argument("--texts", type=int, default=40)
    args = parser.parse_args()
    config = json.loads((pathlib.Path(args.model) / "config.json").read_text())
    bos = config["bos_token_id"]

    server = subprocess.Popen([args.binary, "serve", "-m", args.model, "--port", "0", "--model-name", "it"],
                              stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        wait_ready(url)
        lm = LocalCompletionsAPI(
            model="it", base_url=url + "/v1/completions", tokenizer_backend="huggingface", tokenizer=args.model,
            custom_prefix_token_id=bos, batch_size=4, max_length=1024,
        )
        texts = paragraphs(args.texts)
        pairs = []
        for text in texts:
            middle = text.index(" ", len(text) // 2)
            pairs.append((text[:middle], text[middle:]))
        requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        got = lm.loglikelihood(requests, disable_tqdm=True)
        rolling = lm.loglikelihood_rolling(
            [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)], disable_tqdm=True)
    finally:
        server.terminate()
        server.wait()

    encoded = [lm._encode_pair(*pair) for pair in pairs]
    wanted = []
    for (context, _), (logprobs, best) in zip(encoded, score(args.binary, args.model, [a + b for a, b in encoded])):
        wanted.append((sum(logprobs[len(context):]), all(best[len(context):])))
    wanted_rolling = [
        sum(logprobs[1:])
        for logprobs, _ in score(args.binary, args.model, [[bos, *lm.tok_encode(text)] for text in texts])
    ]
    differences = [abs(a[0] - b[0]) for a, b in zip(got, wanted)]
    rolling_differences = [abs(a - b) for a, b in zip(rolling, wanted_rolling)]
    greedy = sum(a[1] != b[1] for a, b in zip(got, wanted))
    print(json.dumps({
        "texts": len(texts), "tokens": sum(len(b) for _, b in encoded),
        "loglikelihood_max_difference": max(differences), "greedy_differs": greedy,
        "rolling_max_difference": max(rolling_differences),
        "bits_per_byte": -sum(rolling) / sum(len(t.encode()) for t in texts) / 0.6931471805599453,
    }))
    return int(max(differences + rolling_differences) > 0 or greedy > 0)


if __name__ == "__main__":
    sys.exit(main())
