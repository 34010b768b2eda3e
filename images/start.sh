#!/usr/bin/env bash
# Starts one image with docker as a pod would, and fails if it does not start: images/start.sh TARGET IMAGE
#
# Operator, gateway and agent import everything before they print their help. A runtime serves the embedded model.
set -euo pipefail

target=$1 image=$2
as_a_pod=(--read-only --user 65532:65532 --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges)
if [ "${target%-cpu}" != runtime ]; then
  docker run --rm "${as_a_pod[@]}" "$image" --help > /dev/null
  exit
fi

folders=(--tmpfs /run/slipway:uid=65532 --tmpfs /var/cache/slipway:uid=65532)
container=$(docker run --detach "${as_a_pod[@]}" "${folders[@]}" "$image" \
  serve file:///opt/slipway/models/tiny --device cpu --kv-cache-bytes 4Mi)
trap 'docker rm --force "$container" > /dev/null' EXIT
ready="import urllib.request; urllib.request.urlopen('http://127.0.0.1:8001/ready', timeout=2)"
for _ in $(seq 120); do
  if docker exec "$container" python3 -c "$ready" 2> /dev/null; then
    exit 0
  fi
  if [ "$(docker inspect --format '{{.State.Running}}' "$container")" != true ]; then
    break
  fi
  sleep 1
done
docker logs "$container" >&2
exit 1
