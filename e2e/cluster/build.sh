#!/usr/bin/env bash
# Build the controlplane binary and lay out what the Python side needs beside it.
#
# Everything goes under $SLIPWAY_CACHE (default: the user's cache folder):
#   build/<hash of the inputs>/controlplane, cri.proto, deviceplugin.proto
# Go's own caches go there too, unless GOCACHE and GOMODCACHE say otherwise.
# Prints the build folder; does nothing when that build is already there.
set -euo pipefail
cd "$(dirname "$0")"
cache=${SLIPWAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/slipway}
export GOCACHE=${GOCACHE:-$cache/go-build} GOMODCACHE=${GOMODCACHE:-$cache/go-mod}
export CGO_ENABLED=0 GOFLAGS=-mod=readonly

inputs=$(cat go.mod go.sum ./*.go build.sh | sha256sum | cut -c1-12)
out=$cache/build/$inputs
if [ ! -e "$out/controlplane" ]; then
  version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
  IFS=. read -r major minor _ <<<"${version#v}"
  ldflags="-s -w"
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    # Without these the version reads v0.0.0-master+$Format:%H$.
    ldflags+=" -X $package.gitVersion=$version -X $package.gitMajor=$major -X $package.gitMinor=$minor"
    ldflags+=" -X $package.gitTreeState=clean"
  done
  mkdir -p "$out"
  go build -trimpath -buildvcs=false -ldflags "$ldflags" -o "$out/controlplane.new" . >&2
  module() { go list -m -f '{{.Dir}}' "$1"; }
  install -m 644 "$(module k8s.io/cri-api)/pkg/apis/runtime/v1/api.proto" "$out/cri.proto"
  install -m 644 "$(module k8s.io/kubelet)/pkg/apis/deviceplugin/v1beta1/api.proto" "$out/deviceplugin.proto"
  mv "$out/controlplane.new" "$out/controlplane"
fi
echo "$out"
