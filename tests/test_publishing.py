"""Cards, pushing to a Hub on this machine, and loading without this package."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import make_drafter, make_target
from transformers import AutoConfig, AutoModel

from dspark_hf import DSparkConfig, DSparkDraftModel

CODE = {f"{part}_dspark.py" for part in ["backbone", "configuration", "drafting", "heads", "modeling", "packagings"]}
AUTO_MAP = {"AutoConfig": "configuration_dspark.DSparkConfig", "AutoModel": "modeling_dspark.DSparkDraftModel"}


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
