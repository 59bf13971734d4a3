#!/usr/bin/env python3
"""Assembles the Debian text corpora as JSONL, one file of a package per line.

    corpus.py --out build/corpus [--packages linux-doc-6.12 dict-gcide perl-doc manpages manpages-dev]

Packages are fetched with apt-get download and unpacked, never installed. Texts are de-duplicated by
content, cleaned of markup that a small model would only waste itself on, and split by whole files (the
one file of the dictionary in pieces of 8000 characters): about one in `--heldout` goes to heldout.jsonl,
chosen by the hash of its name, so the split does not depend on the order or on other files. versions.json
records what was used.
"""
import argparse
import gzip
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile

PACKAGES = ["linux-doc-6.12", "dict-gcide", "perl-doc", "manpages", "manpages-dev"]
TEXT_SUFFIXES = {".txt", ".rst", ".pod", ".dict"}
MAN = re.compile(r"\.[1-8](\.gz)?$")
# Entries of a dictionary are short: this many characters of them make one document.
DICTIONARY_DOCUMENT = 8000
LEAST = 200


def fetch(package, folder):
    subprocess.run(["apt-get", "-qq", "download", package], cwd=folder, check=True)
    archive = next(folder.glob(f"{package}_*.deb"))
    target = folder / package
    subprocess.run(["dpkg-deb", "-x", archive, target], check=True)
    return target, archive.name.split("_")[1]


def read(path):
    data = path.read_bytes()
    if path.suffix in {".gz", ".dz"}:
        data = gzip.decompress(data)
    return data.decode("utf-8", "replace")


def plain_man(text):
    """The words of a manual page without its macros."""
    lines = []
    for line in text.splitlines():
        if line.startswith((".\\\"", "'\\\"", ".TH", ".so")):
            continue
        if line.startswith((".SH", ".SS")):
            lines.append("\n" + line[3:].strip().strip('"'))
        elif line.startswith((".PP", ".P", ".LP", ".IP", ".TP")):
            lines.append("")
        elif line.startswith((".B ", ".I ", ".BR ", ".IR ", ".RB ", ".RI ", ".BI ", ".IB ")):
            joiner = " " if line[2] == " " else ""
            lines.append(joiner.join(part.strip('"') for part in line.split(" ")[1:]))
        elif not line.startswith((".", "'")):
            lines.append(line)
    text = "\n".join(lines)
    text = re.sub(r"\\f[BIRP1-4]|\\f\(..|\\&|\\/|\\,|\\c", "", text)
    return text.replace("\\-", "-").replace("\\e", "\\").replace("\\(aq", "'").replace("\\(dq", '"')


def documents(package, root):
    """(name, text) of every text of an unpacked package. Manual pages made from its pods are left out."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    has_pods = any(p.suffix == ".pod" for p in files)
    for path in files:
        name = f"{package}/{path.relative_to(root)}"
        stem = pathlib.Path(path.name.removesuffix(".gz").removesuffix(".dz"))
        if stem.suffix == ".dict":
            text = read(path)
            for i, begin in enumerate(range(0, len(text), DICTIONARY_DOCUMENT)):
                yield f"{name}#{i}", text[begin:begin + DICTIONARY_DOCUMENT]
        elif "/man/man" in name and MAN.search(path.name):
            if not has_pods:
                yield name, plain_man(read(path))
        elif stem.suffix in TEXT_SUFFIXES and "_sources" not in name and "changelog" not in path.name:
            yield name, read(path)


def clean(text):
    text = re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def is_heldout(name, one_in):
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % one_in == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--heldout", type=int, default=50, help="one file in this many (default 50)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seen, versions, sizes = set(), {}, {"train": 0, "heldout": 0}
    with tempfile.TemporaryDirectory() as folder, \
            open(args.out / "train.jsonl", "w") as train, open(args.out / "heldout.jsonl", "w") as heldout:
        for package in args.packages:
            root, versions[package] = fetch(package, pathlib.Path(folder))
            for name, text in documents(package, root):
                text = clean(text)
                digest = hashlib.sha256(text.encode()).digest()
                if len(text) < LEAST or digest in seen:
                    continue
                seen.add(digest)
                split = "heldout" if is_heldout(name, args.heldout) else "train"
                (heldout if split == "heldout" else train).write(
                    json.dumps({"file": name, "text": text}) + "\n")
                sizes[split] += len(text.encode())
            print(f"{package} {versions[package]}: {sizes}", file=sys.stderr)
    (args.out / "versions.json").write_text(json.dumps({"packages": versions, "bytes": sizes}, indent=1))


if __name__ == "__main__":
    main()
