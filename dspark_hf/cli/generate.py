"""`dspark-hf generate` and `race`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..pairs import DEFAULT_DRAFTER, DEFAULT_TARGET
from .app import DeviceOption, DrafterOption, DtypeOption, TargetOption, app, at_least, err, out


@app.command(epilog="Example: dspark-hf generate --prompt 'Write a haiku about rain.' --temperature 0.7")
def generate(
    prompt: Annotated[str, typer.Option(help="What to ask; the target's chat template is put around it.")],
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = DEFAULT_DRAFTER,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens of this probability mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it comes.")] = True,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print text and statistics as JSON.")] = False,
) -> None:
    """Answer one prompt with target and drafter."""
    from ..evaluation.completion import DecodingOptions, complete
    from ..pairs import load_drafter, load_target

    if not prompt.strip():
        raise ValueError("The prompt is empty. Give some text with --prompt.")
    at_least(max_new_tokens, 1, "--max-new-tokens")
    at_least(temperature, 0, "--temperature")
    loaded = load_target(target, device, dtype)
    options = DecodingOptions(max_new_tokens, temperature, top_p, seed)
    draft_model = load_drafter(drafter, loaded.model)
    result = complete(loaded, prompt, options, draft_model, stream=stream and not json_output)
    if json_output:
        out.print_json(data=result.to_dict())
        return
    if not stream:
        out.print(result.text, markup=False, highlight=False)
    err.print(
        f"{len(result.token_ids)} tokens, {result.tokens_per_second:.1f} tok/s, τ {result.accept_length:.2f}",
        highlight=False,
    )


@app.command(epilog="Example: dspark-hf race --prompt 'Explain why the sky is blue.'")
def race(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = (
        "Write a Python function that returns all prime numbers up to n with the sieve of Eratosthenes."
    ),
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = DEFAULT_DRAFTER,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 160,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Plain decoding against DSpark in the terminal: the same prompt, greedy, one after the other."""
    from ..evaluation.completion import DecodingOptions, complete
    from ..pairs import load_drafter, load_target

    at_least(max_new_tokens, 1, "--max-new-tokens")
    with err.status("Loading target and drafter"):
        loaded = load_target(target, device, dtype)
        draft_model = load_drafter(drafter, loaded.model)
        for assistant in (None, draft_model):  # warm-up
            complete(loaded, prompt, DecodingOptions(max_new_tokens=4), assistant)
    options = DecodingOptions(max_new_tokens=max_new_tokens)
    results = []
    for title, assistant in (("plain decoding", None), ("DSpark", draft_model)):
        out.rule(title)
        results.append(complete(loaded, prompt, options, assistant, stream=True))
        out.print(f"[bold]{results[-1].tokens_per_second:.1f} tok/s[/bold]", highlight=False)
    plain, fast = results
    out.rule("result")
    same = "the same tokens" if plain.token_ids == fast.token_ids else "DIFFERENT tokens (a tie? see dspark-hf bench)"
    out.print(
        f"[bold]{fast.tokens_per_second / plain.tokens_per_second:.2f}×[/bold] the speed, {same}, "
        f"τ {fast.accept_length:.2f} tokens a round",
        highlight=False,
    )
