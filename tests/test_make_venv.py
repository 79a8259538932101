"""`tools/make_venv.sh` on a machine with a GPU: an installed CUDA torch is kept, not downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the script is for Linux")

_SCRIPT = Path(__file__).parents[1] / "tools" / "make_venv.sh"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that needs torch alone, with the script; pip is offered nothing to download."""
    root = tmp_path / "project"
    (root / "tools").mkdir(parents=True)
    shutil.copy(_SCRIPT, root / "tools" / "make_venv.sh")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "needs-torch"\nversion = "0"\ndependencies = ["torch>=2.11,<2.15"]\n'
        "[tool.setuptools]\npy-modules = []\n"
    )
    (root / "setup.py").write_text("from setuptools import setup\nsetup()\n")
    (root / "constraints-cpu.txt").write_text("torch==2.13.0\n")
    return root


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment with a GPU and, in a virtual environment, a CUDA torch."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    smi = bin_folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: a GPU'\n")
    smi.chmod(0o755)
    parent = tmp_path / "parent"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", parent], check=True)
    packages = next((parent / "lib").glob("python*")) / "site-packages"
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(
        "__version__ = '2.12.0+cu130'\n"
        "class cuda:\n"
        "    @staticmethod\n"
        "    def is_available():\n"
        "        return True\n"
    )
    info = packages / "torch-2.12.0+cu130.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0+cu130\n")
    # What building the project takes, which pip would otherwise download.
    import setuptools

    installed = Path(setuptools.__file__).parents[1]
    for pattern in ("setuptools*", "_distutils_hack", "pkg_resources", "wheel*", "packaging*"):
        for found in installed.glob(pattern):
            os.symlink(found, packages / found.name)
    return {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHON": str(parent / "bin" / "python"),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
    }


def test_torch_of_a_virtual_environment_is_kept(project: Path, machine: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "tools/make_venv.sh"], cwd=project, env=machine, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keeping torch 2.12.0+cu130" in done.stdout
    seen = subprocess.run(
        [".venv/bin/python", "-c", "import torch; print(torch.__version__)"],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert seen.stdout.strip() == "2.12.0+cu130", seen.stderr
