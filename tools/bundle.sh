#!/bin/sh
# SPDX-FileCopyrightText: The Deeptide authors
# SPDX-License-Identifier: Apache-2.0
# Writes one archive for machines without a network: tools/bundle.sh <archive.tar.xz>
# It holds the sources and, in third_party/, what the build takes from Debian's packages. Where it is unpacked,
# ./build.sh needs a C++20 compiler, CMake, Ninja and a Python with torch; ./check.sh needs pytest as well.
set -eu
cd "$(dirname "$0")/.."

archive=${1:?the archive to write, such as dist/deeptide.tar.xz}
PACKAGES="nlohmann-json3-dev libcli11-dev libspdlog-dev libfmt-dev libhwy-dev libgloo-dev libgtest-dev liburing-dev
  libxxhash-dev libspdlog1.10 libfmt9 libhwy1"

command -v dpkg >/dev/null || { echo "bundle: this needs Debian's dpkg, which lists a package's files" >&2; exit 1; }
version=$(sed -nE 's/^project\(deeptide VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
root=$folder/deeptide-$version
mkdir -p "$root/third_party" "$(dirname "$archive")"

git ls-files -z --cached --others --exclude-standard -- . ':!.ci' ':!docs/figures' |
  tar --null --files-from=- --create | tar --extract --directory "$root"
mv "$root"/tools/bundle/*.sh "$root"

# liburing is linked whole into the command, or not at all.
files_of() {
  dpkg -L "$1" | grep -Ev '/(doc|man|lintian|pkgconfig)(/|$)|liburing.*[.]so' | while read -r file; do
    if [ -L "$file" ] || [ -f "$file" ]; then echo "${file#/}"; fi
  done
}
for package in $PACKAGES; do
  dpkg -L "$package" >/dev/null 2>&1 || { echo "bundle: install $package first (tools/setup.sh build test)" >&2; exit 1; }
  files_of "$package" | tar --create --directory / --files-from=- | tar --extract --directory "$root/third_party"
done

tar --create --xz --file "$archive" --directory "$folder" --owner=0 --group=0 "deeptide-$version"
echo "$archive: $(du -h "$archive" | cut -f1), unpacked $(du -sh "$root" | cut -f1)"
