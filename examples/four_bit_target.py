"""A target in 4 bits with its drafter, which binds to the quantised embedding and LM head as they are.

`pip install bitsandbytes`, then `python examples/four_bit_target.py`.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from dspark_hf import DSparkDraftModel
from dspark_hf.loading.chat_template import encode_messages
from dspark_hf.loading.pairs import DEFAULT_TARGET, resolve_target

source = resolve_target(DEFAULT_TARGET)
tokenizer = AutoTokenizer.from_pretrained(source)
quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
target = AutoModelForCausalLM.from_pretrained(source, quantization_config=quantised, dtype=torch.float32).eval()
drafter = DSparkDraftModel.for_target(target, dtype=torch.float32)
drafter.generation_config.assistant_confidence_threshold = 0.4  # without measuring this slow target first

ids = torch.tensor([encode_messages(tokenizer, [{"role": "user", "content": "Why is the sky blue?"}])])
arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
plain = target.generate(ids, **arguments)
fast = target.generate(ids, assistant_model=drafter, **arguments)
print(tokenizer.decode(fast[0, ids.shape[1] :], skip_special_tokens=True))
print("the same tokens" if torch.equal(plain, fast) else "other tokens: a tie of the two best scores")
print(f"{drafter.last_generation.accept_length:.2f} tokens a round")
