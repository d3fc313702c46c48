"""What one generation did, round by round: `python examples/read_the_statistics.py`."""

import torch

from dspark_hf.loading.chat_template import encode_messages
from dspark_hf.loading.pairs import load_drafter, load_target

target = load_target()
drafter = load_drafter(target=target.model)

question = "Natalia sold 48 clips in April and half as many in May. How many did she sell in all?"
ids = torch.tensor([encode_messages(target.tokenizer, [{"role": "user", "content": question}])])
output = target.model.generate(
    ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, max_new_tokens=60, do_sample=False
)
stats = drafter.last_generation

print(f"{stats.new_tokens} tokens in {stats.rounds} rounds: {stats.accept_length:.2f} a round, policy {stats.policy}")
print(f"{stats.tokens_per_second:.1f} tokens per second, {stats.parked_rounds} rounds without drafting by choice")
for name in ("prefill", "draft", "verify", "other"):
    print(f"  {name:8}{getattr(stats, f'{name}_seconds'):6.2f} s")
print("accepted by position: " + " ".join(f"{a:.0%}" for a in stats.acceptance_by_position))

at = ids.shape[1] + 1  # the prefill gave the first token
for record in stats.history[:12]:
    tokens = output[0, at : at + record.accepted + 1]
    at += record.accepted + 1
    survival = " ".join(f"{a:.2f}" for a in record.survival)
    print(f"verified {record.verified}, accepted {record.accepted}: {target.tokenizer.decode(tokens)!r} ({survival})")
