#!/usr/bin/env bash
# Entry point of both images: an sshd, where a key is mounted, and then the command.
#
#   SSH_KEY       private key that all containers of the cluster share, mounted read-only; none there is no sshd
#   SSH_ADDRESS   where sshd listens: this host's address in the cluster's own network
#   SSH_PORT      not 22, where the host's own sshd is
#
# The key opens every container, and vouches for each: it signs the host key that a container makes when it first
# starts. So nobody is asked whether a host is the right one, and one that has not got the key is refused.
set -euo pipefail
SSH_KEY=${SSH_KEY:-/run/secrets/ssh_key}
SSH_PORT=${SSH_PORT:-2222}

fail() { echo "entrypoint.sh: error: $1" >&2 && exit 2; }

configure_ssh() { # folder
    [ "$(id -u)" != 0 ] || fail "sshd is not started for root: start the container as its user, trainer"
    [ -n "${SSH_ADDRESS:-}" ] || fail "set SSH_ADDRESS, this host's address in the cluster's network, or remove $SSH_KEY"
    umask 077
    mkdir -p "$1"
    [ -e "$1/host_key" ] || ssh-keygen -q -t ed25519 -N "" -C "" -f "$1/host_key"
    ssh-keygen -y -P "" -f "$SSH_KEY" >"$1/authorized_keys" || fail "$SSH_KEY is no private key without a passphrase"
    ssh-keygen -q -s "$SSH_KEY" -I "$(hostname)" -h -n cluster "$1/host_key.pub"
    echo "@cert-authority cluster $(cat "$1/authorized_keys")" >"$1/known_hosts"
    cat >"$1/sshd_config" <<CONFIG
ListenAddress $SSH_ADDRESS
Port $SSH_PORT
HostKey $1/host_key
HostCertificate $1/host_key-cert.pub
AuthorizedKeysFile $1/authorized_keys
PidFile $1/sshd.pid
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin no
UsePAM no
DisableForwarding yes
PermitUserEnvironment no
PermitUserRC no
$(session_environment)
CONFIG
    cat >"$1/config" <<CONFIG
Host this-container
    HostName $SSH_ADDRESS
Host *
    Port $SSH_PORT
    IdentityFile $SSH_KEY
    IdentitiesOnly yes
    BatchMode yes
    ConnectTimeout 10
    HostKeyAlias cluster
    StrictHostKeyChecking yes
    UserKnownHostsFile $1/known_hosts
CONFIG
}

# sshd starts sessions with an empty environment; the image's own is what finds Python, CUDA and the interface.
session_environment() {
    local name value words=()
    for name in PATH LD_LIBRARY_PATH TORCH_EXTENSIONS_DIR OMP_NUM_THREADS "${!DS_@}" "${!NCCL_@}" "${!GLOO_@}"; do
        value=${!name:-}
        value=${value//\\/\\\\}
        [ -z "$value" ] || words+=("\"$name=${value//\"/\\\"}\"")
    done
    echo "SetEnv ${words[*]}"
}

if [ ! -e "$SSH_KEY" ]; then exec "${@:-bash}"; fi

# ssh takes the home folder from the list of users, whatever HOME says.
HOME_FOLDER=$(getent passwd "$(id -u)" | cut -d: -f6) || true
[ -n "$HOME_FOLDER" ] || fail "ssh knows no user $(id -u): build the image with --build-arg USER_ID=$(id -u)"
(configure_ssh "$HOME_FOLDER/.ssh") # in a shell of its own, for the umask
SSHD=(/usr/sbin/sshd -D -f "$HOME_FOLDER/.ssh/sshd_config")
if [ $# = 0 ]; then exec "${SSHD[@]}" -e; fi
rm -f "$HOME_FOLDER/.ssh/sshd.pid"
"${SSHD[@]}" -E "$HOME_FOLDER/.ssh/sshd.log" </dev/null &>/dev/null &
until [ -e "$HOME_FOLDER/.ssh/sshd.pid" ]; do
    kill -0 $! 2>/dev/null || fail "sshd does not start: $(tail -n 1 "$HOME_FOLDER/.ssh/sshd.log")"
    sleep 0.1
done
exec "$@"
