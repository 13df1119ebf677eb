#!/usr/bin/env bash
# Entry point of both images: starts sshd if a key is mounted, and then runs the command.
#
#   SSH_KEY       private key shared by all containers of the cluster, mounted read-only; without it there is no sshd
#   SSH_ADDRESS   address on which sshd listens: this host's address in the cluster's network
#   SSH_PORT      not 22, the port of the host's own sshd
#
# The key allows logins to every container and also signs the host key that a container creates at its first start. So
# host keys need no confirmation, and hosts without the shared key are rejected.
set -euo pipefail
SSH_KEY=${SSH_KEY:-/run/secrets/ssh_key}
SSH_PORT=${SSH_PORT:-2222}

fail() { echo "entrypoint.sh: error: $1" >&2 && exit 2; }

configure_ssh() { # folder
    [ "$(id -u)" != 0 ] || fail "sshd is not started as root: start the container as its user, trainer"
    [ -n "${SSH_ADDRESS:-}" ] || fail "set SSH_ADDRESS, this host's address in the cluster's network, or remove $SSH_KEY"
    umask 077
    mkdir -p "$1"
    [ -e "$1/host_key" ] || ssh-keygen -q -t ed25519 -N "" -C "" -f "$1/host_key"
    ssh-keygen -y -P "" -f "$SSH_KEY" >"$1/authorized_keys" || fail "$SSH_KEY is not a private key without a passphrase"
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

# sshd starts sessions with an empty environment; pass on the variables that locate Python, CUDA and the interface.
session_environment() {
    local name value words=()
    for name in PATH LD_LIBRARY_PATH TORCH_EXTENSIONS_DIR OMP_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS \
        "${!DS_@}" "${!NCCL_@}" "${!GLOO_@}" "${!TORCH_NCCL_@}" "${!TORCH_FR_@}" "${!PYTORCH_@}"; do
        value=${!name:-}
        value=${value//\\/\\\\}
        [ -z "$value" ] || words+=("\"$name=${value//\"/\\\"}\"")
    done
    echo "SetEnv ${words[*]}"
}

if [ ! -e "$SSH_KEY" ]; then exec "${@:-bash}"; fi

# ssh takes the home folder from the user database and ignores HOME.
HOME_FOLDER=$(getent passwd "$(id -u)" | cut -d: -f6) || true
[ -n "$HOME_FOLDER" ] || fail "there is no user $(id -u): build the image with --build-arg USER_ID=$(id -u)"
(configure_ssh "$HOME_FOLDER/.ssh") # in a subshell, for the umask
SSHD=(/usr/sbin/sshd -D -f "$HOME_FOLDER/.ssh/sshd_config")
if [ $# = 0 ]; then exec "${SSHD[@]}" -e; fi
rm -f "$HOME_FOLDER/.ssh/sshd.pid"
"${SSHD[@]}" -E "$HOME_FOLDER/.ssh/sshd.log" </dev/null &>/dev/null &
until [ -e "$HOME_FOLDER/.ssh/sshd.pid" ]; do
    kill -0 $! 2>/dev/null || fail "sshd does not start: $(tail -n 1 "$HOME_FOLDER/.ssh/sshd.log")"
    sleep 0.1
done
exec "$@"
