"""Faster generation with Hugging Face language models, token for token the same.

`import dspark_hf` registers the drafter's Auto classes and lets `model.generate(assistant_model=drafter)` understand it.
"""

from transformers import AutoConfig, AutoModel

from .decoding import hook
from .decoding.candidates import scheduled
from .decoding.profiling import step_rates_of
from .decoding.stats import GenerationStats
from .engine.engine import BatchEngine
from .engine.generate import generate_batch
from .engine.sequence import RequestOutput
from .loading.pairs import load_known_drafter
from .model.configuration_dspark import DSparkConfig
from .model.modeling_dspark import DSparkDraftModel, DSparkDraftOutput
from .model.sampler_dspark import DraftBlock
from .scheduling.acceptance_estimate import Expectation
from .scheduling.lookahead import LookaheadScheduler
from .scheduling.policy import ConfidenceThreshold, FixedLength, GuardedLength, LaggedScheduler, ThroughputScheduler
from .scheduling.step_costs import StepRates

__version__ = "0.1.0"

AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
DSparkDraftModel._load_for_target = staticmethod(load_known_drafter)
hook.install()

__all__ = [
    "BatchEngine",
    "ConfidenceThreshold",
    "DSparkConfig",
    "DSparkDraftModel",
    "DSparkDraftOutput",
    "DraftBlock",
    "Expectation",
    "FixedLength",
    "GuardedLength",
    "GenerationStats",
    "LaggedScheduler",
    "LookaheadScheduler",
    "RequestOutput",
    "StepRates",
    "ThroughputScheduler",
    "generate_batch",
    "scheduled",
    "step_rates_of",
]
