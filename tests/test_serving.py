"""The local server, through the official client: chats, completions, streams, errors, keys, limits, disconnects."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
import uvicorn
from conftest import make_drafter, make_target, make_tokenizer

from dspark_hf import BatchEngine, FixedLength
from dspark_hf.loading.chat_template import encode_messages
from dspark_hf.loading.pairs import Target
from dspark_hf.serving.api import ServerLimits, make_app
from dspark_hf.serving.text import TextStream

KEY = "secret"
NAME = "tests/tiny"


class Running:
    """A server in a thread, on a free port."""

    def __init__(self, app) -> None:
        self.app = app
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5))
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> Running:
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *error) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    @property
    def worker(self):
        return self.app.state.server.worker

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 10
        while self.worker.num_requests or self.worker.engine.num_unfinished:
            assert time.monotonic() < deadline, "requests are still there"
            time.sleep(0.01)


def connected(server: Running, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def raw(server: Running) -> httpx.Client:
    return httpx.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    )


def make_server(**limits) -> Running:
    torch.set_num_threads(1)
    target = make_target(dtype=torch.float32, max_position_embeddings=2048)
    target.generation_config.eos_token_id = None
    engine = BatchEngine(target, make_drafter(target), max_sequences=4, policy=FixedLength(2), keep_finished=2)
    served = Target(NAME, target, make_tokenizer())
    return Running(
        make_app(served, engine, KEY, ServerLimits(**{"body_bytes": 50_000, "answer_tokens": 1500} | limits))
    )


@pytest.fixture(scope="module")
def server():
    with make_server() as running:
        yield running


@pytest.fixture
def client(server):
    return connected(server)


def ask(client, text: str = "w5 w6", **settings):
    arguments = {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    return client.chat.completions.create(**arguments | settings)


def test_a_chat_answers_as_the_target_does(server, client):
    server.wait_until_idle()
    served = server.app.state.server.target
    ids = torch.tensor([encode_messages(served.tokenizer, [{"role": "user", "content": "w5 w6"}])])
    output = served.model.generate(ids, max_new_tokens=12, do_sample=False)
    answer = ask(client)
    assert answer.choices[0].message.content == served.tokenizer.decode(
        output[0, ids.shape[1] :], skip_special_tokens=True
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    record = answer.model_extra["dspark"]
    assert record["accept_length"] >= 1.0
    assert record["verified"] >= record["accepted"]


def test_a_stream_says_the_same(client):
    whole = ask(client).choices[0].message.content
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-2].choices[0].finish_reason == "length"
    assert "accept_length" in chunks[-2].model_extra["dspark"]


def test_a_completion_of_text_and_of_token_ids(client):
    text = client.completions.create(model=NAME, prompt="w5 w6", max_tokens=5, temperature=0)
    ids = client.completions.create(model="tiny", prompt=[5, 6], max_tokens=5, temperature=0)
    assert text.choices[0].text == ids.choices[0].text
    streamed = client.completions.create(model=NAME, prompt="w5 w6", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text


def test_a_seed_repeats_and_penalties_change(client):
    sampled = [ask(client, temperature=1, seed=7).choices[0].message.content for _ in range(2)]
    assert sampled[0] == sampled[1]
    dull = ask(client, max_tokens=40).choices[0].message.content.split()
    lively = ask(client, max_tokens=40, frequency_penalty=2, presence_penalty=2).choices[0].message.content.split()
    assert len(set(lively)) > len(set(dull))


def test_stop_strings_are_left_out(client):
    stop = ask(client).choices[0].message.content.split()[5]
    answer = ask(client, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    assert stop not in answer.choices[0].message.content
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, stop=[stop], stream=True))
    assert streamed == answer.choices[0].message.content


def test_logprobs(client):
    answer = ask(client, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 12
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)  # greedy
        assert entry.token == entry.top_logprobs[0].token
    legacy = client.completions.create(model=NAME, prompt="w5", max_tokens=4, temperature=0, logprobs=2)
    assert len(legacy.choices[0].logprobs.token_logprobs) == 4
    assert all(len(t) == 2 for t in legacy.choices[0].logprobs.top_logprobs)


def test_eight_at_once(client):
    texts = [f"w{5 + i} w{6 + i}" for i in range(8)]
    alone = [ask(client, t).choices[0].message.content for t in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda t: ask(client, t).choices[0].message.content, texts))
    assert together == alone


def test_the_next_turn_reads_only_what_is_new(server, client):
    server.wait_until_idle()
    first = "w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18 w19"
    answer = ask(client, first).choices[0].message.content
    stats = server.worker.engine.stats
    before = stats.prompt_tokens
    turns = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "w20"},
    ]
    again = client.chat.completions.create(model=NAME, messages=turns, max_tokens=8, temperature=0)
    read = stats.prompt_tokens - before
    assert read < again.usage.prompt_tokens - 16
    for _ in range(4):
        ask(client, "w21 w22 w21 w23 w21")  # other texts take the kept places
    anew = client.chat.completions.create(model=NAME, messages=turns, max_tokens=8, temperature=0)
    assert anew.choices[0].message.content == again.choices[0].message.content


@pytest.mark.parametrize(
    ("settings", "status", "what"),
    [
        ({"model": "other"}, 404, "other"),
        ({"temperature": 3}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 2}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 5000}, 400, "5000"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "w5"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": "w5 " * 3000}]}, 400, "context"),
        ({"stop": ["a"] * 5}, 400, "stop"),
        ({"frequency_penalty": 9}, 400, "frequency_penalty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "content",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_api_s_shape(settings, status, what, stream, client):
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, stream=stream, **settings)
    assert caught.value.status_code == status
    assert what in caught.value.body["message"]
    assert caught.value.body["type"] in ("invalid_request_error", "not_found_error")
    assert ask(client, max_tokens=2).usage.completion_tokens == 2


def test_broken_json_unknown_routes_and_methods(server):
    with raw(server) as http:
        assert http.post("/v1/chat/completions", content=b"{not json").status_code == 400
        assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        assert http.get("/v1/chat/completions").status_code == 405
        assert http.post("/v1/chat/completions", content=b"[1]").json()["error"]["type"] == "invalid_request_error"


def test_the_key_guards_all_but_health(server):
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").json() == {"status": "ok"}
        for path in ("/v1/models", "/metrics", "/v1/chat/completions"):
            response = http.get(path)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
    with pytest.raises(openai.AuthenticationError):
        ask(connected(server, "wrong"))


def test_a_large_body_is_refused_with_and_without_a_length(server, client):
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, "w5 " * 40_000)
    assert caught.value.status_code == 413

    def pieces():
        for _ in range(60):
            yield b"x" * 1000

    response = httpx.post(f"{server.url}/v1/completions", content=pieces(), headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 413
    assert ask(client, max_tokens=2).usage.completion_tokens == 2


def test_models_and_metrics(server, client):
    assert [model.id for model in client.models.list()] == [NAME]
    ask(client, max_tokens=3)
    server.wait_until_idle()
    page = raw(server).get("/metrics").text
    values = dict(line.split() for line in page.splitlines() if not line.startswith("#"))
    assert float(values["dspark_new_tokens_total"]) >= 3
    assert float(values['dspark_requests_total{reason="length"}']) >= 1
    assert float(values["dspark_requests_in_flight"]) == 0


def test_nulls_are_defaults(server):
    body = {
        "model": NAME,
        "prompt": "w5",
        "max_tokens": 2,
        "stop": None,
        "temperature": None,
        "logprobs": None,
        "seed": None,
    }
    with raw(server) as http:
        choice = http.post("/v1/completions", json=body | {"stream": None, "n": None}).json()["choices"][0]
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(stream, server, client):
    server.wait_until_idle()
    cancelled = server.worker.engine.stats.finished["cancelled"]
    body = {"model": NAME, "messages": [{"role": "user", "content": "w5"}], "max_tokens": 1500, "stream": stream}
    with raw(server) as http:
        if stream:
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                assert next(response.iter_lines()).startswith("data:")
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/chat/completions", json=body, timeout=0.5)
    server.wait_until_idle()
    assert server.worker.engine.stats.finished["cancelled"] == cancelled + 1
    assert ask(client, max_tokens=2).usage.completion_tokens == 2


def test_too_many_requests_at_once():
    with make_server(requests=1) as server:
        client = connected(server)
        first = ask(client, max_tokens=1500, stream=True)
        next(iter(first))
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client)
        assert caught.value.status_code == 503
        first.close()
        server.wait_until_idle()
        assert ask(client, max_tokens=2).usage.completion_tokens == 2


def test_a_fault_in_the_engine_is_told_and_survived(server, client, monkeypatch):
    server.wait_until_idle()
    backend = server.worker.engine._backend
    read = backend.read

    def broken(*arguments):
        monkeypatch.setattr(backend, "read", read)
        raise RuntimeError("no such luck")

    monkeypatch.setattr(backend, "read", broken)
    with pytest.raises(openai.InternalServerError):
        ask(client)
    assert ask(client, max_tokens=2).usage.completion_tokens == 2


def test_shutdown_finishes_what_runs():
    with make_server() as server:
        client = connected(server)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, client, max_tokens=200)
            while not server.worker.num_requests:
                time.sleep(0.01)
            server.server.should_exit = True
            assert running.result(20).usage.completion_tokens == 200


class Letters:
    """A tokenizer of UTF-8 bytes."""

    def decode(self, ids, skip_special_tokens=True) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("stops", [[], ["zz"], ["é!"], ["lo wö"]])
def test_text_comes_in_whole_characters_and_ends_before_a_stop(stops):
    text = "hello wörld, 5 € for a café! 😀 done"
    stream = TextStream(Letters(), stops)
    shown = "".join(stream.push([byte]) for byte in text.encode()) + stream.end()
    want = min((text.split(stop)[0] for stop in stops if stop in text), key=len, default=text)
    assert shown == stream.text == want
    assert stream.stopped == (want != text)
    assert json.dumps(shown)
