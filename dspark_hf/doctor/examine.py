"""A pair looked at from all sides: what files, configs and modules show, then the probe, then speed."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence

import torch
import transformers
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import DynamicCache
from transformers.utils import cached_file

from ..decoding import hook
from ..decoding.checks import Mistake, likely_mistakes
from ..decoding.compat import CACHE_ARGUMENT, cache_of
from ..decoding.profiling import step_rates_of
from ..decoding.target import check_layer_ids
from ..loading.pairs import Target, drafter_folder, load_drafter
from ..model.modeling_dspark import DSparkDraftModel
from ..model.packagings_dspark import packaging_of
from ..training.corpus import Answer
from .findings import FAILED, OK, PROBED, SPEED, WARNING, Check, Report, probed, skipped, speed_check
from .probe import BLOCK_FORMS, probe, probe_texts

_CACHE_TOKENS = 1000  # what cache sizes are said for


def examine(target: Target, drafter_name: str, speed: bool = True, texts: Sequence[Answer] | None = None) -> Report:
    """Check a drafter against its target; `texts` to probe on are the target's own answers to our prompts where absent.

    Raises:
        OSError: no drafter of that name.
    """
    made = [_versions(target)]
    source = drafter_folder(drafter_name)
    try:
        drafter = load_drafter(drafter_name, dtype=target.model.dtype).to(target.model.device)
    except ValueError as error:
        advice = "It can't be loaded: use another drafter, or mend its files."
        return Report(target.name, drafter_name, [*made, Check("packaging", FAILED, str(error), advice)])
    made += [_packaging(source, drafter), *_pair(source, target, drafter)]
    if any(check.status == FAILED for check in made):
        made += skipped((*PROBED, SPEED), "not looked at: the pair can't be used as it is")
    elif drafter.config.layer_form not in BLOCK_FORMS:
        made += skipped((*PROBED, SPEED), "only for block drafters")
    else:
        made += _drafting(target, drafter, speed, texts)
    return Report(target.name, drafter_name, made)


def _drafting(target: Target, drafter: DSparkDraftModel, speed: bool, texts: Sequence[Answer] | None) -> list[Check]:
    try:
        result = probe(target.model, drafter, probe_texts(target) if texts is None else texts)
    except (ValueError, RuntimeError) as error:  # whatever a target of its own kind raises
        failed = Check("acceptance", FAILED, f"The probe could not be made: {error}")
        return [failed, *skipped((*PROBED[1:], SPEED), "no probe")]
    made = probed(result)
    if not speed:
        return made + skipped([SPEED], "not asked for (--no-speed)")
    try:
        rates = step_rates_of(target.model, drafter)
    except (ValueError, RuntimeError) as error:
        return made + skipped([SPEED], f"could not be measured: {error}")
    return [*made, speed_check(rates, result.configured.prefix_lengths())]


def _versions(target: Target) -> Check:
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
        advice = "Install transformers >=5.17,<6: generate() can't draft with this one."
        return Check("versions", FAILED, found, advice, details)
    return Check("versions", OK, found, details=details)


def _packaging(source: str, drafter: DSparkDraftModel) -> Check:
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


def _pair(source: str, target: Target, drafter: DSparkDraftModel) -> list[Check]:
    """Vocabulary, width and tapped layers, which are refused in use, then the rest; binds the drafter to the target."""
    mistakes = likely_mistakes(target.model, drafter)
    before = _own_weights(drafter)
    config, layers = drafter.config, target.model.config.get_text_config().num_hidden_layers
    made = [
        _refusable(
            "vocabulary and width",
            lambda: drafter.bind_target(target.model),
            f"{config.vocab_size} tokens ({config.draft_vocab_size} of them drafted), hidden size {config.hidden_size}",
            [],
        ),
        _refusable(
            "tapped layers",
            lambda: check_layer_ids(target.model, config.target_layer_ids),
            f"{list(config.target_layer_ids)} of {layers} layers",
            [mistake for mistake in mistakes if mistake.subject == "depth"],
        ),
        _tokenizer(source, target, drafter, mistakes),
        _likely("rope in the config", "nothing odd", [m for m in mistakes if m.subject == "rope"]),
    ]
    if any(check.status == FAILED for check in made):
        return made
    return [*made, _shared_weights(before, _own_weights(drafter)), *_memory(target, drafter)]


def _refusable(name: str, check: Callable[[], None], found: str, mistakes: list[Mistake]) -> Check:
    try:
        check()
    except ValueError as error:
        return Check(name, FAILED, str(error), "generate() refuses this pair: use the target it was trained for.")
    return _likely(name, found, mistakes)


def _likely(name: str, found: str, mistakes: list[Mistake]) -> Check:
    """A warning where mistakes are likely, else `found`."""
    if not mistakes:
        return Check(name, OK, found)
    return Check(name, WARNING, " ".join(m.found for m in mistakes), " ".join(m.advice for m in mistakes))


def _tokenizer(source: str, target: Target, drafter: DSparkDraftModel, mistakes: list[Mistake]) -> Check:
    """Special tokens, names, and the drafter's own tokenizer where its folder has one."""
    text = target.model.config.get_text_config()
    found = [mistake for mistake in mistakes if mistake.subject in ("tokens", "name")]
    count = len(target.tokenizer)
    if count > text.vocab_size:
        sentence = f"The tokenizer has {count} tokens, the model {text.vocab_size}."
        found.append(Mistake("tokens", sentence, "Use the model's own."))
    for kind in ("pad", "bos"):
        name = f"{kind}_token_id"
        places = (target.model.generation_config.to_dict(), text.to_dict(), {name: getattr(target.tokenizer, name)})
        known = {place[name] for place in places if isinstance(place.get(name), int)}
        ours = drafter.config.to_dict()[name]
        if ours is not None and known and ours not in known:
            sentence = f"The drafter's {kind} token is {ours}, the target's {', '.join(map(str, sorted(known)))}."
            found.append(Mistake("tokens", sentence, f"Check {name} in the drafter's config.json."))
    own = _text_of(source, "tokenizer.json")
    if own is not None:
        vocabulary, theirs = Tokenizer.from_str(own).get_vocab(with_added_tokens=True), target.tokenizer.get_vocab()
        if different := sum(theirs.get(token) != i for token, i in vocabulary.items()):
            sentence = (
                f"{different} of {len(vocabulary)} tokens in the drafter's tokenizer.json are others in the target's."
            )
            found.append(Mistake("tokens", sentence, "Use a drafter that was trained with the target's tokenizer."))
    compared = "special tokens agree" if own is None else "special tokens and the drafter's own tokenizer agree"
    mask = drafter.config.mask_token_id
    masked = "" if drafter.config.is_autoregressive else f", mask token {mask} ({target.tokenizer.decode([mask])!r})"
    return _likely("tokenizer", f"{count} tokens, {compared}{masked}", found)


def _own_weights(drafter: DSparkDraftModel) -> dict[str, int]:
    """Bytes of the embedding and LM head that a drafter has of its own."""
    parts = {"embedding": drafter.embed_tokens, "LM head": drafter.lm_head}
    return {name: part.weight.nbytes for name, part in parts.items() if part is not None}


def _shared_weights(before: dict[str, int], after: dict[str, int]) -> Check:
    """Copies of the target's embedding and LM head: `before` and `after` the drafter was bound to it."""
    dropped = {name: size for name, size in before.items() if name not in after}
    details = {"dropped": dropped, "kept": after}
    if after:
        kept = _size(sum(after.values()))
        found = f"The drafter's own {' and '.join(after)} differ from the target's and are kept ({kept})."
        advice = "Right for a drafter that trained them; else this is another target than its own."
        return Check("shared weights", WARNING, found, advice, details)
    found = "embedding and LM head are the target's"
    if dropped:
        saved = _size(sum(dropped.values()))
        found += f"; the checkpoint's copies ({' and '.join(dropped)}) equal them and are dropped: {saved} saved"
    return Check("shared weights", OK, found, details=details)


def _memory(target: Target, drafter: DSparkDraftModel) -> list[Check]:
    """Weights and caches of both; and whether the target's cache can be rolled back, which verifying needs."""
    model, config = target.model, drafter.config
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    ids = torch.ones(1, 8, dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = cache_of(model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}))
    kind = type(cache).__name__
    if cache.is_croppable:
        rollback = Check("cache", OK, f"the target's {kind} can be rolled back")
    else:
        found = f"The target's {kind} can't be rolled back, so drafts can't be verified."
        rollback = Check("cache", FAILED, found, "Decode this target without a drafter.")
    tensors = [vars(layer).get(name) for layer in cache.layers for name in ("keys", "values")]
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
    return [rollback, Check("memory", OK, found, details=details)]


def _text_of(source: str, name: str) -> str | None:
    """A file of a checkpoint that lies here or in the Hub's cache."""
    try:
        path = cached_file(source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return file.read()


def _size(number: float) -> str:
    return tqdm.format_sizeof(number, "B")
