"""What makes `generate()` understand a DSpark drafter: two wrapped methods of `GenerationMixin`, nothing more.

For any assistant that is not a DSpark drafter the originals run untouched.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from ..model.modeling_dspark import DSparkDraftModel

_DECODE_ARGUMENTS = {
    "input_ids",
    "logits_processor",
    "stopping_criteria",
    "generation_config",
    "assistant_model",
    "streamer",
}
_MARK = "_dspark_wrapped"
logger = logging.get_logger(__name__)


def _unsupported() -> ValueError:
    return ValueError(
        f"This release of dspark-hf works with transformers >=5.17,<6, and {transformers.__version__} decodes in another "
        "way. Install a supported release, or call generate() without a DSpark drafter."
    )


def drafter_of(assistant: Any) -> DSparkDraftModel | None:
    """The drafter that `assistant` is, without `torch.compile`'s wrapper (our rounds run uncompiled); `None` for any other."""
    model = getattr(assistant, "_orig_mod", assistant)
    return model if isinstance(model, DSparkDraftModel) else None


def check_pair(target, drafter: DSparkDraftModel) -> None:
    """Refuse a target that the drafter can't serve; warn once of what is likely a mistake.

    Raises:
        ValueError: encoder-decoder target, a smaller vocabulary or other hidden size, an offloaded embedding or LM head, a
            tapped layer the target lacks, a recurrent state that can't be rolled back, layers whose result for a row depends on
            other rows.
    """
    from ..linear.row_check import check_rows
    from .checks import likely_mistakes
    from .rollback import check_rollback
    from .target import check_layer_ids

    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model; DSpark drafters serve decoder-only models."
        )
    drafter.bind_target(target)
    check_layer_ids(target, drafter.config.target_layer_ids)
    check_rollback(target)
    check_rows(target, target.dtype)
    for mistake in likely_mistakes(target, drafter):
        logger.warning_once(f"{mistake.found} {mistake.advice} `dspark-hf doctor` tells more.")


def is_installed() -> bool:
    """Whether `generate()` understands drafters with the transformers that is installed."""
    return getattr(getattr(GenerationMixin, "_assisted_decoding", None), _MARK, False)


def install() -> None:
    """Wrap `GenerationMixin` once; calling it again changes nothing."""
    decode: Any = getattr(GenerationMixin, "_assisted_decoding", None)
    validate: Any = getattr(GenerationMixin, "_validate_generation_mode", None)
    if is_installed():
        return
    usable = decode is not None and validate is not None and hasattr(GenerationMixin, "_prefill")
    usable = usable and set(inspect.signature(decode).parameters) >= _DECODE_ARGUMENTS
    if not usable:
        _install_refusal()
        return

    @functools.wraps(decode)
    def assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        drafter = drafter_of(kwargs.get("assistant_model"))
        if drafter is None:
            return decode(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        if input_ids.shape[0] > 1:
            raise ValueError(
                f"A DSpark drafter serves one sequence per generate() call, got a batch of {input_ids.shape[0]}. "
                "Call generate() for each prompt."
            )
        from .generation import speculative_decoding  # not before it is needed: `import dspark_hf` is to be light

        for name in ("synced_gpus", "assistant_model", "inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(name, None)
        return speculative_decoding(
            self, input_ids, logits_processor, stopping_criteria, generation_config, drafter, **kwargs
        )

    @functools.wraps(validate)
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = drafter_of(generation_mode_kwargs.get("assistant_model"))
        if drafter is not None:
            if generation_mode != GenerationMode.ASSISTED_GENERATION or generation_config.num_beams > 1:
                raise ValueError("A DSpark drafter works with greedy decoding and sampling, not with beams.")
            if not generation_config.use_cache:
                raise ValueError("A DSpark drafter needs the target's cache; leave use_cache at True.")
            if generation_mode_kwargs.get("assistant_tokenizer") is not None:
                raise ValueError("A DSpark drafter has its target's tokenizer; leave out assistant_tokenizer.")
            check_pair(self, drafter)
            # Of an assistant it would ask for as many tokens as the target has.
            generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
            # Refused for every assistant before 5.25; ours restores the state, as `check_pair` has found.
            if getattr(self, "_is_stateful", False):
                generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        return validate(self, generation_mode, generation_config, generation_mode_kwargs)

    setattr(assisted_decoding, _MARK, True)
    GenerationMixin._assisted_decoding = assisted_decoding
    GenerationMixin._validate_generation_mode = validate_generation_mode


def _install_refusal() -> None:
    """On an unknown transformers: import works, `generate()` with our drafter says what is wrong."""
    original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        if drafter_of(kwargs.get("assistant_model")) is not None:
            raise _unsupported()
        return original(self, *args, **kwargs)

    GenerationMixin.generate = generate
