#!/usr/bin/env python3
"""Solves tasks of tasks.py with a checkpoint and prints the share of exact answers per kind.

    check_tasks.py --binary build/cachalot --model build/krill-checkpoint --tasks tasks-heldout.jsonl

An answer counts if its tokens are exactly those of the last message, reasoning and markup included.
Greedy decoding.
"""
import argparse
import collections
import json
import pathlib
import subprocess
import tempfile


def tokenize(binary, model, body):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(body, file)
        file.flush()
        out = subprocess.run([binary, "tokenize", "-m", model, "--chat", file.name, "--json"],
                             check=True, capture_output=True, text=True).stdout
    return json.loads(out)["token_ids"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--binary", default="build/cachalot")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--count", type=int, default=180)
    parser.add_argument("--threads", default="1")
    args = parser.parse_args()

    kinds, prompts, answers = [], [], []
    with open(args.tasks) as lines:
        for line in list(lines)[:args.count]:
            task = json.loads(line)
            kinds.append(task.pop("kind"))
            whole = tokenize(args.binary, args.model, task)
            prompts.append(tokenize(args.binary, args.model, dict(task, messages=task["messages"][:-1])))
            # Everything behind the prompt but the EOS that ends the message.
            answers.append(whole[len(prompts[-1]):-1])
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder) / "in.jsonl", pathlib.Path(folder) / "out.jsonl"
        source.write_text("".join(json.dumps({"tokens": p}) + "\n" for p in prompts))
        subprocess.run([args.binary, "run", "-m", args.model, "--input", source, "--output", target,
                        "-n", str(max(map(len, answers)) + 1), "--temperature", "0",
                        "--threads", args.threads], check=True)
        results = [json.loads(line) for line in target.read_text().splitlines()]
    right, total = collections.Counter(), collections.Counter(kinds)
    for kind, answer, result in zip(kinds, answers, results):
        right[kind] += result["token_ids"] == answer
    for kind in sorted(total):
        print(f"{kind:12} {right[kind]:4} of {total[kind]:4}  {right[kind] / total[kind]:.2f}")
    print(f"{'all':12} {right.total():4} of {total.total():4}  {right.total() / total.total():.2f}")


if __name__ == "__main__":
    main()
