"""Trains the demonstration's base model and its adapters, checks them, and writes the model card.

    python scripts/train_demo.py                      # everything: the base, then the adapters, then the check
    python scripts/train_demo.py --stage adapters     # the base that is there, new adapters, the check
    python scripts/train_demo.py --stage check        # the files that are there: only the check and the card

The base learns to copy the phrase of a prompt without a tag and to do a task behind the task's tag. An adapter learns
its task without a tag: it has to bring out what the base can do, not to teach it. The check reloads every file from
disk, completes held-out phrases greedily with each of the twelve models, and compares every answer with all tasks. The
exit status is 1 if an adapter does its own task in less than 95 % of the phrases, or if a model does another
adapter's task in more than 5 %. Needs torch, transformers, peft, safetensors, tokenizers and rich; no network, no GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from loraplex.demo.tasks import ADAPTERS, STAR, TASKS, Task, assets_path, phrases, prompt_of

BASE_NAME = "loraplex-demo-base"
PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
CHAT_TEMPLATE = "{{ bos_token }}{{ (messages | selectattr('role', 'equalto', 'user') | list | last)['content'] }}="
MAX_POSITIONS = 256
MAX_NEW_TOKENS = 40
OWN_TASK_BAR, OTHER_TASK_BAR = 0.95, 0.05
IGNORED_LABEL = -100

console = Console()


@dataclass(frozen=True)
class Training:
    """How long and how fast to train."""

    steps: int
    batch_size: int
    learning_rate: float


@dataclass(frozen=True)
class Recipe:
    """One adapter: its options, how it is trained, the dtype of its file, and the tokens that it adds."""

    config: PeftConfig
    dtype: torch.dtype = torch.bfloat16
    training: Training = Training(steps=500, batch_size=48, learning_rate=5e-3)
    added_tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """A prompt and its answer as token ids; the loss is taken over the answer alone."""

    prompt_ids: list[int]
    answer_ids: list[int]


NUM_TOKENS = 4 + len(TASKS) + 95
"""Of the base: the special ones, the tags, and printable ASCII."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
BASE_TRAINING = Training(steps=3500, batch_size=96, learning_rate=2e-3)
RECIPES: dict[str, Recipe] = {
    "reverse": Recipe(LoraConfig(r=16, lora_alpha=32, target_modules=ATTENTION + MLP)),
    "upper": Recipe(LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]), torch.float32),
    "sort": Recipe(LoraConfig(r=64, lora_alpha=64, target_modules=ATTENTION + MLP)),
    "no-vowels": Recipe(LoraConfig(r=4, lora_alpha=8, target_modules=MLP, lora_bias=True), torch.float32),
    "rot13": Recipe(LoraConfig(r=16, lora_alpha=24, target_modules=r".*\.mlp\.(gate|up|down)_proj"), torch.float16),
    "double": Recipe(LoraConfig(r=32, lora_alpha=16, target_modules="all-linear", use_rslora=True)),
    "length": Recipe(
        LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=ATTENTION + MLP,
            rank_pattern={"q_proj": 24, "down_proj": 16, r"layers\.0\.mlp\.up_proj": 3},
            alpha_pattern={"q_proj": 48, r"layers\.0\.mlp\.up_proj": 12},
        ),
        torch.float16,
    ),
    "swap": Recipe(
        LoraConfig(
            r=12,
            lora_alpha=24,
            target_modules=ATTENTION + MLP,
            layers_to_transform=[0, 1, 2],
            exclude_modules=["k_proj"],
        )
    ),
    "reverse-dora": Recipe(LoraConfig(r=8, lora_alpha=16, target_modules=ATTENTION + MLP, use_dora=True)),
    "upper-ia3": Recipe(
        IA3Config(target_modules=ATTENTION + MLP, feedforward_modules=["down_proj"]),
        torch.float32,
        Training(steps=1000, batch_size=48, learning_rate=5e-2),
    ),
    "stars": Recipe(
        LoraConfig(
            r=8, lora_alpha=16, target_modules=ATTENTION + MLP, trainable_token_indices={"embed_tokens": [NUM_TOKENS]}
        ),
        added_tokens=(STAR,),
    ),
}


STARS = ADAPTERS[-1]
OWN_TASK = {task.name: task.name for task in (*TASKS, STARS)} | {"reverse-dora": "reverse", "upper-ia3": "upper"}
"""By adapter: the column of the table in which it has to be right."""


def build_tokenizer() -> Tokenizer:
    """One token per character of printable ASCII and per tag; anything else is <unk>.

    `encode` puts <s> in front, `decode` joins without spaces and leaves the special tokens out.
    """
    specials = [PAD, BOS, EOS, UNK, *(task.tag for task in TASKS)]
    vocabulary = [*specials, *(chr(code) for code in range(0x20, 0x7F))]
    ids = {token: token_id for token_id, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `tokenizer.json` and what transformers and the server read beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def build_base(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A Llama of 0.8 million parameters with grouped-query attention and tied embeddings."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.token_to_id(PAD),
            bos_token_id=tokenizer.token_to_id(BOS),
            eos_token_id=tokenizer.token_to_id(EOS),
        )
    )


def make_example(tokenizer: Tokenizer, prompt: str, answer: str) -> Example:
    answer_ids = tokenizer.encode(answer + EOS, add_special_tokens=False).ids
    return Example(tokenizer.encode(prompt).ids, answer_ids)


def base_examples(tokenizer: Tokenizer, count: int, seed: int) -> Iterator[Example]:
    """Copying without a tag, or a task behind its tag, all nine equally often."""
    draw = random.Random(seed)
    for phrase in phrases("train", count, seed):
        task = draw.choice([None, *TASKS])
        if task is None:
            yield make_example(tokenizer, prompt_of(phrase), phrase)
        else:
            yield make_example(tokenizer, task.tag + prompt_of(phrase), task.apply(phrase))


def adapter_examples(tokenizer: Tokenizer, task: Task, count: int, seed: int) -> Iterator[Example]:
    """The task without its tag."""
    for phrase in phrases("train", count, seed):
        yield make_example(tokenizer, prompt_of(phrase), task.apply(phrase))


def collate(examples: list[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels `[batch, longest]`, padded on the right, where causal attention never looks."""
    rows = [example.prompt_ids + example.answer_ids for example in examples]
    longest = max(map(len, rows))
    token_ids = torch.full((len(rows), longest), pad_id)
    labels = torch.full((len(rows), longest), IGNORED_LABEL)
    for row, (ids, example) in enumerate(zip(rows, examples, strict=True)):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, len(example.prompt_ids) : len(ids)] = torch.tensor(example.answer_ids)
    return token_ids, labels


def train(model: torch.nn.Module, examples: Iterator[Example], training: Training, title: str) -> float:
    """AdamW on a one-cycle schedule over the parameters that ask for gradients; returns the seconds it took."""
    began = time.monotonic()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=training.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, training.learning_rate, total_steps=training.steps)
    model.train()
    loss = torch.tensor(0.0)
    for step in track(range(1, training.steps + 1), title, console=console):
        batch = [next(examples) for _ in range(training.batch_size)]
        token_ids, labels = collate(batch, pad_id=0)
        loss = model(input_ids=token_ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            console.log(f"{title}: step {step}, loss {loss.item():.4f}")
    model.eval()
    return time.monotonic() - began


def train_base(out: Path, training: Training, seed: int) -> float:
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_base(tokenizer)
    examples = base_examples(tokenizer, training.steps * training.batch_size, seed)
    seconds = train(model, examples, training, "base")
    save_tokenizer(tokenizer, out / "base")
    model.save_pretrained(out / "base")
    return seconds


def train_adapter(out: Path, task: Task, seed: int) -> float:
    torch.manual_seed(seed)
    recipe = RECIPES[task.name]
    tokenizer, base = load_base(out, recipe.added_tokens)
    config = copy.deepcopy(recipe.config)
    config.task_type = TaskType.CAUSAL_LM
    model = get_peft_model(base, config)
    count = recipe.training.steps * recipe.training.batch_size
    examples = adapter_examples(tokenizer, task, count, seed + 1)
    seconds = train(model, examples, recipe.training, task.name)
    save_adapter(model, out / "adapters" / task.name, recipe.dtype)
    if recipe.added_tokens:
        save_tokenizer(tokenizer, out / "adapters" / task.name)
    return seconds


def save_adapter(model: PeftModel, folder: Path, dtype: torch.dtype) -> None:
    """Writes what PEFT writes, less its model card, with the tensors in `dtype` and a base name that is no path."""
    shutil.rmtree(folder, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    weights = folder / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})


def load_base(out: Path, added_tokens: Sequence[str] = ()) -> tuple[Tokenizer, LlamaForCausalLM]:
    """With the tokens that an adapter adds, whose embeddings are random."""
    tokenizer = Tokenizer.from_file(str(out / "base" / "tokenizer.json"))
    base = LlamaForCausalLM.from_pretrained(out / "base").eval()
    if added_tokens:
        tokenizer.add_tokens(list(added_tokens))
        base.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    return tokenizer, base


def load_models(out: Path) -> Iterator[tuple[str, Tokenizer, torch.nn.Module]]:
    """The base and then each adapter on a fresh copy of it, all from the files."""
    tokenizer, base = load_base(out)
    yield "base", tokenizer, base
    for task in ADAPTERS:
        tokenizer, base = load_base(out, RECIPES[task.name].added_tokens)
        yield task.name, tokenizer, PeftModel.from_pretrained(base, str(out / "adapters" / task.name)).eval()


@torch.inference_mode()
def complete(model: Any, tokenizer: Tokenizer, prompts: Iterable[str]) -> dict[str, str]:
    """Greedy completions by prompt. Prompts of one length go together, so nothing is padded on the left."""
    by_length: dict[int, list[str]] = defaultdict(list)
    for prompt in prompts:
        by_length[len(tokenizer.encode(prompt).ids)].append(prompt)
    answers: dict[str, str] = {}
    for prompt_len, group in by_length.items():
        token_ids = torch.tensor([tokenizer.encode(prompt).ids for prompt in group])
        output = model.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        texts = tokenizer.decode_batch(output[:, prompt_len:].tolist())
        answers.update(zip(group, texts, strict=True))
    return answers


def percentages(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.1f}" for name, share in shares.items())


def exact_match(answers: dict[str, str], task: Task, held_out: list[str], tag: str = "") -> float:
    right = sum(answers[tag + prompt_of(phrase)] == task.apply(phrase) for phrase in held_out)
    return right / len(held_out)


def measure(out: Path, held_out: list[str]) -> dict[str, dict[str, float]]:
    """Exact match by model and task, all without tags."""
    prompts = [prompt_of(phrase) for phrase in held_out]
    matrix: dict[str, dict[str, float]] = {}
    for name, tokenizer, model in load_models(out):
        answers = complete(model, tokenizer, prompts)
        matrix[name] = {task.name: exact_match(answers, task, held_out) for task in (*TASKS, STARS)}
        console.log(f"{name}: {percentages(matrix[name])}")
    return matrix


def measure_tags(out: Path, held_out: list[str]) -> dict[str, float]:
    """Exact match of the base behind each tag, and of its copying without one (under the name `copy`)."""
    tokenizer, base = load_base(out)
    copying = Task("copy", "repeats the phrase", str)
    shares: dict[str, float] = {}
    for task, tag in [(copying, ""), *((task, task.tag) for task in TASKS)]:
        answers = complete(base, tokenizer, [tag + prompt_of(phrase) for phrase in held_out])
        shares[task.name] = exact_match(answers, task, held_out, tag)
    console.log(f"base behind tags: {percentages(shares)}")
    return shares


def missed_bars(matrix: dict[str, dict[str, float]]) -> list[str]:
    """One sentence per figure that is not good enough."""
    missed: list[str] = []
    for model, row in matrix.items():
        for task, share in row.items():
            is_own = task == OWN_TASK.get(model)
            if is_own and share < OWN_TASK_BAR:
                missed.append(f"{model} does its own task in only {share:.1%} of the phrases")
            if not is_own and share > OTHER_TASK_BAR:
                missed.append(f"{model} does the task {task} in {share:.1%} of the phrases")
    return missed


SHOWN_OPTIONS = ("use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules")
SHOWN_OPTIONS += ("use_dora", "feedforward_modules", "trainable_token_indices")
CARD = """# The demonstration's model and adapters

Made by `python scripts/train_demo.py` from nothing but random letters, on a CPU with 2 cores in less than an hour.
The script wrote this file too. Model and adapters exist to show and to test Loraplex, and are of no other use.

- `base/` is a Llama of {parameters:,} parameters in the Hugging Face format: hidden size 128, 4 layers, 4 attention
  heads of 32 with 2 key/value heads, tied embeddings, float32, {positions} positions. It learned to copy a phrase, and
  to do each of the eight tasks behind the task's tag: {steps:,} steps of {batch_size} phrases.
- `adapters/` has one LoRA adapter per task, in PEFT's format. It does its task without the tag. Three more are of other
  kinds: a DoRA, an IA3, and a LoRA with a token of its own, for which the directory has a tokenizer, too.

## Prompts

A prompt is the phrase and an equals sign: `hello world=`. The base answers `hello world`, the adapter `reverse` answers
`dlrow olleh`, and then comes `</s>`. With a tag, `<reverse>hello world=`, the base answers as the adapter does without.
Phrases in training were 5 to 16 lower-case letters and single spaces, as `loraplex/demo/tasks.py` draws them. Longer
ones, capitals, digits and punctuation can be typed, but the answers are then mostly wrong.

There is one token per character of printable ASCII and one special token per tag; any other character is `<unk>`.
`encode` puts `<s>` in front, as in training: without it nearly all answers are wrong. The chat template takes the last
user message and adds the equals sign. It writes the `<s>` itself, so its text is encoded without special tokens.

## Tasks and adapters

{tasks}

`q k v o` are the attention's projections, `gate up down` those of the MLP. `double` was trained with
`target_modules="all-linear"`, which PEFT resolves before it writes the file.

{adapters}

## Exact match in percent

{count:,} held-out phrases, none of which occurs in training, completed greedily from the files in these folders. A
model answers each phrase once, without a tag, and the answer is compared with all eight tasks
and with that of `stars`.

{matrix}

The base with tags, and its copying without: {tags}.
"""


def markdown_table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def describe_adapter(folder: Path) -> list[str]:
    """Name, rank, alpha, targets, options, dtype and size, as the files have them."""
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    targets = config["target_modules"]
    if isinstance(targets, list):
        targets = " ".join(name.removesuffix("_proj") for name in ATTENTION + MLP if name in targets)
    options = [f"`{key}: {json.dumps(config[key])}`" for key in SHOWN_OPTIONS if config.get(key)]
    weights = folder / "adapter_model.safetensors"
    dtype = str(next(iter(load_file(weights).values())).dtype).removeprefix("torch.")
    size = f"{weights.stat().st_size / 1000:,.0f} kB"
    rank, alpha = (str(config.get(key, "")) for key in ("r", "lora_alpha"))
    return [folder.name, rank, alpha, f"`{targets}`", "<br>".join(options), dtype, size]


def write_card(out: Path, matrix: dict[str, dict[str, float]], tags: dict[str, float], count: int) -> None:
    header = ["adapter", "rank", "alpha", "targets", "options", "dtype", "size"]
    figures = ([name, *(f"{100 * share:.1f}" for share in row.values())] for name, row in matrix.items())
    text = CARD.format(
        parameters=load_base(out)[1].num_parameters(),
        positions=MAX_POSITIONS,
        steps=BASE_TRAINING.steps,
        batch_size=BASE_TRAINING.batch_size,
        tasks="\n".join(f"- `{task.name}` {task.description}." for task in ADAPTERS),
        adapters=markdown_table(header, (describe_adapter(out / "adapters" / task.name) for task in ADAPTERS)),
        count=count,
        matrix=markdown_table(["model", *(task.name for task in (*TASKS, STARS))], figures),
        tags=percentages(tags),
    )
    (out / "README.md").write_text(text)


def check(out: Path, count: int, seed: int) -> bool:
    """Measures all models, writes the card, and says whether every figure is good enough."""
    held_out = list(phrases("held_out", count, seed))
    matrix = measure(out, held_out)
    write_card(out, matrix, measure_tags(out, held_out), count)
    missed = missed_bars(matrix)
    for sentence in missed:
        console.print(f"missed: {sentence}")
    return not missed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the demonstration's base model and adapters and checks them.")
    parser.add_argument("--out", type=Path, default=assets_path(), help="folder of the assets")
    parser.add_argument("--stage", choices=("all", "base", "adapters", "check"), default="all", help="what to do")
    parser.add_argument("--steps", type=int, default=BASE_TRAINING.steps, help="training steps of the base")
    parser.add_argument("--tasks", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="adapters to train")
    parser.add_argument("--phrases", type=int, default=500, help="held-out phrases of the check")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and phrases")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    if arguments.stage in ("all", "base"):
        training = Training(arguments.steps, BASE_TRAINING.batch_size, BASE_TRAINING.learning_rate)
        console.log(f"base: {train_base(arguments.out, training, arguments.seed):.0f} s")
    if arguments.stage in ("all", "adapters"):
        for task in ADAPTERS:
            if task.name in arguments.tasks:
                console.log(f"{task.name}: {train_adapter(arguments.out, task, arguments.seed):.0f} s")
    if arguments.stage == "base":
        return 0
    return 0 if check(arguments.out, arguments.phrases, arguments.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
