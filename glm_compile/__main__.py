"""`python -m glm_compile`: the same as the console script `glm-compile`."""

from __future__ import annotations

from glm_compile.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
