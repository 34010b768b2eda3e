"""What happens when the package is built: the compiled kernels are made beside their sources.

Without a compiler the package is built all the same, and computes with torch alone.
"""

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_COMPILE = "runtime/slipway_runtime/kernels/native/compile.py"


class CompiledKernels(BuildHookInterface):  # type: ignore[type-arg]
    """The hook that pyproject.toml names."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before files are collected."""
        spec = importlib.util.spec_from_file_location("compile_kernels", Path(self.root) / _COMPILE)
        assert spec is not None
        assert spec.loader is not None
        compile_kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compile_kernels)
        try:
            built = compile_kernels.build()
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"the compiled kernels were not built, torch computes alone: {error}")
            return
        if built and version != "editable":  # any Python 3, but this kind of machine
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
