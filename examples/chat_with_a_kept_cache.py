"""A chat that streams and reads only what is new in each turn: `python examples/chat_with_a_kept_cache.py "Hi!" "And you?"`."""

import sys

import torch
from transformers import TextStreamer

from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of
from dspark_hf.loading.chat_template import encode_messages
from dspark_hf.loading.pairs import load_drafter, load_target

target = load_target()
drafter = load_drafter(target=target.model)
streamer = TextStreamer(target.tokenizer, skip_prompt=True, skip_special_tokens=True)
turns = sys.argv[1:] or ["Name three colours.", "Which of them is the colour of the sky?"]

messages, text, kept = [], torch.empty(1, 0, dtype=torch.long), {}
for turn in turns:
    messages.append({"role": "user", "content": turn})
    print(f"> {turn}")
    # What was said is kept token by token; only the template's new part is added to it.
    ids = torch.tensor([encode_messages(target.tokenizer, messages)])
    text = torch.cat([text, ids[:, text.shape[1] :]], dim=1)
    output = target.model.generate(
        text,
        attention_mask=torch.ones_like(text),
        assistant_model=drafter,
        streamer=streamer,
        max_new_tokens=80,
        do_sample=False,
        return_dict_in_generate=True,
        **kept,
    )
    answer = target.tokenizer.decode(output.sequences[0, text.shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    text, kept = output.sequences, {CACHE_ARGUMENT: cache_of(output)}  # the drafter's own cache travels with it
    stats = drafter.last_generation
    print(f"  ({stats.prompt_tokens} tokens read, {stats.accept_length:.2f} tokens a round)")
