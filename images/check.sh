#!/usr/bin/env bash
# Builds every image with buildah, then starts each as a pod would: as user 65532, with its own entrypoint.
#
#   images/check.sh [TARGET...]        default: all, operator gateway agent runtime-cpu runtime
#
# BASE          the base image; empty: a Debian that debootstrap makes, for machines without a registry
# TORCH_INDEX   where runtime-cpu takes torch from; empty: the usual index, whose torch is some GB larger
# STORE         folder for images, kept between runs (default: a temporary one)
# BUILD_OPTIONS further options of `buildah build`, such as --volume for certificates
# FREE_GB       disk that must be free where images and temporary files are kept (default: 28, the peak with PyPI's torch)
#
# An image that fails does not keep the others from being checked; the exit status is 1 if one failed.
set -euo pipefail
cd "$(dirname "$0")/.."

lacking=()
tools=(buildah curl)
[ -n "${BASE-}" ] || tools+=(debootstrap)
for tool in "${tools[@]}"; do
  command -v "$tool" > /dev/null || lacking+=("$tool on the PATH")
done
[ "$(id -u)" = 0 ] || lacking+=("root")
free=$(df --output=avail --block-size=1G "${TMPDIR:-/tmp}" | tail -1)
[ "$free" -ge "${FREE_GB:-28}" ] || lacking+=("${FREE_GB:-28} GB of free disk in ${TMPDIR:-/tmp} (${free// /} GB are free)")
if [ ${#lacking[@]} -gt 0 ]; then
  printf 'make images-check lacks: %s' "${lacking[0]}" >&2
  [ ${#lacking[@]} -eq 1 ] || printf ', %s' "${lacking[@]:1}" >&2
  printf '.\n' >&2
  exit 1
fi

export BUILDAH_ISOLATION=chroot
scratch=$(mktemp -d)
store=${STORE:-$scratch/store}
server=
cleanup_server() {
  [ -z "$server" ] || { kill "$server" && wait "$server"; } 2> /dev/null || true
}
cleanup() {
  cleanup_server
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
  inside "$container" slipway-runtime serve file:///opt/slipway/models/tiny --device cpu \
    --served-name tiny --port $port --admin-port 18001 --kv-cache-bytes 4Mi > "$scratch/runtime.log" 2>&1 &
  server=$!
  until curl --silent --fail http://127.0.0.1:18001/ready > /dev/null; do
    kill -0 "$server" 2> /dev/null || { cat "$scratch/runtime.log"; exit 1; }
    sleep 1
  done
  curl --silent --show-error --fail http://127.0.0.1:$port/v1/completions -H 'content-type: application/json' \
    -d '{"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}' | grep --quiet '"finish_reason"'
  kill "$server" && wait "$server" || true
  server=
}

build_and_start() { # TARGET: every command's output goes to the log, which is shown only if one fails
  local target=$1 part=${1%-cpu} container
  # shellcheck disable=SC2086
  images build --quiet --layers --target "$target" --file images/Dockerfile --tag "slipway/$target:check" \
    --build-arg BASE="$base" --build-arg TORCH_INDEX="${TORCH_INDEX-}" ${BUILD_OPTIONS-} .
  container=$(images from "slipway/$target:check")
  echo "$container" > "$scratch/container"
  inside "$container" "slipway-$part" --help
  for folder in / /opt/slipway /opt/slipway/app; do
    if inside "$container" touch "$folder/written"; then
      echo "$target may write to $folder"
      return 1
    fi
  done
  if [ "$target" != runtime ] && inside "$container" sh -c 'command -v gcc || command -v pip || command -v uv'; then
    echo "$target ships a compiler or an installer"
    return 1
  fi
  if [ "$part" = runtime ]; then
    check_runtime "$container"
  fi
}

[ $# -gt 0 ] || set -- operator gateway agent runtime-cpu runtime
failed=()
for target in "$@"; do
  echo "==> $target"
  # In a shell of its own: `set -e` has no effect in a condition.
  set +e
  (set -e; trap cleanup_server EXIT; build_and_start "$target") > "$scratch/$target.log" 2>&1
  status=$?
  set -e
  if [ -f "$scratch/container" ]; then
    images rm "$(cat "$scratch/container")" > /dev/null 2>&1 || true
    rm "$scratch/container"
  fi
  if [ $status -eq 0 ]; then
    echo "    it starts as user 65532"
  else
    failed+=("$target")
    echo "    failed; the end of its log:"
    tail -n 15 "$scratch/$target.log" | sed 's/^/    /'
  fi
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "make images-check: these images do not build or start: ${failed[*]}" >&2
  exit 1
fi
