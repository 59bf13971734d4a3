#!/usr/bin/env python3
"""Writes small verifiable tasks as chat requests, one per line, each with its answer.

    tasks.py --count 40000 --seed 1 --out tasks.jsonl

Kinds: addition and subtraction, copying, sorting, counting, key-value recall (some over more than the
attention window), JSON answers to a schema, tool calls, and sums with written-out reasoning whose length
follows the effort. Two more kinds are for practice alone: they have many answers per prompt. `tasks.py --kinds`
lists them. The answer is the last message; "kind" names the task, so that a checker can score by kind. Same
seed, same lines.
"""
import argparse
import json
import random

WORDS = ("ant bear cat dog eel fox goat hen ibis jay koi lynx mole newt owl pig quail rat seal toad urchin "
         "vole wasp yak zebra ash birch cedar elm fir oak pine red blue green black white north south east "
         "west sun moon star rain snow wind stone river hill lake").split()


def chat(user, answer, system=None, **fields):
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": user}, answer if isinstance(answer, dict)
                 else {"role": "assistant", "content": answer}]
    return {"messages": messages, "thinking": {"type": "disabled"}, **fields}


def size(r, least, most):
    """Small sizes are more frequent: easy instances teach what the hard ones need."""
    return min(r.randint(least, most), r.randint(least, most))


def arithmetic(r):
    a, b = r.randint(0, 20), r.randint(0, 20)
    if r.random() < 0.5:
        return chat(f"What is {a} + {b}?", str(a + b))
    return chat(f"What is {max(a, b)} - {min(a, b)}?", str(abs(a - b)))


def copying(r):
    text = " ".join(r.choices(WORDS, k=size(r, 2, 12)))
    return chat(f"Repeat: {text}", text)


def sorting(r):
    items = r.sample(WORDS, size(r, 2, 5))
    return chat(f"Sort: {', '.join(items)}", ", ".join(sorted(items)))


def counting(r):
    word = r.choice(WORDS)
    items = r.choices([word, *r.sample(WORDS, 2)], k=r.randint(2, 8))
    return chat(f"How many times does {word} occur? {' '.join(items)}", str(items.count(word)))


def tally(r):
    """How often each word occurs, in the order in which they begin to."""
    items = r.choices(r.sample(WORDS, r.randint(1, 4)), k=r.randint(2, 12))
    return chat(f"Tally: {' '.join(items)}", ", ".join(f"{w} {items.count(w)}" for w in dict.fromkeys(items)))


def recall(r, pairs, most=3):
    """Up to `most` values are asked for, in any order."""
    keys = r.sample(WORDS, pairs)
    values = [r.randint(10, 99) for _ in keys]
    lines = " ".join(f"{k} = {v}" for k, v in zip(keys, values))
    asked = r.sample(range(pairs), min(pairs, r.randint(1, most)))
    return chat(f"{lines} Give {' '.join(keys[i] for i in asked)}", " ".join(str(values[i]) for i in asked))


def json_answer(r):
    name, age = r.choice(WORDS), r.randint(1, 99)
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
              "required": ["name", "age"]}
    return chat(f"The {name} is {age} years old. Give it as JSON.",
                json.dumps({"name": name, "age": age}),
                response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}})


def tool_call(r):
    city = r.choice(WORDS)
    tool = {"type": "function", "function": {
        "name": "weather", "description": "Weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}
    call = {"id": "call_0", "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"place": city})}}
    return chat(f"How is the weather in {city}?",
                {"role": "assistant", "content": "", "tool_calls": [call]}, tools=[tool])


def reasoning(r):
    """A sum of several numbers: the more effort, the more steps are written down."""
    effort = r.choice([25, 50, 75, 100])
    numbers = [r.randint(1, 10) for _ in range(r.randint(2, 4))]
    total, steps = 0, []
    for n in numbers:
        steps.append(f"{total} + {n} = {total + n}.")
        total += n
    thought = "" if effort < 50 else " ".join(steps[1:] if effort < 75 else steps)
    if effort == 100:
        thought += f" The sum is {total}."
    return {"messages": [{"role": "user", "content": "Add " + ", ".join(map(str, numbers)) + "."},
                         {"role": "assistant", "content": str(total), "reasoning_content": thought}],
            "thinking": {"type": "enabled"}, "reasoning_effort": effort}


# Each with its weight. Prompts are long and answers short, so the kinds that are learned last get the most.
KINDS = {
    "arithmetic": (arithmetic, 12),
    "copying": (copying, 6),
    "sorting": (sorting, 10),
    "counting": (counting, 14),
    "recall": (lambda r: recall(r, size(r, 2, 8)), 10),
    "long_recall": (lambda r: recall(r, r.randint(12, 20)), 4),
    "json": (json_answer, 1),
    "tool": (tool_call, 0.5),
    "reasoning": (reasoning, 10),
}
PRACTICE = {
    "tally": (tally, 8),
    "recall_all": (lambda r: recall(r, size(r, 2, 20), most=20), 12),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out")
    parser.add_argument("--kinds", action="store_true", help="list the kinds of tasks")
    parser.add_argument("--even", action="store_true", help="to measure: as many of each kind, none for practice")
    parser.add_argument("--only", nargs="+", choices=[*KINDS, *PRACTICE])
    args = parser.parse_args()
    every = {**KINDS, **PRACTICE}
    if args.kinds:
        print("\n".join(every))
        return
    r = random.Random(args.seed)
    kinds = args.only or list(KINDS if args.even else every)
    weights = [1 if args.even else every[kind][1] for kind in kinds]
    with open(args.out, "w") as out:
        for _ in range(args.count):
            kind = r.choices(kinds, weights)[0]
            out.write(json.dumps({"kind": kind, **every[kind][0](r)}) + "\n")


if __name__ == "__main__":
    main()
