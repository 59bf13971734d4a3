"""Engram addressing: token classes, table primes, multipliers and row ids."""

import json
import re
import unicodedata
from pathlib import Path

import numpy as np

# Characters with the Unicode property White_Space. Python's str.strip would also take U+001C-1F.
WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
    "\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)


def byte_alphabet():
    """Character of the byte-level vocabulary -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    moved = (byte for byte in range(256) if byte not in plain)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(moved)})
    return table


def token_key(raw, alphabet):
    """Two tokens are of one class if their keys are equal."""
    try:
        data = bytes(alphabet[c] for c in raw)
    except KeyError:  # an added token whose content is plain text
        data = raw.encode()
    text = data.decode(errors="replace")
    if "\ufffd" in text:
        return raw
    key = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    key = "".join(c for c in key if unicodedata.category(c) not in ("Mn", "Mc", "Me"))
    key = "".join(c.lower() for c in key)
    key = re.sub("[ \t\r\n]+", " ", key)
    if key != " ":
        key = key.strip(WHITE_SPACE)
    return key or text


def token_map(vocabulary):
    """Class of every token; `vocabulary` lists the raw token strings by id."""
    alphabet, classes = byte_alphabet(), {}
    keys = (token_key(raw, alphabet) for raw in vocabulary)
    return np.array([classes.setdefault(key, len(classes)) for key in keys])


def read_vocabulary(path, size):
    tokenizer = json.loads(Path(path).read_text())
    strings = {token_id: raw for raw, token_id in tokenizer["model"]["vocab"].items()}
    strings.update({token["id"]: token["content"] for token in tokenizer["added_tokens"]})
    return [strings[token_id] for token_id in range(size)]


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def table_primes(layers, max_ngram, heads, vocab_size):
    """Layer -> primes [order, head]. No prime is used twice, across all layers."""
    used, tables = set(), {}
    for layer in layers:
        orders = []
        for _ in range(2, max_ngram + 1):
            cursor, primes = vocab_size - 1, []
            while len(primes) < heads:
                cursor += 1
                if cursor not in used and is_prime(cursor):
                    used.add(cursor)
                    primes.append(cursor)
            orders.append(primes)
        tables[layer] = np.array(orders, np.int64)
    return tables


def multipliers(layer, classes, count):
    bound = (2**63 - 1) // classes // 2
    draws = np.random.default_rng(10007 * layer).integers(0, bound, count, dtype=np.int64)
    return 2 * draws + 1


def hash_rows(classes, dead, pad, mult, primes):
    """Table rows [T, columns] of one layer.

    classes [T] class ids; dead [T] true at image positions; pad: class id read when blocked.
    """
    columns = primes.ravel()
    offsets = (np.cumsum(columns) - columns).reshape(primes.shape)
    blocked = np.zeros(len(classes), bool)
    mixed = np.zeros(len(classes), np.int64)
    rows = []
    for back, multiplier in enumerate(mult):
        # Position p reads p - back; blocked is sticky over increasing distance.
        shifted = np.roll(classes, back)
        blocked |= np.roll(dead, back) | (np.arange(len(classes)) < back)
        mixed = mixed ^ (np.where(blocked, pad, shifted) * multiplier)
        if back >= 1:
            rows.append(mixed[:, None] % primes[back - 1] + offsets[back - 1])
    return np.concatenate(rows, axis=1)


class Addressing:
    """Row ids of every Engram layer of a checkpoint."""

    def __init__(self, config, directory):
        self.config = config
        if config.engram_compressed_vocab_size == config.vocab_size:
            self.map = np.arange(config.vocab_size)
        else:
            path = Path(directory) / "tokenizer.json"
            self.map = token_map(read_vocabulary(path, config.vocab_size))
        classes = int(self.map.max()) + 1
        if classes != config.engram_compressed_vocab_size:
            raise ValueError(f"the token map has {classes} classes")
        self.primes = table_primes(
            config.engram_layer_ids,
            config.engram_max_ngram_size,
            config.engram_n_heads,
            config.engram_vocab_size,
        )
        totals = [int(self.primes[layer].sum()) for layer in config.engram_layer_ids]
        if totals != list(config.engram_num_embeddings):
            raise ValueError(f"engram_num_embeddings must be {totals}")

    def rows(self, layer, tokens, dead):
        config = self.config
        return hash_rows(
            self.map[tokens].astype(np.int64),
            dead,
            int(self.map[config.engram_pad_token_id]),
            multipliers(layer, config.engram_compressed_vocab_size, config.engram_max_ngram_size),
            self.primes[layer],
        )
