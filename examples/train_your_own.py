"""Train, calibrate and use a drafter for a model of yours.

`python examples/train_your_own.py MODEL prompts.jsonl my-drafter [steps]`; about half an hour for a model of 135M parameters
on two cores, and it goes on where it was stopped. `prompts.jsonl`: one {"prompt": ...} a line, some thousands of them.
"""

import sys
from pathlib import Path

import torch

from dspark_hf import DSparkDraftModel
from dspark_hf.evaluation.calibrate import run_calibration, store_calibration
from dspark_hf.evaluation.completion import DecodingOptions
from dspark_hf.evaluation.prompt_sets import load_conversations
from dspark_hf.loading.pairs import load_target
from dspark_hf.training.pipeline import run_training
from dspark_hf.training.recipe import TrainOptions

name, prompts, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]).resolve()
steps = int(sys.argv[4]) if len(sys.argv) > 4 else None

target = load_target(name)
small = {"num_layers": 1, "draft_vocab_size": 0, "max_new_tokens": 16, "slots": 8} if steps else {}
options = TrainOptions(output, (prompts,), steps=steps, **small)
report = run_training(target, options)
print(f"held-out acceptance by position: {' '.join(f'{a:.2f}' for a in report.held_out.acceptance)}")

# Calibrate on prompts that were not trained on; here, for brevity, on our own 24.
drafter = DSparkDraftModel.from_pretrained(output, dtype=target.model.dtype)
drafter.bind_target(target.model)
held_out = load_conversations(None, 2 if steps else None)
calibration = run_calibration(target, drafter, held_out, DecodingOptions(16 if steps else 128, temperature=1.0), None)
store_calibration(drafter, calibration, output, output)

ids = torch.tensor([target.tokenizer("Once upon a time")["input_ids"]])
text = target.model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, max_new_tokens=24)
print(target.tokenizer.decode(text[0]))
print(f"{drafter.last_generation.accept_length:.2f} tokens a round; the drafter is in {output}")
