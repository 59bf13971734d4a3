#!/usr/bin/env bash
# Runs every fuzz target on its seed corpus for a bounded time.
#   tools/fuzz.sh SECONDS
set -euo pipefail
cd "$(dirname "$0")/.."
for target in build-fuzz/fuzz/fuzz_*; do
  [[ -x $target && ! -d $target ]] || continue
  name=$(basename "$target")
  work=build-fuzz/corpus/$name
  mkdir -p "$work"
  echo "$name"
  "$target" -max_total_time="$1" -timeout=10 -rss_limit_mb=4096 -print_final_stats=1 \
    -artifact_prefix="build-fuzz/$name-" "$work" "fuzz/corpus/${name#fuzz_}" 2>&1 | tail -8
done
