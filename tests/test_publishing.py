"""Cards, pushing to a Hub on this machine, and loading without this package."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target, run_with_package
from hub_server import HubServer
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModel

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.model import modeling_dspark

MODEL = Path(modeling_dspark.__file__).parent
CODE = {file.name for file in MODEL.glob("*_dspark.py")}
AUTO_MAP = {"AutoConfig": "configuration_dspark.DSparkConfig", "AutoModel": "modeling_dspark.DSparkDraftModel"}
OURS = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-instruct-dspark"
FIGURES = ("bench.json", "calibration.json", "training.json", "reliability.png")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a tiny target and of its drafter with a reduced vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_target(dtype=torch.float32)
    target.save_pretrained(folder / "target")
    make_drafter(target, draft_vocab_size=20).save_pretrained(folder / "drafter")
    return folder


def run_without_package(code: str, *arguments, **environment) -> str:
    """What `code` prints in a process that has torch and transformers but can't import `dspark_hf`."""
    head = f"import sys\nsys.path += {site.getsitepackages()!r}\nsys.modules['dspark_hf'] = None\n"
    # -I: no current folder, no PYTHONPATH; -S: no .pth files, so no editable install either.
    command = [sys.executable, "-I", "-S", "-c", head + textwrap.dedent(code), *map(str, arguments)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


DRAFT_ALONE = """
    import json, torch
    try:
        import dspark_hf
        raise SystemExit("dspark_hf can be imported here")
    except ModuleNotFoundError:
        pass
    from transformers import AutoModel, AutoModelForCausalLM
    drafter = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
    drafter.bind_target(AutoModelForCausalLM.from_pretrained(sys.argv[2]))
    context = torch.linspace(-1, 1, 5 * 64).view(1, 5, 64)
    block = drafter.draft(torch.tensor([5]), context)
    if len(sys.argv) > 3:
        drafter.save_pretrained(sys.argv[3])
    where = {name.split(".")[0] for name in sys.modules if name.endswith("_dspark")}
    print(json.dumps([type(drafter).__module__.split(".")[0], sorted(where), block.token_ids.tolist()]))
"""


def test_saved_folder_loads_and_drafts_without_the_package(pair, tmp_path):
    assert {file.name for file in (pair / "drafter").glob("*.py")} == CODE
    config = json.loads((pair / "drafter" / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    out = run_without_package(DRAFT_ALONE, pair / "drafter", pair / "target", tmp_path / "again", **environment)
    module, modules, drafted = json.loads(out.splitlines()[-1])
    assert module == "transformers_modules"
    assert modules == ["transformers_modules"]
    target, drafter = make_target(dtype=torch.float32), DSparkDraftModel.from_pretrained(pair / "drafter")
    drafter.bind_target(target)
    context = torch.linspace(-1, 1, 5 * 64).view(1, 5, 64)
    assert drafted == drafter.draft(torch.tensor([5]), context).token_ids.tolist()
    # Saved there, it is whole again.
    assert {file.name for file in (tmp_path / "again").glob("*.py")} == CODE
    assert DSparkDraftModel.from_pretrained(tmp_path / "again").config.auto_map == AUTO_MAP


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": True}, {"trust_remote_code": False}])
def test_the_package_s_own_class_is_used_where_it_is_imported(pair, trust, recwarn):
    assert type(AutoModel.from_pretrained(pair / "drafter", **trust)) is DSparkDraftModel
    assert type(AutoConfig.from_pretrained(pair / "drafter", **trust)) is DSparkConfig
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]


@pytest.fixture
def drafter_dir(pair, tmp_path):
    """A copy of the drafter's folder that may be written to."""
    return Path(shutil.copytree(pair / "drafter", tmp_path / "my-drafter"))


def put_figures(folder: Path, *names: str) -> None:
    for name in names:
        shutil.copy(OURS / name, folder / name)


# -- the card --------------------------------------------------------------------------------------------------------


def test_card_of_a_bare_drafter_invents_nothing(drafter_dir, run):
    code, out, err = run("card", drafter_dir)
    assert (code, "README.md" in out) == (0, True)
    assert all(f"no {name}" in err for name in FIGURES)
    card = ModelCard.load(drafter_dir / "README.md")
    assert "base_model" not in card.data.to_dict()  # trained for a folder, of which the Hub knows nothing
    assert "license" not in card.data.to_dict()
    assert card.data.library_name == "transformers"
    for heading in ("## Acceptance and speed", "## Calibration", "## Training", "![", "None", "{{", "{%"):
        assert heading not in card.text
    assert "Not calibrated" in card.text
    assert 'from_pretrained("OWNER/my-drafter")' in card.text
    assert 'from_pretrained("OWNER/my-drafter", trust_remote_code=True)' in card.text


def test_card_of_a_trained_drafter(drafter_dir, run):
    put_figures(drafter_dir, *FIGURES)
    options = ["--licence", "apache-2.0", "--dataset", "openai/gsm8k", "--dataset", "google-research-datasets/mbpp"]
    options += ["--language", "en", "--base-model", "HuggingFaceTB/SmolLM2-135M-Instruct", "--repo", "me/mine"]
    code, _, err = run("card", drafter_dir, *options)
    assert (code, err) == (0, "")
    card = ModelCard.load(drafter_dir / "README.md")
    data = card.data.to_dict()
    expected = {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "datasets": ["openai/gsm8k", "google-research-datasets/mbpp"],
        "language": ["en"],
    }
    assert {key: data[key] for key in expected} == expected
    assert {"dspark", "speculative-decoding"} <= set(data["tags"])
    bench = json.loads((OURS / "bench.json").read_text())["domains"]
    for domain in ("math", "code", "chat", "all"):
        row = next(line for line in card.text.splitlines() if line.startswith(f"| {domain} |"))
        assert f"| {bench[domain]['dspark']['accept_length']:.2f} |" in row
        assert f"**{bench[domain]['dspark']['speedup']:.2f}×**" in row
        ratio = bench[domain]["dspark"]["tokens_per_second"] / bench[domain]["plain_tuned"]["tokens_per_second"]
        assert f"| {ratio:.2f}× |" in row
    for words in (
        "## Calibration",
        "| 1 | 6905 | 12.4% | 1.9% |",
        "(reliability.png)",
        "600,475 tokens",
        'from_pretrained("me/mine")',
    ):
        assert words in card.text
    assert "\n\n\n" not in card.text
    assert "None" not in card.text


def test_card_that_is_there_stays(drafter_dir, run):
    own = "---\nlicense: mit\nlanguage: [de]\ntags: [mine]\n---\n\nBy hand.\n"
    (drafter_dir / "README.md").write_text(own)
    code, _, err = run("card", drafter_dir)
    assert (code, "left as it is" in err, "--force" in err) == (2, True, True)
    assert (drafter_dir / "README.md").read_text() == own
    code, out, _ = run("card", drafter_dir, "--stdout")
    assert code == 0
    assert out.startswith("---\n")
    assert (drafter_dir / "README.md").read_text() == own
    assert run("card", drafter_dir, "--force")[0] == 0
    data = ModelCard.load(drafter_dir / "README.md").data.to_dict()
    assert (data["license"], data["language"]) == ("mit", ["de"])
    assert "mine" in data["tags"]


BAD_CARDS = {
    "no folder": ("nowhere", [], {}, "No folder"),
    "another model": ("target", [], {}, "holds no drafter"),
    "licence": ("drafter", ["--licence", "Apache License 2.0"], {}, "apache-2.0"),
    "base model": ("drafter", ["--base-model", "target"], {}, "owner/name"),
    "language": ("drafter", ["--language", "English"], {}, "e.g. en"),
    "damaged bench": ("drafter", [], {"bench.json": "{"}, "bench.json is not what `dspark-hf bench"),
    "bench of many requests": ("drafter", [], {"bench.json": '{"levels": {}}'}, "KeyError"),
    "no training record": ("drafter", [], {"training.json": "[]"}, "training.json is not what"),
    "metadata": ("drafter", ["--force"], {"README.md": "---\na: [\n---\n"}, "metadata at the top"),
}


@pytest.mark.parametrize("case", BAD_CARDS)
def test_bad_input_of_card(case, pair, run, tmp_path):
    name, options, files, message = BAD_CARDS[case]
    folder = tmp_path / name
    if (pair / name).is_dir():
        shutil.copytree(pair / name, folder)
    for file, text in files.items():
        (folder / file).write_text(text)
    code, _, err = run("card", folder, *options)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


# -- pushing ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A Hub here, where `writer` may write as me and `reader` nowhere; this process talks to it."""
    with HubServer({"writer": {"me"}, "reader": set()}) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("dspark_hf.publishing.push.get_token", lambda: None)
        yield server


@pytest.fixture
def ready(drafter_dir, run):
    """A drafter's folder with a card, its figures, and files that have no business on the Hub."""
    put_figures(drafter_dir, *FIGURES)
    options = ["--licence", "apache-2.0", "--base-model", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert run("card", drafter_dir, *options)[0] == 0
    for name in ("rounds.jsonl", "answers.jsonl", "training_state.pt", "model.safetensors.7.tmp", ".hidden"):
        (drafter_dir / name).write_text("not for the Hub")
    (drafter_dir / "checkpoint-5").mkdir()
    (drafter_dir / "checkpoint-5" / "model.safetensors").write_text("not for the Hub")
    return drafter_dir


EXPECTED = {*FIGURES, "README.md", "config.json", "generation_config.json", "model.safetensors"} | CODE

LOAD_FROM_HUB = """
    import json, torch
    from huggingface_hub import constants
    constants.DOWNLOAD_CHUNK_SIZE = 1024  # of 10 MB, so that half a small file is worth resuming
    import dspark_hf
    theirs = dspark_hf.DSparkDraftModel.from_pretrained(sys.argv[1])
    ours = dspark_hf.DSparkDraftModel.from_pretrained(sys.argv[2])
    pairs = zip(theirs.state_dict().items(), ours.state_dict().items())
    same = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    print(json.dumps([same, len(theirs.state_dict()), theirs.config.target_model_name_or_path]))
"""


def test_pushed_drafter_loads_from_there(hub, ready, pair, run, tmp_path):
    config = (ready / "config.json").read_bytes()
    code, out, _ = run("push", ready, "me/mine", "--token", "writer", "--json")
    assert code == 0
    done = json.loads(out)
    assert done["url"] == f"{hub.url}/me/mine"
    branch = hub.repos["me/mine"].branches["main"]
    assert done["commit"] == branch.commit
    assert set(branch.files) == set(done["files"]) == EXPECTED
    assert (ready / "config.json").read_bytes() == config  # what is here stays as it is
    pushed = json.loads(branch.files["config.json"])
    assert pushed["auto_map"] == AUTO_MAP
    assert pushed["target_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for name in CODE:
        assert branch.files[name] == (MODEL / name).read_bytes()

    here = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    hub.cut.add("model.safetensors")
    out = run_with_package(LOAD_FROM_HUB, "me/mine", ready, HF_HOME=str(tmp_path / "first"), **here)
    same, tensors, target = json.loads(out.splitlines()[-1])
    assert same
    assert tensors > 20
    assert target == "HuggingFaceTB/SmolLM2-135M-Instruct"
    # The first download broke off half-way; the second began where it ended.
    size = len(branch.files["model.safetensors"])
    ranges = [r for method, path, r in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert len(ranges) == 2
    assert ranges[0] == ""
    assert size // 2 - 1024 <= int(ranges[1].removeprefix("bytes=").rstrip("-")) <= size // 2

    out = run_without_package(DRAFT_ALONE, "me/mine", pair / "target", HF_HOME=str(tmp_path / "second"), **here)
    module, modules, drafted = json.loads(out.splitlines()[-1])
    assert (module, modules) == ("transformers_modules", ["transformers_modules"])
    assert len(drafted[0]) == 4


def test_push_again_to_a_branch_and_private(hub, ready, run):
    push = ["push", ready, "me/mine", "--token", "writer"]
    assert run(*push, "--private")[0] == 0
    assert hub.repos["me/mine"].private
    first = hub.repos["me/mine"].branches["main"].commit
    code, out, _ = run(*push, "--revision", "v2")
    assert code == 0
    assert f"{8 + len(CODE)} files" in out
    assert hub.url in out
    (ready / "README.md").write_text((ready / "README.md").read_text() + "\nMore.\n")
    uploads = [path for method, path, _ in hub.requests if method == "PUT"]
    assert run(*push, "--revision", "v2")[0] == 0
    assert [path for method, path, _ in hub.requests if method == "PUT"] == uploads  # weights are there already
    branches = hub.repos["me/mine"].branches
    assert branches["main"].commit == first
    assert b"More." in branches["v2"].files["README.md"]
    assert b"More." not in branches["main"].files["README.md"]


def test_dry_run_sends_nothing(hub, ready, run):
    code, out, _ = run("push", ready, "me/mine", "--dry-run", "--json")
    assert code == 0
    done = json.loads(out)
    assert set(done["files"]) == EXPECTED
    assert done["commit"] is None
    assert hub.requests == []
    code, out, _ = run("push", ready, "me/mine", "--dry-run")
    assert "would go to" in out


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        ("mine", "writer", "owner/name"),
        ("me/mine/too", "writer", "owner/name"),
        ("me/mine", None, "No token"),
        ("me/mine", "unknown", "(401)"),
        ("you/mine", "writer", "(403)"),
        ("me/theirs", "reader", "(403)"),
    ],
)
def test_refused_push(repo, token, message, hub, ready, run):
    hub.create({"organization": "me", "name": "theirs"}, "writer")
    code, _, err = run("push", ready, repo, *(["--token", token] if token else []))
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert set(hub.repos) == {"me/theirs"}
    assert not hub.repos["me/theirs"].branches["main"].files


def test_hub_that_is_not_there_or_out_of_order(hub, ready, run, monkeypatch):
    hub.broken = True
    for name, value, message in (
        (None, None, "(500)"),
        ("HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE is set"),
        ("ENDPOINT", "http://127.0.0.1:9", "can't be reached"),
    ):
        with monkeypatch.context() as patch:
            if name is not None:
                patch.setattr(f"huggingface_hub.constants.{name}", value)
            code, _, err = run("push", ready, "me/mine", "--token", "writer")
        assert (code, message in err) == (2, True)


UNFIT = {
    "no card": ("has no card", "README.md", lambda data: None),
    "no licence": ("names no licence", "README.md", lambda data: data.replace(b"license: apache-2.0\n", b"")),
    "no weights": ("no weights in safetensors", "model.safetensors", lambda data: None),
    "damaged weights": ("damaged", "model.safetensors", lambda data: data[:3000]),
    "another model": ("holds no drafter", "config.json", lambda data: b'{"model_type": "llama"}'),
}


@pytest.mark.parametrize("case", UNFIT)
def test_folder_that_is_not_fit_for_the_hub(case, hub, ready, run):
    message, name, change = UNFIT[case]
    data = change((ready / name).read_bytes())
    (ready / name).unlink()
    if data is not None:
        (ready / name).write_bytes(data)
    for dry in ([], ["--dry-run"]):
        code, _, err = run("push", ready, "me/mine", "--token", "writer", *dry)
        assert code == 2
        assert message in err
    assert hub.requests == []


@pytest.mark.parametrize("command", ["card", "push"])
def test_help_has_an_example(command, run):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"Example: dspark-hf {command}" in out
