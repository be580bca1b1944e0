#!/bin/sh
# requirements.lock from pyproject.toml: every package with its hashes, for every Python that is supported, naming no index.
set -eu
cd "$(dirname "$0")/.."
out=$(mktemp)
trap 'rm -f "$out"' EXIT
.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --all-extras --upgrade \
    --generate-hashes --no-emit-index-url --no-header pyproject.toml --output-file "$out"
{
    echo "# Every package that .venv holds, with hashes.  \`make lock\` makes it again from pyproject.toml."
    cat "$out"
} > requirements.lock
