#!/usr/bin/env bash
# Build the CPU image and train in it, where there is neither Docker nor its registry: as root, on Debian.
#
#   apt-get install aardvark-dns buildah catatonit crun debootstrap netavark podman && pip install podman-compose
#   bash docker/check_cpu_image.sh FOLDER [FLAG of buildah build ...]
#
# buildah, podman and podman-compose read Dockerfile.cpu, what run.sh prints, and compose.yaml. Only this is not as with
# Docker: the base image has the name in FROM, but is debootstrap's Debian with the Python of this machine.
# FOLDER needs 5 GB; a second run builds only what has changed. Flags of buildah build, such as --volume
# /opt/wheels:/opt/wheels:ro --volume FILE:/etc/pip.conf:ro, give the build a mirror's certificates and addresses.
set -euo pipefail

USER_ID=10000 # of an ordinary user, whom this machine need not know
FOLDER=$(realpath -m "${1:?usage: bash docker/check_cpu_image.sh FOLDER [FLAG of buildah build ...]}")
ROOT=$(cd "$(dirname "$0")/.." && pwd)
BASE=$(sed -n 's/^FROM //p' "$ROOT/docker/Dockerfile.cpu")
IMAGE=$(sed -n 's/^  image: //p' "$ROOT/docker/compose.yaml")
CHECKOUT=$FOLDER/checkout
MODEL=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --batch-size 4 --train-iters 20 --lr 0.001 --log-interval 5 --eval-iters 0
    --tokenizer-type GPT2BPETokenizer --data-path checkpoints/quickstart/corpus_text_document
    --vocab-file checkpoints/quickstart/vocab.json --merge-file checkpoints/quickstart/merges.txt
)

step() { printf '\n== %s\n' "$*"; }

# Namespaces of its own keep mounts and the containers' network apart from this machine. crun does not
# support cgroups of both versions next to each other.
configure() {
    if mountpoint --quiet /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
    mkdir -p "$FOLDER/bin"
    export CONTAINERS_STORAGE_CONF=$FOLDER/storage.conf CONTAINERS_CONF=$FOLDER/containers.conf
    printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "%s"\n' \
        "$FOLDER/storage" "$FOLDER/runroot" >"$CONTAINERS_STORAGE_CONF"
    printf '[network]\nnetwork_backend = "netavark"\n[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n' \
        >"$CONTAINERS_CONF"
    podman_with_limits >"$FOLDER/bin/podman"
    chmod +x "$FOLDER/bin/podman"
    ln -sf podman "$FOLDER/bin/docker"
    export PATH=$FOLDER/bin:$PATH
}

# podman raises limits, which a root without CAP_SYS_RESOURCE may not: the limits of this shell are kept.
podman_with_limits() {
    local locked
    locked=$(ulimit -Hl)
    [ "$locked" = unlimited ] && locked=-1 || locked=$((locked * 1024))
    cat <<SCRIPT
#!/usr/bin/env bash
case \$1 in run | create) ;; *) exec $(command -v podman) "\$@" ;; esac
command=\$1 words=()
shift
for word; do
    [ "\$word" != memlock=-1 ] || word=memlock=$locked
    words+=("\$word")
done
exec $(command -v podman) "\$command" --cgroups=disabled --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 "\${words[@]}"
SCRIPT
}

base_image() {
    local system=$FOLDER/system python container name
    python=$(python3 -c 'import sys; print(sys.base_prefix)')
    name=python$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [[ $BASE == python:${name#python}.* ]] || { echo "$BASE needs another Python than $name" >&2 && exit 2; }
    [[ $BASE == *-slim-bookworm ]] || { echo "$BASE is not Debian bookworm" >&2 && exit 2; }
    debootstrap --variant=minbase --include=ca-certificates,netbase,tzdata,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g \
        bookworm "$system" >"$FOLDER/debootstrap.log"
    (cd "$python" && tar --exclude=site-packages --exclude=__pycache__ --exclude='test' -c \
        bin/python3 "bin/$name" "lib/$name" include lib/libpython*) | tar -C "$system/usr/local" -x
    ln -s python3 "$system/usr/local/bin/python"
    chroot "$system" ldconfig
    chroot "$system" env -i PATH=/usr/local/bin python3 -m ensurepip --default-pip >"$FOLDER/ensurepip.log" 2>&1
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$system" /
    buildah config --cmd python3 --env LANG=C.UTF-8 \
        --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit --quiet --rm "$container" "docker.io/library/$BASE"
    rm -rf "$system"
}

# What run.sh prints for an ordinary user, run with podman.
in_a_container() {
    local command
    command=$(cd "$CHECKOUT" && setpriv --reuid=$USER_ID --regid=$USER_ID --clear-groups \
        env IMAGE="$IMAGE" GPUS= DRY_RUN=1 bash docker/run.sh "$@" | tail -n 1)
    eval "$command"
}

two_containers() {
    ip link set lo up
    export USER_ID SSH_KEY=$FOLDER/cluster_key
    rm -f "$SSH_KEY"*
    ssh-keygen -q -t ed25519 -N "" -f "$SSH_KEY"
    chown $USER_ID "$SSH_KEY"
    cd "$CHECKOUT"
    trap 'podman-compose --file docker/compose.yaml down' EXIT
    podman-compose --file docker/compose.yaml up --detach
    local host
    for host in host-1 host-2; do
        until podman healthcheck run "megatron-deepspeed_${host}_1"; do sleep 1; done
    done
    podman-compose --file docker/compose.yaml exec -T host-1 ssh host-2 'hostname; id'
    podman-compose --file docker/compose.yaml exec -T host-1 python tools/launch.py \
        --hostfile docker/hostfile.compose pretrain_gpt2.py "${MODEL[@]}" --model-parallel-size 2 --pipe-parallel-size 2
}

case "${STAGE:-}" in
"") STAGE=build exec unshare --mount bash "$0" "$@" ;;
hosts) two_containers && exit ;;
esac
configure
rm -rf "$CHECKOUT" && mkdir -p "$CHECKOUT"
(cd "$ROOT" && git ls-files -z | tar --null --files-from=- -c) | tar -C "$CHECKOUT" -x
mkdir -p "$CHECKOUT/data" "$CHECKOUT/checkpoints"
chown $USER_ID "$CHECKOUT/data" "$CHECKOUT/checkpoints"

step "the base image, $BASE"
buildah inspect --type image "docker.io/library/$BASE" >/dev/null 2>&1 || base_image
step "the image, $IMAGE"
buildah build --pull-never --layers --format docker --isolation chroot --network host "${@:2}" \
    --build-arg USER_ID=$USER_ID --file "$CHECKOUT/docker/Dockerfile.cpu" --tag "$IMAGE" "$CHECKOUT"
step "one container: training on two ranks"
in_a_container env OUT=checkpoints/quickstart TP=2 PP=1 bash examples/quickstart.sh --fast
step "two containers: training on two ranks in each, over ssh"
STAGE=hosts unshare --net bash "$0" "$@"
step "done"
