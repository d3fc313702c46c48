"""`dspark-hf serve`."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from ..loading import AUTO, DEFAULT_TARGET
from .app import DeviceOption, DrafterOption, DtypeOption, TargetOption, app, at_least, err, need_modules


@app.command(epilog="Example: dspark-hf serve --port 8000, then point any OpenAI client at http://127.0.0.1:8000/v1")
def serve(
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = AUTO,
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
    if port > 65535:
        raise ValueError(f"--port must be at most 65535, got {port}.")
    need_modules("fastapi", "uvicorn", "prometheus_client", extra="serve")
    import uvicorn

    from ..engine.engine import BatchEngine
    from ..loading.pairs import load_pair
    from ..serving.api import ServerLimits, make_app

    try:  # before anything is loaded
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(
            f"Can't listen at {host}, port {port} ({error.strerror}): choose another --host or --port."
        ) from None
    pair = load_pair(target, drafter, device, dtype)
    loaded, draft_model = pair.target, pair.drafter
    engine = BatchEngine(loaded.model, draft_model, max_sequences=max_sequences, keep_finished=max_sequences)
    if host not in ("127.0.0.1", "localhost", "::1") and api_key is None:
        err.print(f"Anyone who reaches {host} can use this server: give --api-key.", style="yellow", highlight=False)
    limits = ServerLimits(max_body_bytes, max_answer_tokens, max_requests)
    place = f"[{host}]" if ":" in host else host
    err.print(f"{loaded.name} at http://{place}:{port}/v1 (Ctrl-C stops it)", highlight=False, soft_wrap=True)
    served = make_app(loaded, engine, api_key, limits)
    config = uvicorn.Config(served, log_level="warning", timeout_graceful_shutdown=30)
    uvicorn.Server(config).run(sockets=[listener])
