#!/usr/bin/env bash
# clang-tidy over the files that changed since the base revision, or over the core headers' users if
# nothing can be compared.
#   tools/tidy.sh [BASE]
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:-}
if [[ -z $base ]]; then
  base=$(git rev-parse -q --verify HEAD~20 2>/dev/null || true)
fi
core=(src/base/*.cc src/quant/*.cc src/model/step.cc src/model/infer_exec.cc)
if [[ -n $base ]]; then
  mapfile -t files < <(git diff --name-only --diff-filter=d "$base" -- 'src/*.cc'; printf '%s\n' "${core[@]}")
else
  files=("${core[@]}")
fi
printf '%s\n' "${files[@]}" | sort -u | head -60 |
  xargs -P "$(nproc)" -n 4 clang-tidy-22 -p build --quiet --warnings-as-errors='*'
