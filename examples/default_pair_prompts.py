"""Write the prompts the default drafter is trained on: the training prompts of `shared/prompts`, and for every second
math prompt the sentence that evaluations add.

Usage: python examples/default_pair_prompts.py ../shared/prompts/train.jsonl prompts.jsonl
"""

import json
import sys

SENTENCE = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def main(source: str, destination: str) -> None:
    math = 0
    with open(source, encoding="utf-8") as lines, open(destination, "w", encoding="utf-8") as out:
        for line in lines:
            record = json.loads(line)
            prompt = record["prompt"]
            if record["domain"] == "math":
                prompt += SENTENCE if math % 2 == 0 else ""
                math += 1
            out.write(json.dumps({"domain": record["domain"], "prompt": prompt}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
