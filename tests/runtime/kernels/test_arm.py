"""The compiled kernels for ARM: cross-compiled, and executed by an emulator.

Debian has both: the packages g++-aarch64-linux-gnu and qemu-user.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from slipway_runtime.kernels.native import fitting
from slipway_runtime.kernels.native.compile import build

CHECK = Path(__file__).parent / "native_check.cpp"
CROSS, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"


def check_program(compiler: str, library: Path, *, multiplies_bytes: bool) -> Path:
    """Compile the check against a library."""
    program = library.with_suffix(".check")
    flags = ["-std=c++17", "-O1", "-fopenmp", *(["-DBYTES"] if multiplies_bytes else [])]
    command = [compiler, *flags, str(CHECK), str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The libraries for ARM, by name."""
    for needed in (CROSS, EMULATOR):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed")
    folder = tmp_path_factory.mktemp("arm")
    return {path.stem: path for path in build(folder, machine="aarch64", compiler=CROSS)}


@pytest.mark.parametrize("name", ["neon_dotprod", "neon"])
def test_the_kernels_for_arm_compute_what_they_should(name: str, libraries: dict[str, Path]) -> None:
    program = check_program(CROSS, libraries[name], multiplies_bytes=name == "neon_dotprod")
    done = subprocess.run([EMULATOR, "-L", ROOT, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_itself_passes_on_this_machine_and_fails_on_wrong_numbers(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None or not fitting():
        pytest.skip("there is no compiler, or no library for this processor")
    here = Path(__file__).parents[3] / "runtime/slipway_runtime/kernels/native"
    name = fitting()[-1]
    if not (here / f"{name}.so").exists():
        pytest.skip("there was no compiler when the package was built")
    shutil.copy(here / f"{name}.so", tmp_path)
    program = check_program(compiler, tmp_path / f"{name}.so", multiplies_bytes=False)
    assert subprocess.run([str(program)], capture_output=True, check=False).returncode == 0
    wrong = CHECK.read_text().replace("0.7978845608028654", "0.7")
    (tmp_path / "wrong.cpp").write_text(wrong)
    subprocess.run(
        [compiler, "-std=c++17", "-fopenmp", str(tmp_path / "wrong.cpp"), str(tmp_path / f"{name}.so"),
         f"-Wl,-rpath,{tmp_path}", "-o", str(tmp_path / "wrong")],
        check=True,
    )  # fmt: skip
    done = subprocess.run([str(tmp_path / "wrong")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "geglu" in done.stdout
