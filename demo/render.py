"""The race as HTML: panes, gauges, legend, verdict. Pure functions of a state.

`page.css` gives the classes their look. Every kind of token differs in colour and in shape: accepted drafts by a tint and an
underline of their own for each position, corrections by a frame, bonus tokens by a filled pill.
"""

from __future__ import annotations

import html

from race_state import ACCEPTED, BONUS, CORRECTION, DSPARK, OWN, PLAIN, RaceState, ShownToken, Side, Verdict

POSITIONS = 7  # positions with a look of their own; those behind share the last one
_TITLES = {PLAIN: "Plain decoding", DSPARK: "DSpark"}
_TIE = 1e-3  # scores closer than this are equal but for rounding
# Gradio reads these in an HTML component as a template's own.
_TEMPLATE_SIGNS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def escape(text: str) -> str:
    """Text for inside an element or an attribute of the page."""
    return html.escape(text).translate(_TEMPLATE_SIGNS)


def token_class(token: ShownToken) -> str:
    """The look of a token; the target's own ones have none."""
    if token.kind == ACCEPTED:
        return f"t p{token.position if token.position <= POSITIONS else 'x'}"
    return {CORRECTION: "t fix", BONUS: "t bonus", OWN: ""}[token.kind]


def _token(token: ShownToken) -> str:
    look = token_class(token)
    if not look or not token.text:
        return escape(token.text)
    # A line's end has no width to be coloured: it gets a sign (`page.css`) that is not copied with the text.
    look += " nl" if "\n" in token.text and not token.text.strip() else ""
    # A frame or a pill is drawn around the word, not around the space before it.
    word = token.text.lstrip(" ") if token.kind in (CORRECTION, BONUS) else token.text
    word = word or token.text
    space = token.text[: len(token.text) - len(word)]
    return f'{space}<span class="{look}">{escape(word)}</span>'


def _round(number: int, tokens: list[ShownToken]) -> str:
    kinds = [t.kind for t in tokens]
    title = f"round {number}: {len(tokens)} committed, {kinds.count(ACCEPTED)} drafts accepted"
    return f'<span class="round" title="{title}">' + "".join(map(_token, tokens)) + "</span>"


def text(side: Side) -> str:
    """The answer so far; DSpark's in rounds of coloured tokens."""
    if side.name == PLAIN:
        return escape("".join(t.text for tokens in side.rounds for t in tokens))
    first = [_token(t) for tokens in side.rounds[:1] for t in tokens]
    return "".join(first + [_round(i, tokens) for i, tokens in enumerate(side.rounds[1:], start=1)])


def gauge(side: Side, most: float) -> str:
    """Tokens per second as a number and a bar; `most` is the bar's end, the same in both panes."""
    share = min(100.0, 100 * side.rate / most) if most else 0.0
    return (
        f'<div class="gauge {side.name}" role="meter" aria-label="{_TITLES[side.name]}, tokens per second" '
        f'aria-valuemin="0" aria-valuemax="{most:.0f}" aria-valuenow="{side.rate:.1f}">'
        f'<div class="bar" style="width:{share:.1f}%"></div><span><b>{side.rate:.1f}</b> tokens/s</span></div>'
    )


def pane(state: RaceState | None, name: str) -> str:
    """One side: what it is, its gauge, figures and text."""
    state = state or RaceState(order=())
    side = state.side(name)
    most = max(10.0, 1.15 * state.plain.rate, 1.15 * state.dspark.rate)
    figures = [f"{side.seconds:.1f} s", f"{side.tokens} tokens"]
    if name == DSPARK:
        last = len(side.rounds[-1]) if len(side.rounds) > 1 else 0
        figures += [f"τ {side.accept_length:.2f} tokens a round"] + ([f"last round {last}"] if side.running else [])
    status = "running" if side.running else "finished" if side.finished else "waiting"
    if status == "waiting" and name in state.order:
        status = "runs first" if state.order[0] == name else "runs second"
    return (
        f'<section class="pane" aria-label="{_TITLES[name]}"><h2>{_TITLES[name]} <small>{status}</small></h2>'
        f'{gauge(side, most)}<p class="figures">{" · ".join(figures)}</p>'
        f'<div class="answer">{text(side)}</div></section>'
    )


def status(state: RaceState | None) -> str:
    """One line above the panes: what happens, and the speed-up so far."""
    if state is None:
        return _line("Choose a prompt and start the race.")
    if state.error is not None:
        return message(state.error)
    order = " first, then ".join("plain decoding" if name == PLAIN else "DSpark" for name in state.order)
    words = {
        "waiting": "Waiting for its turn…",
        "running": f"Running: {order}.",
        "comparing": "Comparing the answers…",
        "stopped": "Stopped.",
        "done": f"Done. It ran {order}.",
    }[state.phase]
    speedup = f' <b class="speedup">{state.speedup:.2f}× the speed</b>' if state.speedup is not None else ""
    return _line(escape(words) + speedup)


def message(error: str) -> str:
    """An error, in the status's place."""
    return f'<div class="status error" role="alert"><b>That did not work.</b> {escape(error)}</div>'


def _line(content: str) -> str:
    return f'<div class="status" role="status">{content}</div>'


def verdict(result: Verdict | None) -> str:
    """Whether both sides said the same, in words."""
    if result is None:
        return ""
    so_far = " as far as both went" if result.stopped else ""
    if result.identical is None:
        look, head = "sampled", "Sampled"
        body = (
            "Above temperature 0 the two texts may differ: each is a draw of its own, from the same distribution. "
            "DSpark's acceptance rule leaves the target's distribution as it is. Set the temperature to 0 to compare tokens."
        )
    elif result.identical:
        look, head, body = "same", "Identical", f"All {result.compared} tokens are the same{so_far}."
    else:
        look, head = "differs", f"First difference at token {result.first_difference + 1}"
        tokens = f"plain {escape(repr(result.plain_token))}, DSpark {escape(repr(result.dspark_token))}"
        tie = (
            "a tie, decided by the order of floating-point sums."
            if result.margin < _TIE
            else "more than rounding explains in float32; in bfloat16 or float16 a near tie can look like this."
        )
        body = f"{tokens}. There the target's two best scores are {result.margin:.2g} apart: {tie}"
    return f'<div class="verdict {look}"><b>{escape(head)}.</b> {body}</div>'


def legend() -> str:
    """What the looks of tokens mean."""
    samples = [(ShownToken(str(k), ACCEPTED, k), f"position {k}") for k in range(1, POSITIONS + 1)]
    accepted = "".join(
        f'<li>{_token(token)} <span class="sr">accepted draft, {words}</span></li>' for token, words in samples
    )
    others = [
        (ShownToken("correction", CORRECTION), "the target's token where it rejected a draft"),
        (ShownToken("bonus", BONUS), "the target's token after a draft that was accepted whole"),
    ]
    rest = "".join(f"<li>{_token(token)} {words}</li>" for token, words in others)
    return (
        f'<ul class="legend" aria-label="Legend"><li>accepted drafts by position:</li>{accepted}{rest}'
        "<li>no mark: the target's own token, nothing was drafted</li>"
        '<li><span class="round">a fine line</span> begins each round</li></ul>'
    )
