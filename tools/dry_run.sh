# shellcheck shell=bash
# Sourced by scripts: with DRY_RUN=1, "run COMMAND ..." prints the command instead of running it. With --help a script
# shows the comment at its top, and does nothing. "is_on" and "switch" read settings that are 1 or 0, "check_numbers" checks
# those that are numbers, "fail" ends the script, and "is_newer" says whether a file need not be made again.
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
fail() { echo "$(basename "$0"): error: $1" >&2 && exit 2; }
is_on() { # VALUE NAME: whether the setting of this name is 1; what is neither 1 nor 0 ends the script
    [[ $1 =~ ^[01]?$ ]] || fail "the setting of $2 is ${1@Q}: give 1 or 0"
    [ "$1" = 1 ]
}
switch() { # VALUE FLAG [OTHER ...]: adds FLAG to SWITCHES if the setting is on, and otherwise OTHER
    if is_on "$1" "$2"; then SWITCHES+=("$2"); else SWITCHES+=("${@:3}"); fi
}
check_numbers() { # LEAST NAME ...: ends the script if one of these settings is not a whole number from LEAST on
    local name
    for name in "${@:2}"; do
        [[ ${!name} =~ ^(0|[1-9][0-9]{0,8})$ && ${!name} -ge $1 ]] ||
            fail "the setting of $name is ${!name@Q}: give a whole number from $1 on"
    done
}
is_on "${DRY_RUN:-0}" DRY_RUN || true

is_newer() { # FILE OTHER ...: whether FILE is newer than each of the other files that exists
    local other
    for other in "${@:2}"; do
        if [ -e "$other" ] && [ ! "$1" -nt "$other" ]; then return 1; fi
    done
    [ -e "$1" ]
}
run() {
    if is_on "${DRY_RUN:-0}" DRY_RUN; then quoted "$@" && return; fi
    local code=0
    "$@" || code=$?
    # With this code deepspeed exits if signal 256 - CODE ended a rank, which a single rank has no other to report.
    ((code < 225 || code > 254)) || echo "$(basename "$0"): error: signal $((256 - code)) ended a process" >&2
    return "$code"
}
