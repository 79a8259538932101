"""Graph rewrites of glm_compile: one file a rewrite, see `base` for what all of them share."""

from __future__ import annotations

if __name__ != "glm_compile.fx_passes":
    raise ImportError(
        "import glm_compile.fx_passes instead of 'fx_passes': the folder installs below glm_compile "
        "(pip install -e .)"
    )
