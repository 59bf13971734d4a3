#!/usr/bin/env bash
# Installs what is missing of the named groups of packages-debian.txt.
#   tools/install.sh build test
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=()
group=""
while IFS= read -r line; do
  if [[ $line =~ ^#\ group\ ([a-z]+): ]]; then
    group=${BASH_REMATCH[1]}
  elif [[ -n $line && $line != \#* && " $* " == *" $group "* ]]; then
    wanted+=("$line")
  fi
done < packages-debian.txt

missing=()
for package in "${wanted[@]}"; do
  if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
    missing+=("$package")
  fi
done
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi

sudo=()
if [[ $(id -u) -ne 0 ]]; then
  sudo=(sudo)
fi
echo "installing: ${missing[*]}" >&2
"${sudo[@]}" apt-get update -qq
if ! DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq "${missing[@]}" >/dev/null; then
  echo "could not install: ${missing[*]}" >&2
  exit 1
fi
