# shellcheck shell=bash
# Sourced by scripts: with DRY_RUN=1, "run COMMAND ..." prints the command instead of running it.

quoted() { # words as one types them
    local word
    for word; do
        [[ $word =~ ^[-A-Za-z0-9_@%+=:,./]+$ ]] || word="'${word//\'/\'\\\'\'}'"
        printf '%s ' "$word"
    done
    echo
}
run() { if ((${DRY_RUN:-0})); then quoted "$@"; else "$@"; fi; }
