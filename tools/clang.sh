#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a program of LLVM in the newest version here: tools/clang.sh clang++. Needs 16 or newer.
set -eu
for version in 22 21 20 19 18 17 16; do
  command -v "$1-$version" && exit
done
if plain=$(command -v "$1"); then
  version=$("$plain" --version | sed -nE 's/.*version ([0-9]+).*/\1/p' | head -n 1)
  [ "${version:-0}" -ge 16 ] && echo "$plain" && exit
fi
echo "clang.sh: no $1 of version 16 or newer here; tools/setup.sh clang installs it" >&2
exit 1
