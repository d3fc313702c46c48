"""Many prompts at once, each with its own settings: `python examples/many_requests.py`."""

import dspark_hf
from dspark_hf.loading.chat_template import encode_messages
from dspark_hf.loading.pairs import load_drafter, load_target

target = load_target()
drafter = load_drafter(target=target.model)
engine = dspark_hf.BatchEngine(target.model, drafter, max_sequences=4)

questions = {
    "Write a haiku about rain.": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "What is 17 + 25?": {"do_sample": False},
    "Write a Python function that reverses a string.": {"do_sample": False},
    "Name three rivers in Europe.": {"do_sample": True, "temperature": 0.5, "top_k": 0},
}
asked = {}
for seed, (question, settings) in enumerate(questions.items()):
    ids = encode_messages(target.tokenizer, [{"role": "user", "content": question}])
    asked[engine.add(ids, seed=seed, max_new_tokens=64, **settings)] = question

for output in engine.run():
    text = target.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    print(f"--- {asked[output.id]} ({output.finish_reason}, τ {output.stats.accept_length:.2f})\n{text}")
print(f"--- {engine.stats.tokens_per_second:.1f} tokens per second for all of them")
