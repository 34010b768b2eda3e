#!/usr/bin/env bash
# Builds every image with buildah, then starts each as a pod would: as user 65532, with its own entrypoint.
#
#   images/check.sh [TARGET...]        default: operator gateway runtime-cpu
#
# BASE          the base image; empty: a Debian that debootstrap makes, for machines without a registry
# TORCH_INDEX   where runtime-cpu takes torch from; empty: the usual index, whose torch is some GB larger
# STORE         folder for images, kept between runs (default: a temporary one)
# BUILD_OPTIONS further options of `buildah build`, such as --volume for certificates
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in buildah curl; do
  command -v "$tool" > /dev/null || { echo "make images-check needs $tool on the PATH" >&2; exit 1; }
done

export BUILDAH_ISOLATION=chroot
scratch=$(mktemp -d)
store=${STORE:-$scratch/store}
server=
cleanup() {
  [ -z "$server" ] || { kill "$server" && wait "$server"; } 2> /dev/null || true
  rm -rf "$scratch"
}
trap cleanup EXIT
images() { buildah --root "$store" --runroot "$scratch/run" "$@"; }

base=${BASE-}
if [ -z "$base" ]; then
  base=localhost/debian:12
  if ! images inspect "$base" > /dev/null 2>&1; then
    echo "==> making a base with debootstrap"
    debootstrap --variant=minbase --include=ca-certificates bookworm "$scratch/root" > "$scratch/debootstrap.log"
    container=$(images from scratch)
    images add --quiet "$container" "$scratch/root" / > /dev/null
    images commit --quiet --rm "$container" "$base" > /dev/null
    rm -rf "$scratch/root"
  fi
fi

inside() { # inside CONTAINER COMMAND...: as the pod's user
  local container=$1
  shift
  images run --user 65532:65532 "$container" -- "$@"
}

check_runtime() { # serves the embedded model until it has answered one request
  local container=$1 port=18000
  inside "$container" slipway-runtime serve file:///opt/slipway/models/tiny \
    --served-name tiny --port $port --admin-port 18001 --kv-cache-bytes 4Mi > "$scratch/runtime.log" 2>&1 &
  server=$!
  until curl --silent --fail http://127.0.0.1:18001/ready > /dev/null; do
    kill -0 "$server" 2> /dev/null || { cat "$scratch/runtime.log" >&2; exit 1; }
    sleep 1
  done
  curl --silent --show-error --fail http://127.0.0.1:$port/v1/completions -H 'content-type: application/json' \
    -d '{"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}' | grep --quiet '"finish_reason"'
  kill "$server" && wait "$server" || true
  server=
  echo "    it served the embedded model"
}

for target in "${@:-operator gateway runtime-cpu}"; do
  for target in $target; do
    echo "==> $target"
    # shellcheck disable=SC2086
    images build --quiet --layers --target "$target" --file images/Dockerfile --tag "slipway/$target:check" \
      --build-arg BASE="$base" --build-arg TORCH_INDEX="${TORCH_INDEX-}" ${BUILD_OPTIONS-} . > /dev/null
    container=$(images from "slipway/$target:check")
    part=${target%-cpu}
    inside "$container" "slipway-$part" --help > /dev/null
    echo "    it starts as user 65532"
    for folder in / /opt/slipway /opt/slipway/app; do
      ! inside "$container" touch "$folder/written" 2> /dev/null || { echo "$target may write to $folder" >&2; exit 1; }
    done
    if [ "$part" = runtime ]; then
      check_runtime "$container"
    else
      ! inside "$container" sh -c 'command -v gcc || command -v pip || command -v uv' > /dev/null 2>&1
    fi
    images rm "$container" > /dev/null
  done
done
