"""The same passage behind a system prompt, behind its paraphrase and behind an unrelated one: how far apart keys and values are."""

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.sequential.shared import cache_argument, digits
from kvtheory.models.capture import capture, encode
from kvtheory.models.texts import text
from kvtheory.workload import PARAPHRASES

PASSAGE, TOKENS, PASSAGES = "moby-dick", 32, 2
#: beside those of the workload: openings that mean the same in other words, each pair about a matter of its own
MORE = (
    ("Translate what follows into French .", "Give the French version of the text below ."),
    ("Write a short poem about the sea .", "Compose a few verses on the ocean ."),
    ("List the main ideas as bullet points .", "Enumerate the key thoughts in a bulleted list ."),
    ("Fix all spelling errors , and change nothing else .", "Correct every misspelt word ; leave the rest as it is ."),
    ("You are a doctor who answers questions about health .", "As a physician , reply to medical queries ."),
    ("Decide whether this review is positive or negative .", "Classify the sentiment of the comment below as good or bad ."),
    ("Solve the problem step by step .", "Work out the answer , showing each stage ."),
    ("Tell a joke that a child would understand .", "Say something funny for small kids ."),
    ("Name the capital city of each country mentioned .", "For every nation in the text , give its seat of government ."),
    ("Turn this into a formal letter .", "Rewrite the following as official correspondence ."),
    ("Find the security holes in this program .", "Which parts of the code below could be attacked ?"),
    ("You are a chef . Suggest a recipe .", "As a cook , propose a dish to prepare ."),
    ("Which words in this text are verbs ?", "Pick out all terms below that denote an action ."),
    ("Draw the family tree of the people named .", "Show how those mentioned are related to each other ."),
    ("How would a lawyer read this contract ?", "Give the legal interpretation of the agreement below ."),
    ("Choose a title for the story .", "What should this tale be called ?"),
    ("Count the commas in the next paragraph .", "Say how often a comma occurs in the passage below ."),
    ("Imagine you are a pirate , and talk like one .", "Reply in the manner of a buccaneer ."),
    ("Is there anything rude in this message ?", "Check the note below for offensive language ."),
    ("Guess the year in which this was written .", "Estimate when the following text dates from ."),
    ("Describe the weather in the scene .", "What is the climate like in this extract ?"),
    ("Put the events into the order of time .", "Arrange what happens chronologically ."),
    ("My computer is slow . What can I do ?", "How do I make a sluggish PC run faster ?"),
    ("Teach me to play chess .", "I want to learn the rules of the game of kings ."),
    ("Plan a holiday of three days in Rome .", "Make an itinerary for a long weekend in the Italian capital ."),
    ("Convert all measures to metric units .", "Replace feet and pounds by metres and kilograms ."),
    ("Who is telling the story ?", "Identify the narrator of the passage ."),
    ("Help me to calm down before an exam .", "I am nervous about a test ; how can I relax ?"),
)  # fmt: skip
PAIRS = (*PARAPHRASES, *MORE)


def measure(model, tokenizer):
    passages = np.asarray(encode(tokenizer, text(PASSAGE)[:4000]))[: TOKENS * PASSAGES].reshape(PASSAGES, TOKENS)
    prompts = [[np.asarray(encode(tokenizer, p + " ")) for p in pair] for pair in PAIRS]
    ropes = [layer.rope for layer in capture(model, None, passages[0], query_positions=[0])]
    # written[prompt][version][passage]: of each layer (tokens, numbers) keys before RoPE, and values
    written = [[[behind(model, ropes, p, x) for x in passages] for p in pair] for pair in prompts]
    rows = {"paraphrase": [], "unrelated": [], "other_tokens": []}
    others, common = [], []
    for i, pair in enumerate(written):
        k, version = unrelated(prompts, i)
        others.append([k, version])
        common.append([literal(prompts[i][0], other) for other in (prompts[i][1], prompts[k][version])])
        for j in range(PASSAGES):
            rows["paraphrase"].append(apart(pair[0][j], pair[1][j]))
            rows["unrelated"].append(apart(pair[0][j], written[k][version][j]))
            rows["other_tokens"].append(apart(pair[0][j], pair[0][(j + 1) % PASSAGES]))
    return {
        "text": PASSAGE,
        "tokens": TOKENS,
        "passages": PASSAGES,
        "prompts": [list(pair) for pair in PAIRS],
        "prompt_tokens": [[len(p) for p in pair] for pair in prompts],
        "unrelated_prompt": others,
        "literal_prefix_tokens": common,
        "note": "squared distance of keys (before RoPE) and values of one passage behind two prompts, over the sum of both variances about their means; by layer; rows: "
        "prompt pairs times passages; unrelated_prompt: the one of another pair, and which of its two, whose length is nearest to the paraphrase's; "
        "literal_prefix_tokens: what the first prompt has in common with its paraphrase, with the unrelated one; "
        "other_tokens: two passages behind one prompt, token by token",
        "keys": {name: digits([[k for k, _ in row] for row in found]) for name, found in rows.items()},
        "values": {name: digits([[v for _, v in row] for row in found]) for name, found in rows.items()},
    }


def unrelated(prompts, own):
    """(pair, version) of the prompt of another pair whose length is nearest to that of own's paraphrase; the next ones behind it first."""
    wanted, count = len(prompts[own][1]), len(prompts)
    found = [((own + step) % count, version) for step in range(1, count) for version in (0, 1)]
    return min(found, key=lambda at: abs(len(prompts[at[0]][at[1]]) - wanted))


def literal(one, two):
    """Tokens that two prompts have in common at their beginning."""
    return int(np.argmin([*(a == b for a, b in zip(one, two)), False]))


def behind(model, ropes, prompt, passage):
    cache, tokens = DynamicCache(), np.concatenate([prompt, passage])
    with torch.inference_mode():
        model.base_model(input_ids=torch.tensor(tokens)[None], use_cache=True, **{cache_argument(model): cache})
    positions, own = np.arange(len(tokens)), slice(len(prompt), None)
    found = []
    for rope, layer in zip(ropes, cache.layers):
        keys, values = (x[0].double().numpy() for x in (layer.keys, layer.values))
        keys = keys if rope is None else rope.undo(keys, positions)
        found.append(tuple(x[:, own].transpose(1, 0, 2).reshape(len(passage), -1) for x in (keys, values)))
    return found


def apart(one, two):
    """Of each layer, keys and values: sum |x - y|^2 / (sum |x - mean|^2 + sum |y - mean|^2); 1 for independent ones of one mean."""
    return [
        tuple(
            float(((x - y) ** 2).sum() / sum(((z - z.mean(axis=0)) ** 2).sum() for z in (x, y)))
            for x, y in zip(a, b, strict=True)
        )
        for a, b in zip(one, two, strict=True)
    ]
