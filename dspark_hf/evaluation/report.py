"""Tables of measured figures. Owns: their layout. Does not own: measuring (`speed`)."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text


def bench_table(summary: dict[str, Any]) -> Group:
    """The bench's figures by domain, and the prompts whose output differed."""
    table = Table(title="tokens per second, and speed as a multiple of plain decoding (median of prompts)")
    for column in (
        "domain",
        "plain",
        "DSpark",
        "×",
        "lookup",
        "×",
        "τ",
        "draft",
        "verify",
        "other",
        "ceiling",
        "identical",
    ):
        table.add_column(column, justify="left" if column == "domain" else "right")
    names = list(summary["domains"])
    for name, figures in summary["domains"].items():
        dspark, lookup = figures["dspark"], figures["prompt_lookup"]
        share, identical = dspark["time_share"], dspark["identical_share"]
        table.add_row(
            name,
            f"{figures['plain']['tokens_per_second']:.1f}",
            f"{dspark['tokens_per_second']:.1f}",
            f"{dspark['speedup']:.2f}",
            f"{lookup['tokens_per_second']:.1f}",
            f"{lookup['speedup']:.2f}",
            f"{dspark['accept_length']:.2f}",
            f"{share['draft']:.0%}",
            f"{share['verify']:.0%}",
            f"{share['other']:.0%}",
            f"{dspark['ceiling']:.2f} ({dspark['share_of_ceiling']:.0%})",
            "-" if identical is None else f"{identical:.0%}",
            end_section=len(names) > 1 and name == names[-2],
        )
    lines = [
        Text(
            f"macro speed-up of DSpark over plain decoding: {summary['domains']['all']['dspark']['macro_speedup']:.2f}×"
        )
    ]
    for i, prompt in enumerate(summary["prompts"]):
        if prompt["verdict"] == "different":
            lines.append(
                Text(
                    f"prompt {i + 1} ({prompt['domain']}): first difference at token {prompt['first_difference']}, where the "
                    f"target's two best scores are {prompt['margin_there']:.2g} apart"
                )
            )
    return Group(table, *lines)
