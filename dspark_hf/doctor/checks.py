"""The checks that need no drafting: versions, packaging, fit, tokens, shared weights, memory.

Owns: what is looked at in files, configs and modules, and its words. Does not own: the probe's words (`findings`), what is
refused at use (`decoding.hook`), what is likely wrong (`decoding.likely_mistakes`).
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers import DynamicCache
from transformers.utils import cached_file

from ..decoding import hook
from ..decoding.checks import Mistake
from ..decoding.compat import CACHE_ARGUMENT, cache_of
from ..decoding.target import check_layer_ids
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from ..model.packagings_dspark import packaging_of
from .report import FAILED, OK, SKIPPED, WARNING, Check

_CACHE_TOKENS = 1000  # what cache sizes are told for


def versions(target: Target) -> Check:
    """Of everything that decides how a pair behaves."""
    import dspark_hf

    details = {
        "dspark_hf": dspark_hf.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(target.model.device),
        "dtype": str(target.model.dtype).removeprefix("torch."),
    }
    found = ", ".join(f"{name} {value}" for name, value in details.items())
    if not hook.is_installed():
        return Check(
            "versions", FAILED, found, "Install transformers >=5.17,<6: generate() can't draft with this one.", details
        )
    return Check("versions", OK, found, details=details)


def packaging(source: str, drafter: DSparkDraftModel) -> Check:
    """Which packaging the drafter is of, and what was read from it."""
    config = drafter.config
    name = packaging_of(json.loads(_text_of(source, "config.json") or "{}"))
    layout = "anchor-first" if config.sample_from_anchor else "fill-in"
    details = {
        "packaging": name,
        "layout": layout,
        "block_size": config.block_size,
        "draft_tokens": config.num_draft_tokens,
        "target_layer_ids": list(config.target_layer_ids),
        "layer_form": config.layer_form,
        "rope_theta": config.rope_parameters["rope_theta"],
        "heads": config.markov_head_type,
    }
    found = (
        f"{name or 'unknown'}: {config.num_hidden_layers} {config.layer_form} layers, {layout}, up to "
        f"{config.num_draft_tokens} tokens a round, Markov head {config.markov_head_type}"
    )
    return Check("packaging", OK, found, details=details)


def fit(target: Target, drafter: DSparkDraftModel, mistakes: list[Mistake]) -> list[Check]:
    """Vocabulary, width and tapped layers, which are refused; binds the drafter to the target where they are right."""
    config, text = drafter.config, target.model.config.get_text_config()
    return [
        _refusable(
            "vocabulary and width",
            lambda: drafter.bind_target(target.model),
            f"{config.vocab_size} tokens ({config.draft_vocab_size} of them drafted), hidden size {config.hidden_size}",
            [],
        ),
        _refusable(
            "tapped layers",
            lambda: check_layer_ids(target.model, config.target_layer_ids),
            f"{list(config.target_layer_ids)} of {text.num_hidden_layers} layers",
            [mistake for mistake in mistakes if mistake.subject == "depth"],
        ),
    ]


def _refusable(name: str, check: Callable[[], None], found: str, mistakes: list[Mistake]) -> Check:
    try:
        check()
    except ValueError as error:
        return Check(name, FAILED, str(error), "generate() refuses this pair: use the target it was trained for.")
    return likely(name, found, mistakes)


def likely(name: str, found: str, mistakes: list[Mistake]) -> Check:
    """A warning where mistakes are likely, else `found`."""
    if not mistakes:
        return Check(name, OK, found)
    return Check(name, WARNING, " ".join(m.found for m in mistakes), " ".join(m.advice for m in mistakes))


def tokenizer(source: str, target: Target, drafter: DSparkDraftModel, mistakes: list[Mistake]) -> Check:
    """Special tokens, names, and the drafter's own tokenizer where its folder has one."""
    found = [mistake for mistake in mistakes if mistake.subject in ("tokens", "name")]
    size, count = target.model.config.get_text_config().vocab_size, len(target.tokenizer)
    if count > size:
        found.append(Mistake("tokens", f"The tokenizer has {count} tokens, the model {size}.", "Use the model's own."))
    for kind in ("pad", "bos"):
        ours, known = drafter.config.to_dict()[f"{kind}_token_id"], _special_ids(target, f"{kind}_token_id")
        if ours is not None and known and ours not in known:
            sentence = f"The drafter's {kind} token is {ours}, the target's {', '.join(map(str, sorted(known)))}."
            found.append(Mistake("tokens", sentence, f"Check {kind}_token_id in the drafter's config.json."))
    own = _text_of(source, "tokenizer.json")
    if own is not None:
        vocabulary, theirs = Tokenizer.from_str(own).get_vocab(with_added_tokens=True), target.tokenizer.get_vocab()
        different = sum(theirs.get(token) != i for token, i in vocabulary.items())
        if different:
            sentence = (
                f"{different} of {len(vocabulary)} tokens in the drafter's tokenizer.json are others in the target's."
            )
            found.append(Mistake("tokens", sentence, "Use a drafter that was trained with the target's tokenizer."))
    compared = "special tokens agree" if own is None else "special tokens and the drafter's own tokenizer agree"
    told = f"{count} tokens, {compared}"
    if not drafter.config.is_autoregressive:
        mask = drafter.config.mask_token_id
        told += f", mask token {mask} ({target.tokenizer.decode([mask])!r})"
    return likely("tokenizer", told, found)


def _special_ids(target: Target, name: str) -> set[int]:
    places = (target.model.generation_config.to_dict(), target.model.config.get_text_config().to_dict())
    values = [*(place.get(name) for place in places), getattr(target.tokenizer, name)]
    return {value for value in values if isinstance(value, int)}


def own_weights(drafter: DSparkDraftModel) -> dict[str, int]:
    """Bytes of the embedding and LM head that a drafter has of its own."""
    parts = {"embedding": drafter.embed_tokens, "LM head": drafter.lm_head}
    return {name: part.weight.nbytes for name, part in parts.items() if part is not None}


def shared_weights(before: dict[str, int], after: dict[str, int]) -> Check:
    """Copies of the target's embedding and LM head: `before` and `after` the drafter was bound to it."""
    dropped = {name: size for name, size in before.items() if name not in after}
    details = {"dropped": dropped, "kept": after}
    if after:
        return Check(
            "shared weights",
            WARNING,
            f"The drafter's own {' and '.join(after)} differ from the target's and are kept ({_size(sum(after.values()))}).",
            "Right for a drafter that trained them; else this is another target than its own.",
            details,
        )
    found = "embedding and LM head are the target's"
    if dropped:
        copies = " and ".join(dropped)
        found += (
            f"; the checkpoint's copies ({copies}) equal them and are dropped: {_size(sum(dropped.values()))} saved"
        )
    return Check("shared weights", OK, found, details=details)


def memory(target: Target, drafter: DSparkDraftModel) -> list[Check]:
    """Weights and caches of both; and whether the target's cache can be rewound, which verifying needs."""
    model = target.model
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    ids = torch.ones(1, 8, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        cache = cache_of(model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}))
    tensors = [vars(layer).get(name) for layer in cache.layers for name in ("keys", "values")]
    config = drafter.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * drafter.dtype.itemsize
    details = {
        "target_bytes": model.get_memory_footprint(),
        "drafter_bytes": drafter.get_memory_footprint() + sum(h.weight.nbytes for h in drafter.bound_heads()),
        "target_cache_bytes": sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor)) * _CACHE_TOKENS // 8,
        "drafter_cache_bytes": per_token * _CACHE_TOKENS,
        "cache_tokens": _CACHE_TOKENS,
    }
    sizes = {name: _size(value) for name, value in details.items()}
    found = (
        f"target {sizes['target_bytes']} and {sizes['target_cache_bytes']} of cache per {_CACHE_TOKENS:,} tokens, drafter "
        f"{sizes['drafter_bytes']} and {sizes['drafter_cache_bytes']}"
    )
    rewinding = Check("cache", OK, f"the target's {type(cache).__name__} can be rewound")
    if not cache.is_croppable:
        rewinding = Check(
            "cache",
            FAILED,
            f"The target's {type(cache).__name__} can't be rewound, so drafts can't be verified.",
            "Decode this target without a drafter.",
        )
    return [rewinding, Check("memory", OK, found, details=details)]


def skipped(names: tuple[str, ...], why: str) -> list[Check]:
    """Checks that can't be made, or were not asked for."""
    return [Check(name, SKIPPED, why) for name in names]


def _text_of(source: str, name: str) -> str | None:
    """A file of a checkpoint that lies here or in the Hub's cache."""
    options: dict[str, Any] = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    try:
        path = cached_file(source, name, **options)
    except OSError:
        return None
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return file.read()


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"
