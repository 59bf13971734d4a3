#!/usr/bin/env bash
# Unpacks the source of the grammar core into .cache, from PyPI. Without it the binary is complete but
# for structured output, so that a failure here is not one of the build.
set -euo pipefail
cd "$(dirname "$0")/.."
package=$(grep '^xgrammar==' requirements-build.txt)
target=.cache/${package/==/-}
[[ -d $target ]] && exit 0
mkdir -p .cache
work=$(mktemp -d .cache/grammar.XXXXXX)
trap 'rm -rf "$work"' EXIT
echo "fetching the source of $package" >&2
if python3 -m venv "$work/venv" >&2 &&
  "$work/venv/bin/pip" download -q --disable-pip-version-check --no-deps --no-binary xgrammar \
    -d "$work" "$package" >&2 &&
  tar -xf "$work"/xgrammar-*.tar.gz -C "$work" && mv "$work/${package/==/-}" "$target"; then
  exit 0
fi
echo "could not fetch $package: structured output will be off" >&2
