#!/usr/bin/env python3
"""Compares `cachalot tokenize` with the Python library `tokenizers` on a mixed corpus.

    tests/text/tokenizers_check.py build/cachalot MODEL_DIR [--strings N] [--seed S] [FILE ...]

The strings (many scripts, code, numbers, white space, emoji, control spellings, random bytes decoded)
are joined into a few files, because the binary loads its vocabulary at each call. Given FILEs are
compared as they are. Added tokens are taken out of the Python tokenizer: text is never parsed for
them. Characters that this Python's Unicode data does not know are left out, since the two regular
expression engines may know different versions of Unicode.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata

import tokenizers

RANGES = [  # (first, end) code points of the random characters
    (0x20, 0x7F), (0x20, 0x7F), (0x00, 0x20), (0xA0, 0x250), (0x370, 0x400), (0x400, 0x530),
    (0x5D0, 0x5EB), (0x600, 0x700), (0x900, 0x980), (0xE00, 0xE80), (0x1100, 0x1200),
    (0x180B, 0x180F), (0x2000, 0x2070), (0x2070, 0x20A0), (0x2100, 0x2400), (0x2460, 0x2500),
    (0x3000, 0x3100), (0x4E00, 0x9FA6), (0x9FA0, 0xA000), (0xAC00, 0xD7A4), (0xF900, 0xFB00),
    (0xFE00, 0x10000), (0x1F300, 0x1F6D8), (0x1D400, 0x1D800), (0x20000, 0x20100),
]
WORDS = [
    "don't", "I'll", "foo_bar", "12345", "3.14", "1,000,000", "a.b", "!!!", "...", "$x^2$", "0x1F",
    "\u4f60\u597d", "\u4e16\u754c", "\u65e5\u672c\u8a9e", "\u30c6\u30ad\u30b9\u30c8",
    "\ud55c\uad6d\uc5b4", "\u043f\u0440\u0438\u0432\u0435\u0442", "\u0645\u0631\u062d\u0628\u0627",
    "\u05e9\u05dc\u05d5\u05dd", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e44\u0e17\u0e22",
    "Stra\u00dfe", "\u0130stanbul", "na\u00efve", "e\u0301", "\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea", "\u2014\u2014", "\u300c\u300d", "\u00b2", "\u00bd", "\u216b",
    "\uff11\uff12\uff13", "\ufeff", "\u200b", "\ufb01", "\U0001d54f", "\u0663", "<think>",
    "<\uff5cUser\uff5c>", "\uff5cDSML\uff5c", "<|EOT|>",
]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\n\n", "    ", "\r", " \n", "\u00a0", "\u2003", "\u3000",
          "\x0b", "\x85", "\u2028"]
CODE = [
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    "def f(x, *args, **kw):\n    return {k: v for k, v in kw.items() if v is not None}\n",
    "SELECT * FROM t WHERE id='7' AND x<>3;\n",
    "<div class=\"a b\">&nbsp;</div>\r\n",
    "\\frac{1}{2}\\sum_{i=1}^{n} x_i\n",
]


def known(text):
    return "".join(c for c in text if unicodedata.category(c) not in ("Cn", "Cs", "Co"))


def random_string(rng):
    def character():
        return chr(rng.randrange(*rng.choice(RANGES)))

    kind = rng.randrange(5)
    if kind == 0:  # one script
        span = rng.choice(RANGES)
        return known("".join(chr(rng.randrange(*span)) for _ in range(rng.randint(0, 40))))
    if kind == 1:  # all mixed
        return known("".join(character() for _ in range(rng.randint(0, 60))))
    if kind == 2:  # random bytes
        return known(rng.randbytes(rng.randint(0, 50)).decode("utf-8", "replace"))
    if kind == 3:
        return "".join(rng.choice(CODE) for _ in range(rng.randint(1, 4)))
    parts = [rng.choice(rng.choice((WORDS, WORDS, SPACES))) for _ in range(rng.randint(1, 30))]
    return "".join(parts)


class Check:
    def __init__(self, binary, model):
        self.binary = binary
        self.model = model
        definition = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        definition["added_tokens"] = []
        self.reference = tokenizers.Tokenizer.from_str(json.dumps(definition))

    def ours(self, data):
        with tempfile.NamedTemporaryFile(suffix=".txt") as file:
            file.write(data)
            file.flush()
            run = subprocess.run(
                [self.binary, "tokenize", "-m", self.model, "--text-file", file.name, "--json"],
                check=True, capture_output=True)
        return json.loads(run.stdout)["token_ids"]

    def agrees(self, text):
        expected = self.reference.encode(text, add_special_tokens=False).ids
        return self.ours(text.encode("utf-8")) == expected, len(expected)

    def smallest_difference(self, strings):
        """Halves a differing list of strings as long as a half differs too."""
        while len(strings) > 1:
            middle = len(strings) // 2
            for half in (strings[:middle], strings[middle:]):
                if not self.agrees("".join(half))[0]:
                    strings = half
                    break
            else:
                break
        return "".join(strings)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--strings", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=500, help="strings per file")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_intermixed_args()

    check = Check(options.binary, options.model)
    rng = random.Random(options.seed)
    batches = []
    for start in range(0, options.strings, options.batch):
        count = min(options.batch, options.strings - start)
        batches.append([random_string(rng) for _ in range(count)])
    batches += [[path.read_text(encoding="utf-8", errors="replace")] for path in options.files]

    passed = failed = tokens = 0
    for batch in batches:
        same, count = check.agrees("".join(batch))
        tokens += count
        if same:
            passed += 1
            continue
        failed += 1
        text = check.smallest_difference(batch)
        print(f"differs: {text!r}")
        print(f"  tokenizers {tokenizers.__version__}:",
              check.reference.encode(text, add_special_tokens=False).ids[:50])
        print("  cachalot:", check.ours(text.encode("utf-8"))[:50])
    print(f"{options.strings} strings and {len(options.files)} files, {tokens} tokens")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
