# shellcheck shell=bash
# Sourced by scripts: with DRY_RUN=1, "run COMMAND ..." prints the command instead of running it. With --help a script
# shows the comment at its top, and does nothing.
case " $* " in
*" -h "* | *" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;;
esac

quoted() { # words as one types them
    local word
    for word; do
        [[ $word =~ ^[-A-Za-z0-9_@%+=:,./]+$ ]] || word="'${word//\'/\'\\\'\'}'"
        printf '%s ' "$word"
    done
    echo
}
run() {
    if ((${DRY_RUN:-0})); then quoted "$@" && return; fi
    local code=0
    "$@" || code=$?
    # With this code deepspeed exits if signal 256 - CODE ended a rank, which a single rank has no other to report.
    ((code < 225 || code > 254)) || echo "$(basename "$0"): error: signal $((256 - code)) ended a process" >&2
    return "$code"
}
