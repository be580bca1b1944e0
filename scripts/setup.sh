#!/bin/sh
# Makes .venv with everything the project needs.  `setup.sh base` is what the demo needs; `setup.sh all` adds the test servers.
#
# Each step leaves a stamp in .venv that names what it was made from, so that a second run does only what changed.
set -eu
cd "$(dirname "$0")/.."

what=${1:-all}
venv=.venv
python=$venv/bin/python

say() { printf '%s\n' "$@" >&2; }
fail() { say "$@"; exit 1; }

pip() { "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps "$@"; }

# True when $1 is a Python that the project runs on.
fits() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

digest() { "$python" -c '
import hashlib, sys
digest = hashlib.sha256()
for name in sys.argv[1:]:
    digest.update(open(name, "rb").read())
print(digest.hexdigest()[:16])' "$@"; }

# done_with STEP KEY: whether STEP's stamp says KEY.   stamp STEP KEY: says so from now on.
done_with() { [ "$(cat "$venv/.stamp-$1" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" > "$venv/.stamp-$1"; }

if ! fits "$python"; then
    found=
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14; do
        if fits "$candidate"; then found=$candidate; break; fi
    done
    if [ -z "$found" ]; then
        have=$(python3 --version 2>/dev/null || echo "no python3")
        fail "pubsub needs Python 3.11 or later, and found $have." \
             "Install one (Debian and Ubuntu: apt install python3.11 python3.11-venv; Fedora: dnf install python3.11)," \
             "or name it: make setup PYTHON=/path/to/python3.11"
    fi
fi

# Java is looked for before anything is fetched: the check needs nothing but Python.
if [ -n "${found:-}" ]; then checker=$found; else checker=$python; fi
if ! done_with java "${JAVA_HOME:-}:$(command -v java || true)"; then
    "$checker" -m pubsub.jars check || exit 1
fi

if [ -n "${found:-}" ]; then
    say "Making .venv with $("$found" --version)"
    rm -rf "$venv"
    "$found" -m venv "$venv" || {
        rm -rf "$venv"
        fail "$found cannot make a virtual environment." \
             "Debian and Ubuntu: apt install $("$found" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    }
fi
stamp java "${JAVA_HOME:-}:$(command -v java || true)"

packages=$(digest requirements.lock)
if ! done_with packages "$packages"; then
    say "Installing the packages of requirements.lock (half a minute; more where pip must do it)"
    # uv takes a fifth of pip's time, but knows nothing of pip's own settings: where it fails, pip does it all.
    uv=$(mktemp)
    awk '/^[a-z]/ { wanted = /^uv==/ } wanted' requirements.lock > "$uv"
    pip --require-hashes --requirement "$uv"
    rm -f "$uv"
    # Compiled as pip does it: where Python may not write beside the packages (PYTHONDONTWRITEBYTECODE, a venv of another
    # user), every command would compile them again, which takes most of its time.  A network may have a certificate
    # authority of its own, which the machine knows.
    UV_SYSTEM_CERTS=1 "$venv/bin/uv" pip install --quiet --python "$python" --no-deps --require-hashes --compile-bytecode \
        --requirement requirements.lock ||
        pip --require-hashes --requirement requirements.lock
    stamp packages "$packages"
fi

project="$packages $(digest pyproject.toml) $(pwd)"
if ! done_with project "$project"; then
    # Its name until 0.1; what is left of it would shadow the command.
    "$python" -m pip uninstall --quiet --yes --disable-pip-version-check pubsub 2>/dev/null || true
    pip --no-build-isolation --editable .
    "$python" -m compileall -q pubsub catalog launcher apply tablesync walsender >/dev/null
    stamp project "$project"
fi

jars="$packages $(digest pubsub/jars.py pubsub/java_classes.py pubsub/java/pubsub/*.java)"
if ! done_with jars "$jars"; then
    say "Fetching the jars of Delta, and compiling its store for local directories"
    "$python" -m pubsub.jars fetch >/dev/null
    stamp jars "$jars"
fi

[ "$what" = all ] || exit 0

# These may take a while and need nothing of each other.
classes="$jars $(digest scripts/class_data_archive.py) $(cat "$venv/.stamp-java")"
if ! done_with classes "$classes"; then
    say "Making an archive of Java's classes, so that Spark starts faster"
    { "$python" scripts/class_data_archive.py || true; stamp classes "$classes"; } &
fi
# The decoder runs without, several times slower; what has been compiled is found by the sources' contents (walsender/hot).
hot="$packages $(digest scripts/compile_hot.py walsender/hot/*.py)"
if ! done_with hot "$hot"; then
    say "Compiling the decoder's hot modules"
    { "$python" scripts/compile_hot.py; stamp hot "$hot"; } &
fi
# pytest rewrites the assertions of each test module, which takes three times as long as all else of a collection; the processes
# of a run would each do it.  What is edited later is rewritten when it is run.
if ! done_with tests "$packages"; then
    say "Compiling the tests"
    { "$python" -m pytest --collect-only -q >/dev/null 2>&1 || true; stamp tests "$packages"; } &
fi
servers="$packages $(digest pubsub/testing/binaries.py pubsub/jars.py)"
if ! done_with servers "$servers"; then
    say "Fetching PostgreSQL 15 to 18 for the tests, and what Spark needs for S3"
    "$python" -m pubsub.testing.binaries fetch >/dev/null
    "$python" -m pubsub.jars fetch s3 >/dev/null
    stamp servers "$servers"
fi
wait
