#!/usr/bin/env bash
# clang-tidy over the core files, and over those that changed since BASE if one is given. Needs the
# compile commands of build/.
#   tools/tidy.sh [BASE]
set -euo pipefail
cd "$(dirname "$0")/.."
files=(src/base/*.cc src/quant/*.cc src/tensor/*.cc src/kvcache/*.cc src/model/step.cc
       src/model/infer_exec.cc src/ops/ops.cc)
if [[ -n ${1:-} ]]; then
  mapfile -t -O "${#files[@]}" files < <(git diff --name-only --diff-filter=d "$1" -- 'src/*.cc')
fi
# The compile commands are gcc's.
printf '%s\n' "${files[@]}" | sort -u |
  xargs -P "$(nproc)" -n 3 clang-tidy-22 -p build --quiet --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option
