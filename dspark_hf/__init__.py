"""Faster generation with Hugging Face language models, token for token the same.

`import dspark_hf` registers the drafter's Auto classes and lets `model.generate(assistant_model=drafter)` understand it.
The public names are loaded as they are first asked for.
"""

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "decoding.default_policy": ("scheduled",),
    "decoding.options": ("DraftingOptions",),
    "decoding.profiling": ("step_rates_of",),
    "decoding.statistics": ("GenerationStats",),
    "engine.engine": ("BatchEngine", "generate_batch"),
    "engine.request": ("RequestOutput",),
    "model.configuration_dspark": ("DSparkConfig",),
    "model.modeling_dspark": ("DSparkDraftModel", "DSparkDraftOutput"),
    "model.sampler_dspark": ("DraftBlock",),
    "scheduling.acceptance_estimate": ("Expectation",),
    "scheduling.policy": (
        "ConfidenceThreshold",
        "FixedLength",
        "GuardedLength",
        "LaggedScheduler",
        "ThroughputScheduler",
    ),
    "scheduling.lookahead": ("LookaheadScheduler",),
    "scheduling.step_costs": ("StepRates",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def register() -> None:
    """Make transformers know the drafter: its Auto classes, and `generate()` (`decoding.hook`). Again changes nothing."""
    from transformers import AutoConfig, AutoModel

    from .decoding import hook
    from .decoding.options import DraftingOptions
    from .loading.pairs import load_known_drafter
    from .model.configuration_dspark import DSparkConfig
    from .model.modeling_dspark import DSparkDraftModel

    AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
    AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
    DSparkDraftModel._load_for_target = staticmethod(load_known_drafter)
    DSparkDraftModel._default_options = DraftingOptions
    hook.install()


if "dspark_hf_cli" not in sys.modules:  # the command registers when its work begins, so that --help needs no torch
    register()
