"""An unmodified vLLM in the stories: its Engine, its service, and adapters of random weights.

It is vLLM's wheel for CPUs, as `python -m bench.peers.environments` installs it: a start takes minutes, so the stories
share one service.
"""

import base64
import copy
import json
from typing import Any, Final

import numpy as np
from safetensors.numpy import save

from bench.peers import environments
from e2e.slipway import USER_NAMESPACE, Json
from slipway_api import names
from slipway_api.crd import engine_manifest

PEER: Final = "vLLM CPU"
ENGINE: Final = "vllm-cpu"
NAME: Final = "foreign"
START_SECONDS: Final = 900  # beside other tests on two cores
SEATS: Final = 4  # requests that a replica computes at once
ADAPTERS: Final = ("red", "green")
ADAPTERS_DIRECTORY: Final = "/adapters"
_RANK: Final = 4
_HIDDEN: Final = 256  # of the embedded model, as the next two
_LAYERS: Final = 4
_QUERY: Final = 256


def engine() -> Json:
    """The chart's Engine vllm, for the wheel: the same flags, and environment variables that the wheel needs."""
    manifest: Json = copy.deepcopy(engine_manifest("vllm"))
    manifest["metadata"]["name"] = ENGINE
    variables = {
        **environments.environment(PEER),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",  # the tags of the parser hermes are not bound by a schema
    }
    manifest["spec"] |= {
        "image": "localhost/vllm-cpu:0.32.0",
        "env": [*manifest["spec"]["env"], *({"name": name, "text": text} for name, text in variables.items())],
        "resources": {},
    }
    return manifest


def service(**spec: Any) -> Json:
    """One replica that takes adapters; each keyword replaces a top-level field of its spec."""
    mounts = [{"name": name, "mountPath": f"{ADAPTERS_DIRECTORY}/{name}"} for name in ADAPTERS]
    volumes = [{"name": name, "configMap": {"name": f"adapter-{name}"}} for name in ADAPTERS]
    return {
        "apiVersion": names.API_VERSION,
        "kind": "InferenceService",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "oci://registry.local/models/tiny:1#tiny"},
            "replicas": 1,
            "runtime": {
                "engine": ENGINE,
                "dtype": "fp32",
                "maxModelLen": 512,
                "maxNumSeqs": SEATS,
                "kvCache": {"bytes": "256Mi"},
                "lora": {"maxAdapters": 1, "maxCPUAdapters": 2, "maxRank": 8},
                "args": [
                    *("--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
                    # A small model would fill its answer with the spaces that a schema allows.
                    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
                ],
                "startupTimeoutSeconds": START_SECONDS,
            },
            "resources": {
                "gpu": {"count": 0},
                "requests": {"cpu": "100m", "memory": "1Gi"},
                "limits": {"cpu": "2", "memory": "6Gi"},
            },
            "template": {"spec": {"volumes": volumes, "containers": [{"name": "server", "volumeMounts": mounts}]}},
            "drain": {"timeoutSeconds": 60, "endpointPropagationSeconds": 2},
        }
        | spec,
    }


def adapter_files(seed: int) -> dict[str, bytes]:
    """A LoRA adapter of the embedded model in PEFT's format, with random weights that change its answers."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(_LAYERS):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = random.normal(0, 0.5, (_RANK, _HIDDEN)).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = random.normal(0, 0.5, (_QUERY, _RANK)).astype(np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 4 * _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "tiny",
    }
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}


def config_map(name: str, seed: int) -> Json:
    """The files of a random adapter, for the volume that the service mounts."""
    data = {file: base64.b64encode(content).decode() for file, content in adapter_files(seed).items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"adapter-{name}"}, "binaryData": data}


def adapter(name: str, **placement: Any) -> Json:
    """A LoRAAdapter of the service; `placement` is its spec.placement."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "LoRAAdapter",
        "metadata": {"name": name, "namespace": USER_NAMESPACE},
        "spec": {
            "baseRef": {"name": NAME},
            "source": {"uri": f"file://{ADAPTERS_DIRECTORY}/{name}"},
            "unload": {"drainSeconds": 5},
            "placement": placement,
        },
    }
