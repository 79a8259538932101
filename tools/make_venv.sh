#!/usr/bin/env bash
# Makes .venv and installs the project into it, once per change of the requirements.
# Usage: tools/make_venv.sh EXTRA   (EXTRA: "" for the demo, "test" for the tests)
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-}

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "glm_compile needs Python 3.11 or newer; found $(python3 --version 2>&1). Set PYTHON=/path/to/python3." >&2
  exit 1
}

stamp=.venv/.installed-${extra:-demo}
want=$(cat pyproject.toml setup.py constraints-cpu.txt "$0" | sha256sum | cut -c1-16)
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi

if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "== GPU found: a CUDA build of torch is used (an installed torch 2.11 to 2.14 that sees the GPU is kept; otherwise about 3 GB to download, 6 GB on disk)"
  constraints=()
  # Where the torch to keep is. Not --system-site-packages: when this Python is itself one of a
  # virtual environment, that would show the packages of the Python below it.
  kept=$("$(find_python)" -c '
import importlib.util as u, site
if u.find_spec("torch"):
    import torch
    minor = tuple(map(int, torch.__version__.split(".")[:2]))
    if (2, 11) <= minor < (2, 15) and torch.cuda.is_available():
        print(*site.getsitepackages(), sep="\n")' 2>/dev/null || true)
else
  echo "== no GPU found: torch $(sed -n 's/^torch==//p' constraints-cpu.txt) for the CPU is used"
  echo "   to download: about 0.4 GB (2.2 GB on disk) where pip is offered a CPU build, else about 3 GB (6.2 GB on disk)"
  constraints=(-c constraints-cpu.txt)
  kept=
fi
[ "$extra" = test ] && echo "   and about 0.2 GB (0.5 GB on disk) of test tools, CuTe DSL among them"

python=$(find_python)
if ! [ -x .venv/bin/python ]; then
  echo "== making .venv with $("$python" --version)"
  "$python" -m venv .venv
  if [ -n "$kept" ]; then
    echo "== keeping $("$python" -c 'import torch; print(f"torch {torch.__version__} of {torch.__path__[0]}")')"
    # After the packages of .venv itself, so that what pip adds there comes first.
    echo "$kept" >"$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/kept-packages.pth"
  fi
fi
.venv/bin/python -m pip install --upgrade --disable-pip-version-check pip
.venv/bin/python -m pip install --progress-bar on "${constraints[@]}" -e ".${extra:+[$extra]}"
echo "$want" >"$stamp"
