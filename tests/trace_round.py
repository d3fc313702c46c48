"""Files of the package that run code in one steady round of `generate()`, and modules that a fresh Python has loaded.

`python tests/trace_round.py` prints both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dspark_hf"
DRAFTING = "model/layers_dspark.py"  # runs in rounds that draft, and in no other


def files_of_a_round(target, drafter, input_ids, **settings) -> list[str]:
    """Files of the package that run code in most of the rounds that draft, of one `generate()` call.

    A round begins with a forward of the target. The call should not be the pair's first, which measures what steps cost.
    """
    rounds: list[set[str]] = [set()]

    def note(frame, event, _) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{PACKAGE}{os.sep}"):
            rounds[-1].add(Path(file).relative_to(PACKAGE).as_posix())

    begins = target.register_forward_pre_hook(lambda *_: rounds.append(set()))
    sys.setprofile(note)
    try:
        target.generate(input_ids, assistant_model=drafter, **settings)
    finally:
        sys.setprofile(None)
        begins.remove()
    drafting = Counter(frozenset(files) for files in rounds[2:-2] if DRAFTING in files)
    return sorted(drafting.most_common(1)[0][0])


def modules_after(statement: str, *packages: str) -> list[str]:
    """The modules of `packages` that are loaded once `statement` has run in a Python of its own."""
    code = f"import sys\n{statement}\nprint(*(name for name in sys.modules if name.split('.')[0] in {packages}))"
    place = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines()[-1].split())


def default_round() -> list[str]:
    """Of a tiny calibrated pair, with what a real one has by default on a CPU: the scheduler, copies, forms of linear layers."""
    import torch
    from conftest import make_drafter, make_target, prompt_ids

    target = make_target(dtype=torch.float32, intermediate_size=512)
    calibration = {
        "confidence_temperatures": [1.0] * 4,
        "confidence_shifts": [4.0] * 4,
        "expected_acceptance": [0.98] * 4,
    }
    drafter = make_drafter(target, **calibration)
    for _ in range(2):
        files = files_of_a_round(target, drafter, prompt_ids(), max_new_tokens=48, do_sample=False)
    return files


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for title, names in (
        ("files of one steady round", default_round()),
        ("modules after `import dspark_hf`", modules_after("import dspark_hf", "dspark_hf")),
    ):
        print(f"{len(names)} {title}:", *names, sep="\n  ")
