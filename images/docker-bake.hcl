# docker buildx bake -f images/docker-bake.hcl            operator, gateway, agent and the runtime for GPUs
# docker buildx bake -f images/docker-bake.hcl kind       the same, with the small runtime for CPUs

variable "REGISTRY" {
  default = "slipway" # the chart's values name slipway/operator, slipway/gateway, slipway/agent and slipway/runtime
}

variable "TAG" {
  default = "0.1.0" # the chart's appVersion
}

variable "BASE" {
  default = "docker.io/library/debian:12.12-slim"
}

group "default" {
  targets = ["operator", "gateway", "agent", "runtime"]
}

group "kind" {
  targets = ["operator", "gateway", "agent", "runtime-cpu"]
}

group "all" {
  targets = ["operator", "gateway", "agent", "runtime", "runtime-cpu"]
}

target "common" {
  context    = "."
  dockerfile = "images/Dockerfile"
  args = {
    BASE = BASE
  }
  labels = {
    "org.opencontainers.image.version"  = TAG
    "org.opencontainers.image.licenses" = "Apache-2.0"
  }
}

target "operator" {
  inherits = ["common"]
  target   = "operator"
  tags     = ["${REGISTRY}/operator:${TAG}"]
}

target "gateway" {
  inherits = ["common"]
  target   = "gateway"
  tags     = ["${REGISTRY}/gateway:${TAG}"]
}

target "agent" {
  inherits = ["common"]
  target   = "agent"
  tags     = ["${REGISTRY}/agent:${TAG}"]
}

# It runs on CPUs too; it is only larger.
target "runtime" {
  inherits  = ["common"]
  target    = "runtime"
  platforms = ["linux/amd64"]
  tags      = ["${REGISTRY}/runtime:${TAG}"]
}

target "runtime-cpu" {
  inherits = ["common"]
  target   = "runtime-cpu"
  args = {
    TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
  }
  tags = ["${REGISTRY}/runtime:${TAG}-cpu"]
}
