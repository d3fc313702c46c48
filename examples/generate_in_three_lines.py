"""The default pair: load a target, load its drafter, add one argument to `generate()`."""

from dspark_hf.loading.pairs import load_drafter, load_target

target = load_target()
drafter = load_drafter(target=target.model)

inputs = target.tokenizer.apply_chat_template(
    [{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)
output = target.model.generate(**inputs, assistant_model=drafter, max_new_tokens=80, do_sample=False)
print(target.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"{drafter.last_generation.accept_length:.2f} tokens a round")
