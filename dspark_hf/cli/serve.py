"""`dspark-hf serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..pairs import DEFAULT_DRAFTER, DEFAULT_TARGET
from .app import DeviceOption, DrafterOption, DtypeOption, TargetOption, app, at_least, err, need_modules


@app.command(epilog="Example: dspark-hf serve --port 8000, then point any OpenAI client at http://127.0.0.1:8000/v1")
def serve(
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = DEFAULT_DRAFTER,
    host: Annotated[
        str, typer.Option(help="Address to listen at; others can reach 0.0.0.0, so give a key with it.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="DSPARK_API_KEY", help="Key that every route but /health asks for.")
    ] = None,
    max_sequences: Annotated[int, typer.Option(help="Most requests decoded at once; others wait.")] = 8,
    max_requests: Annotated[int, typer.Option(help="Most requests in flight; more get 503.")] = 64,
    max_answer_tokens: Annotated[int, typer.Option(help="Longest answer that may be asked for.")] = 4096,
    max_body_bytes: Annotated[int, typer.Option(help="Largest body of a request.")] = 1 << 20,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Serve target and drafter on this machine with OpenAI's API: chat, completions, streams; many requests at once."""
    for value, option in (
        (port, "--port"),
        (max_sequences, "--max-sequences"),
        (max_requests, "--max-requests"),
        (max_answer_tokens, "--max-answer-tokens"),
        (max_body_bytes, "--max-body-bytes"),
    ):
        at_least(value, 1, option)
    need_modules("fastapi", "uvicorn", "prometheus_client", extra="serve")
    import uvicorn

    from ..engine.engine import BatchEngine
    from ..pairs import load_drafter, load_target
    from ..serving.api import ServerLimits, make_app

    loaded = load_target(target, device, dtype)
    draft_model = load_drafter(drafter, loaded.model)
    engine = BatchEngine(loaded.model, draft_model, max_sequences=max_sequences, keep_finished=max_sequences)
    if host not in ("127.0.0.1", "localhost", "::1") and api_key is None:
        err.print(f"[yellow]Anyone who reaches {host} can use this server: give --api-key.[/yellow]", highlight=False)
    limits = ServerLimits(max_body_bytes, max_answer_tokens, max_requests)
    err.print(f"{loaded.name} at http://{host}:{port}/v1 (Ctrl-C stops it)", highlight=False)
    uvicorn.run(
        make_app(loaded, engine, api_key, limits),
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=30,
    )
