# Sourced by the other scripts: creates .venv with Python 3.11 or later and installs the pinned packages of the
# requirements file $1. Does nothing if that file was installed before and has not changed.

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$project"

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or later was not found. Install it, or set PYTHON=/path/to/python" >&2
    exit 2
}

install_requirements() {
    local requirements=$1 stamp=.venv/installed-$1 wanted
    wanted=$(cat requirements*.txt | cksum)  # sha256sum is missing on some systems
    if [ ! -x .venv/bin/python ]; then
        echo "creating .venv"
        local python
        python=$(find_python)
        "$python" -m venv .venv
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing $requirements"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements"
        echo "$wanted" > "$stamp"
    fi
    export PATH="$project/.venv/bin:$PATH"
}
