# shellcheck shell=bash
# Sourced by the examples that replace what is in their output folder.

lock_output_folder() { # FOLDER: ends the script if another one uses it, or if its files are not of an earlier run
    exec 9<"$1"
    flock --nonblock 9 || { echo "$(basename "$0"): error: another one runs in $1: wait, or set OUT" >&2 && exit 2; }
    if [ -n "$(ls -A "$1")" ] && [ ! -e "$1/corpus.jsonl" ]; then
        echo "$(basename "$0"): error: the files in $1 are not of an earlier run and would be deleted: set OUT" >&2
        exit 2
    fi
}
