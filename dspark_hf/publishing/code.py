"""The code that travels with a drafter, so that it loads where this package is not installed.

Owns: which files, and the `auto_map` that names them. Does not own: saving a model (`modeling_dspark` writes both as well).
"""

from __future__ import annotations

from pathlib import Path

from ..model import modeling_dspark
from ..model.configuration_dspark import DSparkConfig
from ..model.modeling_dspark import DSparkDraftModel

AUTO_MAP = {
    cls._auto_class: f"{cls.__module__.split('.')[-1]}.{cls.__name__}" for cls in (DSparkConfig, DSparkDraftModel)
}


def code_files() -> dict[str, Path]:
    """The installed package's model files by name; they import nothing else of it."""
    return {file.name: file for file in sorted(Path(modeling_dspark.__file__).parent.glob("*_dspark.py"))}
