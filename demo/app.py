"""The speed race in a browser: `python demo/app.py`, or `make demo`. Controls, layout, sessions and the command line."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import: the page calls nobody

import gradio as gr
import render
from figures import charts, rates_picture, rounds_picture
from race import RaceTrack
from race_state import DSPARK, PLAIN, Limits, RaceOptions, RaceState

from dspark_hf.decoding.profiling import step_rates_of
from dspark_hf.evaluation.prompt_sets import first_of_each_domain, load_conversations
from dspark_hf.loading.pairs import AUTO, DEFAULT_TARGET, DTYPES, choose_drafter, load_drafter, load_target

_HERE = Path(__file__).parent
_EXAMPLES_A_DOMAIN = 3
_WAITING_VISITORS = 16
_FAIR_PLAY = (
    "The two sides run **one after the other on the same device, in random order**, so that neither slows the other. Plain "
    "decoding is `generate()` as transformers has it; DSpark is the same call with `assistant_model=drafter`. On a CPU a part "
    "of the gain comes from faster layers for short forwards: `dspark-hf bench` tells the parts apart. Seconds include "
    "reading the prompt."
)
_POLICIES = [
    ("Scheduled: drafts and verifies what pays on this machine", "scheduled"),
    ("Confidence threshold: stops before an unsure position", "threshold"),
    ("Fixed length: the same number of drafts every round", "fixed"),
]
# Screen readers hear the status line; the answers would be too much of it.
_ANNOUNCE = "() => { for (const id of ['status', 'verdict']) document.getElementById(id)?.setAttribute('aria-live', 'polite'); }"


class Page:
    """What the page's events do, for one track and any number of visitors."""

    def __init__(self, track: RaceTrack) -> None:
        self.track = track
        self._stops: dict[str, threading.Event] = {}  # by session
        self._rates: dict[str, str] = {}  # the step-rate picture of each drafter

    def prepare(self, request: gr.Request):
        """A new race of this session: its stop button works from now on, in the queue too."""
        self._stops[request.session_hash] = threading.Event()
        return gr.Button(interactive=False), gr.Button(interactive=True), render.status(RaceState(order=())), "", ""

    def run(self, request: gr.Request, *values) -> Iterator[tuple]:
        """Updates of (status, plain pane, DSpark pane, verdict, charts, start button, stop button)."""
        stop = self._stops.setdefault(request.session_hash, threading.Event())
        buttons = gr.Button(interactive=True), gr.Button(interactive=False)
        try:
            shown: tuple[str, ...] = ()
            for state in self.track.run(_options(*values), stop):
                shown = *self._panes(state), render.verdict(state.verdict)
                yield *shown, gr.skip(), gr.skip(), gr.skip()
            yield *shown, self._charts(state, values[1]), *buttons
        except (ValueError, OSError) as error:
            yield render.message(str(error)), gr.skip(), gr.skip(), "", "", *buttons
        finally:
            stop.set()

    def stop(self, request: gr.Request) -> None:
        """Ends this session's race within a round."""
        if (event := self._stops.get(request.session_hash)) is not None:
            event.set()

    def leave(self, request: gr.Request) -> None:
        """The visitor is gone, and so is what ran for them."""
        if (event := self._stops.pop(request.session_hash, None)) is not None:
            event.set()

    @staticmethod
    def _panes(state: RaceState) -> tuple[str, str, str]:
        return render.status(state), render.pane(state, PLAIN), render.pane(state, DSPARK)

    def _charts(self, state: RaceState, drafter: str) -> str:
        if state.error is not None or drafter not in self.track.drafters:
            return ""
        if drafter not in self._rates:
            rates = step_rates_of(self.track.target.model, self.track.drafters[drafter])
            self._rates[drafter] = rates_picture(rates)
        stats = state.dspark.stats
        return charts(rounds_picture(stats) if stats is not None and stats.history else "", self._rates[drafter])


def _options(prompt, drafter, length, temperature, top_p, seed, policy, threshold, draft_length) -> RaceOptions:
    """From the controls, in their order; an emptied number is refused."""
    numbers = {"length": length, "temperature": temperature, "top-p": top_p, "seed": seed}
    for name, number in numbers.items():
        if number is None:
            raise ValueError(f"The {name} is empty. Give a number.")
    return RaceOptions(
        prompt or "", drafter, int(length), temperature, top_p, int(seed), policy, threshold, int(draft_length)
    )


def build(track: RaceTrack) -> gr.Blocks:
    """The page."""
    page, limits = Page(track), track.limits
    examples = first_of_each_domain(load_conversations(None), _EXAMPLES_A_DOMAIN)
    longest = max(d.config.num_draft_tokens for d in track.drafters.values())
    names = list(track.drafters)
    with gr.Blocks(title="DSpark speed race", analytics_enabled=False) as blocks:
        gr.Markdown(f"# DSpark speed race\nTarget: **{track.target.name}**. The same prompt, twice.")
        prompt = gr.Textbox(label="Prompt", lines=3, max_lines=8, value=_prompt(examples, "code"), elem_id="prompt")
        with gr.Accordion("Example prompts", open=False):
            for domain in dict.fromkeys(e.domain for e in examples):
                chosen = [[_text(e)] for e in examples if e.domain == domain]
                gr.Examples(chosen, prompt, label=domain, api_visibility="private")
        with gr.Row():
            start = gr.Button("Start the race", variant="primary", elem_id="start")
            stop = gr.Button("Stop", interactive=False, elem_id="stop")
        with gr.Accordion("Settings", open=False):
            with gr.Row():
                length = gr.Slider(8, limits.new_tokens, 160, step=1, label="Length, most new tokens", elem_id="length")
                temperature = gr.Slider(
                    0, limits.temperature, 0, step=0.05, label="Temperature (0: greedy)", elem_id="temperature"
                )
                top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top-p")
                seed = gr.Number(0, precision=0, label="Seed", minimum=0)
            with gr.Row():
                policy = gr.Radio(
                    _POLICIES, value="scheduled", label="Policy: how much is drafted and verified", elem_id="policy"
                )
                threshold = gr.Slider(0, 1, 0.5, step=0.05, label="Confidence threshold", visible=False)
                draft_length = gr.Slider(1, longest, min(4, longest), step=1, label="Drafts a round", visible=False)
            drafter = gr.Dropdown(names, value=names[0], label="Drafter", visible=True)
        status = gr.HTML(render.status(None), elem_id="status")
        with gr.Row(elem_id="panes"):
            plain = gr.HTML(render.pane(None, PLAIN), elem_id="plain", min_width=320)
            dspark = gr.HTML(render.pane(None, DSPARK), elem_id="dspark", min_width=320)
        verdict = gr.HTML(elem_id="verdict")
        gr.HTML(render.legend(), elem_id="legend")
        figures = gr.HTML(elem_id="charts")
        gr.Markdown(_FAIR_PLAY)

        controls = [prompt, drafter, length, temperature, top_p, seed, policy, threshold, draft_length]
        outputs = [status, plain, dspark, verdict, figures, start, stop]
        aside = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}
        race = {"concurrency_limit": 1, "concurrency_id": "race", "api_visibility": "private"}
        race |= {"show_progress": "minimal", "show_progress_on": status}
        for begin in (start.click, prompt.submit):
            begin(page.prepare, None, [start, stop, status, verdict, figures], **aside).then(
                page.run, controls, outputs, **race
            )
        stop.click(page.stop, None, None, **aside)
        policy.change(
            lambda name: (gr.Slider(visible=name == "threshold"), gr.Slider(visible=name == "fixed")),
            policy, [threshold, draft_length], **aside,
        )  # fmt: skip
        blocks.load(None, js=_ANNOUNCE)
        blocks.unload(page.leave)
    return blocks.queue(max_size=_WAITING_VISITORS, default_concurrency_limit=1, api_open=False)


def _text(conversation) -> str:
    return conversation.messages[-1]["content"]


def _prompt(examples, domain: str) -> str:
    return next((_text(e) for e in examples if e.domain == domain), _text(examples[0]))


def launch(blocks: gr.Blocks, port: int | None = None, share: bool = False, **more):
    """Serve the page on 127.0.0.1; `share` makes a public link besides."""
    system = ["system-ui", "sans-serif"]
    theme = gr.themes.Default(primary_hue="blue", font=system, font_mono=["ui-monospace", "monospace"])
    return blocks.launch(
        server_name="127.0.0.1", server_port=port, share=share, theme=theme, css_paths=_HERE / "page.css", ssr_mode=False,
        footer_links=["gradio"], run_history=False, mcp_server=False, enable_monitoring=False, **more,
    )  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    limits = Limits()
    parser = argparse.ArgumentParser(description="Plain decoding against DSpark in a browser, on this machine.")
    parser.add_argument("--target", default=DEFAULT_TARGET, help="folder or Hub id")
    parser.add_argument(
        "--drafter", action="append", help="folder, Hub id or auto; more than one to choose from on the page"
    )
    parser.add_argument("--port", type=int, help="the first free one from 7860 by default")
    parser.add_argument("--share", action="store_true", help="make a public link through gradio.live; off by default")
    parser.add_argument("--device", help="cpu, cuda, ...")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--max-prompt-tokens", type=int, default=limits.prompt_tokens)
    parser.add_argument("--max-new-tokens", type=int, default=limits.new_tokens)
    chosen = parser.parse_args(arguments)
    for name, most in (("port", 65535), ("max_prompt_tokens", None), ("max_new_tokens", None)):
        value = getattr(chosen, name)
        if value is not None and not 1 <= value <= (most or value):
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1{f' and at most {most}' if most else ''}, got {value}"
            )
    return chosen


def load_track(arguments: argparse.Namespace) -> RaceTrack:
    """The models that the flags name, loaded and warmed up."""
    names = dict.fromkeys(choose_drafter(name, arguments.target) for name in arguments.drafter or [AUTO])
    target = load_target(arguments.target, arguments.device, arguments.dtype)
    drafters = {name: load_drafter(name, target.model) for name in names}
    track = RaceTrack(target, drafters, Limits(arguments.max_prompt_tokens, arguments.max_new_tokens))
    track.warm_up()
    return track


def main() -> None:
    arguments = parse()
    try:
        print("Loading target and drafter, and measuring this machine if that was not done yet.", flush=True)
        track = load_track(arguments)
        launch(build(track), arguments.port, arguments.share)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
