# shellcheck shell=bash
# Sourced by the examples that replace what is in their output folder, $OUT: installs what they need, and empties the
# folder, unless another example runs in it or its files are not of an earlier run. With DRY_RUN=1 the commands that
# follow are printed instead of being run. Settings that are numbers are checked before.

step() { printf '\n== %s\n' "$*"; }

lock_output_folder() { # FOLDER: until the script ends
    exec 9<"$1"
    flock --nonblock 9 || fail "another one runs in $1: wait, or set OUT"
    [ -z "$(ls -A "$1")" ] || [ -e "$1/corpus.jsonl" ] ||
        fail "the files in $1 are not of an earlier run and would be deleted: set OUT"
}

if is_on "${DRY_RUN:-0}" DRY_RUN; then
    exec 3>&1 # the output of some commands is an argument of another
    show() { quoted "$@" >&3; }
    source() { show source "$@"; }
    find() { show find "$@"; }
    mkdir() { show mkdir "$@"; }
    python() { show python "$@"; }
    deepspeed() { show deepspeed "$@"; }
fi

# shellcheck disable=SC1091
source tools/environment.sh requirements.txt
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
mkdir -p "$OUT"
is_on "${DRY_RUN:-0}" DRY_RUN || lock_output_folder "$OUT"
find "$OUT" -mindepth 1 -delete
