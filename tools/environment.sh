# shellcheck shell=bash
# Sourced by the scripts that must work on a fresh machine: a Python environment with FILE installed.
#
#   source tools/environment.sh FILE
#
# Uses the active virtual environment, or .venv in the checkout, which is created if it does not exist. Installs only if
# a requirements file has changed since the last time. Returns pip's exit status, also to a shell without set -e.

_checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
_requirements=$_checkout/$1

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $(python3 --version) is too old: install Python 3.11 or later" >&2
    return 2
fi
if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -x "$_checkout/.venv/bin/pip" ]; then
        echo "> making $_checkout/.venv"
        # On Debian, venv cannot install pip without another package; pip itself can.
        python3 -m venv "$_checkout/.venv" 2>/dev/null ||
            { python3 -m venv --without-pip --clear "$_checkout/.venv" &&
                python3 -m pip --python "$_checkout/.venv/bin/python" install --quiet pip; } || return
    fi
    # shellcheck disable=SC1091
    source "$_checkout/.venv/bin/activate"
fi

_stamp=$VIRTUAL_ENV/.installed-$1
_wanted=$(cat "$_checkout"/requirements*.txt "$_requirements")
if [ ! -f "$_stamp" ] || [ "$(cat "$_stamp")" != "$_wanted" ]; then
    echo "> installing $1 into $VIRTUAL_ENV (a minute or two)"
    python -m pip install --quiet --disable-pip-version-check -r "$_requirements" || return
    printf '%s\n' "$_wanted" >"$_stamp"
fi
