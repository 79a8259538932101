#!/usr/bin/env bash
# Builds the wheel, unpacks it somewhere else and imports every module from there.
# Usage: tools/check_wheel.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -z -- pyproject.toml setup.py README.md LICENSE glm_compile ops fx_passes | xargs -0 cp --parents -t "$work"
(cd "$work" && "$python" -m build --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1) || { tail -30 "$work/build.log"; exit 1; }
"$python" -m pip install --quiet --no-deps --target "$work/site" "$work"/dist/*.whl
# -S -I would hide the environment's torch; instead the wheel comes first on the path and must win.
cd "$work/dist" && PYTHONPATH="$work/site" "$python" - "$work/site" <<'PY'
import importlib, pkgutil, sys
import importlib.metadata as metadata

site = sys.argv[1]
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", str(f)).lower()]
import glm_compile

assert glm_compile.__file__.startswith(site), glm_compile.__file__
names = [m.name for m in pkgutil.walk_packages(glm_compile.__path__, "glm_compile.")]
skipped = [n for n in names if n.rpartition(".")[2].startswith(("triton_", "cute_", "__main__"))]
for name in sorted(set(names) - set(skipped)):
    module = importlib.import_module(name)
    assert module.__file__.startswith(site), (name, module.__file__)
for package in ("glm_compile.ops", "glm_compile.fx_passes"):
    assert any(n.startswith(package + ".") for n in names), (package, names)
entry = [e for e in metadata.entry_points(group="torch_dynamo_backends") if e.name == "glm"]
assert entry, "entry point glm is missing"
print(f"wheel: {len(names) - len(skipped)} modules import from {site}")
PY
