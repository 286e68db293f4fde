"""A README beside saved weights with the lines of Python that ask them, heads and contexts included: the library's own
`generate` knows of neither."""

from __future__ import annotations

import textwrap
from pathlib import Path

from sameday.data.questions.encode import Encoder
from sameday.data.questions.turns import Asked
from sameday.models import handover
from sameday.models.families.base import Family
from sameday.models.heads import WEIGHTS
from sameday.spec.cot import CotRecipe

IMPORTS = "from safetensors.torch import load_file\n"
ASKING = """\
# All questions about the image, with their stages: stage 2 depends on stage 1, stage 3 on both.
questions = [(1, question), (2, "What colour is it?"), (3, "What is to be done?")]
heads = {{name: tensor.to(device) for name, tensor in load_file("{weights}").items()}}
whole = {whole}


@torch.no_grad()
@torch.autocast(device, dtype=torch.bfloat16, enabled={half})
def states(question, answer=()):
    # The last hidden states of a question, and of the tokens of its answer so far.
{prompt}
    for token in answer:
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([[token]])], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for kind in [name for name in inputs if name.endswith("token_type_ids")]:
            inputs[kind] = torch.nn.functional.pad(inputs[kind], (0, 1))
    return whole.model(**inputs.to(device)).last_hidden_state[0]


@torch.no_grad()
@torch.autocast(device, dtype=torch.bfloat16, enabled={half})
def logits(state, stage):
    z = state + sum(heads[f"P.{{stage}}{{earlier}}"] @ context[earlier] for earlier in range(1, stage))
    return whole.lm_head(z) + {added}


ends = [(stage, states(question)[-1].float()) for stage, question in questions]
context = {{}}
for stage in (1, 2):
    found = [state for of, state in ends if of == stage]
    context[stage] = torch.stack(found).mean(0) if found else torch.zeros_like(ends[0][1])
for stage, question in questions:
    answer = []
    while len(answer) < 64 and tokenizer.eos_token_id not in answer:
        answer.append(int(logits(states(question, answer)[-1], stage).argmax()))
    print(question, tokenizer.decode(answer, skip_special_tokens=True))
"""


def save_readme(folder: Path, family: Family, encoder: Encoder, recipe: CotRecipe, base: str, asked: Asked) -> None:
    full, adapter = recipe.heads.rank == "full", recipe.train == "lora"
    prompt = handover.prompt_in_python(family, recipe, asked)
    asking = ASKING.format(
        weights=WEIGHTS,
        whole="model.get_base_model()" if adapter else "model",
        half=recipe.precision == "bf16",
        prompt=textwrap.indent(prompt, "    ").rstrip(),
        added='heads[f"W.{stage}"] @ z' if full else 'heads[f"B.{stage}"] @ (heads[f"A.{stage}"] @ z)',
    )
    handover.save_readme(folder, family, encoder, recipe, base, asked, (IMPORTS, asking))
