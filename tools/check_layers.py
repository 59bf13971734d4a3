#!/usr/bin/env python3
"""Fails if a source file includes a module that its own module may not use, or is not ASCII.

The levels are read from ARCHITECTURE.md: an include may point only to a lower level, and only to the
modules listed here.
"""
import pathlib
import re
import sys

ALLOWED = {
    "base": set(),
    "tensor": {"base"},
    "text": {"base"},
    "image": {"base"},
    "quant": {"tensor", "base"},
    "io": {"tensor", "base"},
    "ops": {"quant", "tensor", "base"},
    "model": {"ops", "io", "quant", "tensor", "base"},
    "kvcache": {"ops", "io", "quant", "tensor", "base"},
    "engine": {"model", "kvcache", "text", "image", "ops", "io", "quant", "tensor", "base"},
    "train": {"model", "text", "ops", "io", "quant", "tensor", "base"},
    "server": {"engine", "text", "base"},
    "cli": {
        "server", "engine", "train", "model", "kvcache", "text", "image", "ops", "io", "quant", "tensor",
        "base"
    },
}
LEVEL = re.compile(r"^\| (\d) \| `(\w+)` \|", re.M)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([a-z_0-9]+)/')


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    faults = []
    levels = {module: int(level) for level, module in LEVEL.findall((root / "ARCHITECTURE.md").read_text())}
    if levels.keys() != ALLOWED.keys():
        faults.append(f"ARCHITECTURE.md has the modules {sorted(levels)}, this file {sorted(ALLOWED)}")
    for module, allowed in ALLOWED.items():
        for other in sorted(allowed):
            if levels.get(other, 0) >= levels.get(module, 0):
                faults.append(f"{module} is allowed {other}, which ARCHITECTURE.md does not put below it")
    for path in sorted((root / "src").rglob("*")):
        if path.suffix not in {".h", ".cc", ".cu", ".cuh"}:
            continue
        module = path.relative_to(root / "src").parts[0]
        text = path.read_bytes()
        if not text.isascii():
            faults.append(f"{path}: not ASCII")
        for number, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
            match = INCLUDE.match(line)
            if match and match[1] in ALLOWED and match[1] not in ALLOWED[module] | {module}:
                faults.append(f"{path}:{number}: {module} may not include {match[1]}")
        if module not in ALLOWED:
            faults.append(f"{path}: unknown module {module}")
    print("\n".join(faults) or "layers: ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
