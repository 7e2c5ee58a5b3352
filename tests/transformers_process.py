"""A process with a model of transformers, in which a prompt is generated from.

    python transformers_process.py '{"model": folder, "prompt": [...], "pager": {...}}'

Prints JSON: the tokens that were generated, how many of the prompt were found, how many the model computed.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    import torch
    from kvpager.api.integrations.transformers import KVPager
    from kvpager.tests.transformers_cases import Computed, generate
    from transformers import AutoModelForCausalLM

    values: dict[str, Any] = json.loads(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(values["model"]).eval()
    pager = KVPager(model, **values["pager"])
    prompt = torch.tensor([values["prompt"]])
    cache = pager.cache(prompt)
    with Computed(model) as computed:
        tokens = generate(model, prompt, cache).tolist()
    print(json.dumps({"tokens": tokens, "loaded": cache.loaded, "computed": computed.tokens}))


if __name__ == "__main__":
    main()
