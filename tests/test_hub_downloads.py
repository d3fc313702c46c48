"""Drafters from the Hub: fetched with `hf download` or by `from_pretrained`, broken off and gone on with, and offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target, run_with_package
from hub_server import HubServer
from safetensors.torch import load_file
from test_packagings import DEEPSPEC, write

HF = Path(sys.executable).with_name("hf")

# The client's own command, with chunks so small that half a file is worth keeping.
HF_DOWNLOAD = """
    from huggingface_hub import constants
    constants.DOWNLOAD_CHUNK_SIZE = 1024
    from huggingface_hub.cli.hf import main
    sys.argv = ["hf", "download", *sys.argv[1:]]
    main()
"""
# Loads what it is told to, line by line: (method, name, offline, where to put the weights) -> what it was refused with.
WORKER = """
    import json, os, sys
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from huggingface_hub import constants
    constants.DOWNLOAD_CHUNK_SIZE = 1024
    from safetensors.torch import save_file
    from dspark_hf import DSparkDraftModel
    for line in sys.stdin:
        method, name, constants.HF_HUB_OFFLINE, place = json.loads(line)
        answer = None
        try:
            tensors = getattr(DSparkDraftModel, method)(name).state_dict()
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, place)
        except (ValueError, OSError) as error:
            answer = str(error)
        print(json.dumps(answer), file=answers, flush=True)
"""


class Client:
    """A process with a cache of its own that talks to our Hub, or to `endpoint`."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._file = folder / "loaded.safetensors"
        variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"} | environment
        command = [sys.executable, "-c", textwrap.dedent(WORKER)]
        self._log, pipe = folder / "stderr", subprocess.PIPE
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, stderr=log, text=True)

    def load(self, name: str, method: str = "from_pretrained", offline: bool = False) -> str | dict[str, torch.Tensor]:
        """The weights, or what it was refused with."""
        self._file.unlink(missing_ok=True)
        print(json.dumps([method, name, offline, str(self._file)]), file=self.process.stdin, flush=True)
        watchdog = threading.Timer(150, self.process.kill)
        watchdog.start()
        answer = self.process.stdout.readline()
        watchdog.cancel()
        assert answer, self._log.read_text()
        refused = json.loads(answer)
        return load_file(self._file) if refused is None else refused


@pytest.fixture(scope="module")
def server():
    with HubServer({}) as server:
        yield server


@pytest.fixture
def hub(server):
    server.requests.clear()
    return server


@pytest.fixture(scope="module")
def environment(server, tmp_path_factory):
    """Of all clients here: they have one cache, so that each test needs names of its own."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "",
    }


@pytest.fixture(scope="module")
def start(environment, tmp_path_factory):
    """Starts clients; all end with the module."""
    clients = []

    def run(**changed: str) -> Client:
        clients.append(Client(environment | changed, tmp_path_factory.mktemp("client")))
        return clients[-1]

    yield run
    for client in clients:
        client.process.kill()
        client.process.communicate()


@pytest.fixture(scope="module")
def client(start):
    return start()


@pytest.fixture
def whole(tmp_path):
    """The folder of a tiny drafter in our own form."""
    make_drafter(make_target(dtype=torch.float32)).save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.fixture
def sharded(tmp_path):
    """The same in several files and an index."""
    make_drafter(make_target(dtype=torch.float32)).save_pretrained(tmp_path / "sharded", max_shard_size="12KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    return tmp_path / "sharded"


@pytest.fixture
def official(hub, tmp_path):
    """The folder of what stands for DeepSpec's drafter on our Hub."""
    drafter = make_drafter(make_target(dtype=torch.float32))
    folder = write(tmp_path / "official", DEEPSPEC | {"dtype": "float32"}, drafter)
    hub.put("deepseek-ai/dspark_qwen3_4b_block7", folder)
    return folder


def assert_same(loaded, folder) -> None:
    assert not isinstance(loaded, str), loaded
    stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert set(loaded) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor)


def fetched(hub: HubServer) -> list[str]:
    return [name for name, _ in hub.downloads()]


@pytest.mark.skipif(not HF.is_file(), reason="the hf command is not here")
def test_hf_download_then_from_pretrained_without_a_network(hub, whole, environment, client):
    hub.put("me/whole", whole)
    command = [str(HF), "download", "me/whole"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert sorted(fetched(hub)) == sorted(f.name for f in whole.iterdir())
    sent = len(hub.requests)
    assert_same(client.load("me/whole", offline=True), whole)
    assert len(hub.requests) == sent


def test_from_pretrained_fetches_what_it_needs(hub, sharded, client):
    (sharded / "bench.json").write_text("{}")
    hub.put("me/sharded", sharded)
    assert_same(client.load("me/sharded"), sharded)
    names = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert set(fetched(hub)) == names | {f.name for f in sharded.glob("model-*.safetensors")}
    assert_same(client.load("me/sharded", offline=True), sharded)


@pytest.mark.parametrize("way", ["hf-download", "from-pretrained"])
def test_a_download_that_breaks_off_goes_on_where_it_ended(way, hub, sharded, environment, client):
    name = f"me/broken-{way}"
    hub.put(name, sharded)
    broken = sorted(f.name for f in sharded.glob("model-*.safetensors"))[:2]
    hub.cut.update(broken)
    if way == "hf-download":
        run_with_package(HF_DOWNLOAD, name, **environment)
    assert_same(client.load(name), sharded)
    for file in broken:
        first, second = (r for n, r in hub.downloads() if n == file)
        half = (sharded / file).stat().st_size // 2
        assert first == ""
        assert half - 1024 <= int(second.removeprefix("bytes=").rstrip("-")) <= half
    assert len(fetched(hub)) == len(set(fetched(hub))) + len(broken)


def test_a_download_that_is_killed_is_done_by_the_next_one(hub, sharded, environment, client):
    """The client gives each process a temporary file of its own, so the file it was in begins anew; whole ones stay."""
    hub.put("me/killed", sharded)
    first, second, *_ = sorted(f.name for f in sharded.glob("model-*.safetensors"))
    hub.hold.add(second)
    command = [sys.executable, "-c", "import sys\n" + textwrap.dedent(HF_DOWNLOAD), "me/killed", "--max-workers", "1"]
    quiet = subprocess.DEVNULL
    killed = subprocess.Popen(command, env=os.environ | environment, stdout=quiet, stderr=quiet)
    try:
        assert hub.held.wait(120)
    finally:
        killed.kill()
        killed.wait()
    hub.release.set()
    assert first in fetched(hub)
    refused = client.load("me/killed", offline=True)
    assert "not in the cache as a whole" in refused
    assert refused.endswith("hf download me/killed")
    run_with_package(HF_DOWNLOAD, "me/killed", **environment)
    assert fetched(hub).count(first) == 1
    assert fetched(hub).count(second) == 2
    assert_same(client.load("me/killed", offline=True), sharded)


def test_a_quantised_target_s_known_drafter(hub, official, client, start):
    assert_same(client.load("unsloth/Qwen3-4B-unsloth-bnb-4bit", "for_target"), official)
    assert not [path for _, path, _ in hub.requests if "unsloth" in path]  # the name says it all
    cut_off = start(HF_ENDPOINT="http://127.0.0.1:9")  # nobody listens there
    for asked, offline in ((client, True), (cut_off, False)):
        assert_same(asked.load("Qwen/Qwen3-4B-AWQ", "for_target", offline), official)
        refused = asked.load("Qwen/Qwen3-8B", "for_target", offline)
        assert refused.endswith("hf download deepseek-ai/dspark_qwen3_8b_block7")


def test_a_target_whose_config_on_the_hub_states_its_name(hub, official, tmp_path, client):
    copy = tmp_path / "copy"
    copy.mkdir()
    shape = {"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936}
    (copy / "model.safetensors").write_bytes(b"never fetched")
    for name, more in (("states", {"_name_or_path": "Qwen/Qwen3-4B"}), ("silent", {})):
        (copy / "config.json").write_text(json.dumps(shape | more))
        hub.put(f"someone/{name}", copy)
    assert_same(client.load("someone/states", "for_target"), official)
    refused = client.load("someone/silent", "for_target")
    assert "shape is that of Qwen/Qwen3-4B" in refused
    assert "dspark-hf train --target someone/silent" in refused
    targets = [path for method, path, _ in hub.requests if method == "GET" and "someone" in path]
    assert [path.rsplit("/", 1)[-1] for path in targets] == ["config.json"] * 2


def test_pickled_weights_are_not_even_fetched(hub, whole, client):
    torch.save(load_file(whole / "model.safetensors"), whole / "pytorch_model.bin")
    (whole / "model.safetensors").unlink()
    hub.put("me/pickled", whole)
    refused = client.load("me/pickled")
    assert "me/pickled holds its weights as a pickle (pytorch_model.bin)" in refused
    assert "pytorch_model.bin" not in fetched(hub)


def test_what_is_not_on_the_hub(client):
    assert "me/nothing is not a local folder and is not a valid model identifier" in client.load("me/nothing")
