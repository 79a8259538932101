"""Package layout: `ops/` and `fx_passes/` stand at the top and install below `glm_compile`."""

from setuptools import find_packages, setup

FOLDERS = {
    "glm_compile": "glm_compile",
    "glm_compile.ops": "ops",
    "glm_compile.fx_passes": "fx_passes",
}

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in [package, *(f"{package}.{sub}" for sub in find_packages(folder))]
    ],
)
