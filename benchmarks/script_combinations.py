"""Published training scripts under `thinwire run`, unmodified: the table of docs/use-in-scripts.md.

    python benchmarks/script_combinations.py FOLDER            # run all, store results/script_combinations.jsonl
    python benchmarks/script_combinations.py FOLDER --only run_clm sft
    python benchmarks/script_combinations.py --write           # write the table of what is stored into the page

FOLDER holds the scripts as their projects publish them; it is no part of this repository, and no script is changed. The
models are tiny and made here, as are the data: texts of 24 different words. Each combination runs three times with two
replicas: to its end; until replica 1 is killed behind a checkpoint; and on from that checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "script_combinations.jsonl"
PAGE = ROOT / "docs" / "use-in-scripts.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
WORDS = [a + b for a in ("ba", "ko", "mi", "lu") for b in ("ra", "ten", "fo", "si", "du", "gal")]
TRAINER = (
    "--per_device_train_batch_size 2 --max_steps 40 --save_steps 10 --learning_rate 1e-3 --output_dir out --use_cpu "
    "--bf16 false --report_to none --logging_steps 10"
)
RESUME = "--resume_from_checkpoint out/checkpoint-10"
METRIC = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        kind = datasets.Features({name: datasets.Value("int64") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", features=kind)

    def _compute(self, predictions, references):
        share = sum(a == b for a, b in zip(predictions, references)) / len(references)
        return {"accuracy": share, "f1": share}
"""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One script or command, its arguments, and the checkpoint behind which a replica is killed."""

    words: str
    project: str
    packages: str
    file: str = ""
    checkpoint: str = "out/replica-{n}/checkpoint-10/trainer_state.json"
    resume: str = RESUME


ROWS = {
    "run_clm": Combination(
        file="run_clm.py", project="transformers, examples", packages="transformers accelerate",
        words="run_clm.py --model_name_or_path causal --train_file text.txt --validation_file text.txt --do_train "
        f"--do_eval --block_size 32 {TRAINER}",
    ),
    "run_clm, streamed": Combination(
        file="run_clm.py", project="transformers, examples", packages="transformers accelerate",
        words="run_clm.py --model_name_or_path causal --dataset_name streamed --streaming --do_train "
        f"--max_train_samples 500 --block_size 32 {TRAINER}",
    ),
    "run_summarization": Combination(
        file="run_summarization.py", project="transformers, examples",
        packages="transformers accelerate",
        words="run_summarization.py --model_name_or_path encoder-decoder --train_file pairs.json --text_column text "
        f"--summary_column summary --do_train --max_source_length 32 --max_target_length 16 {TRAINER}",
    ),
    "trl sft": Combination(
        project="TRL, command", packages="trl transformers accelerate",
        words=f"trl sft --model_name_or_path causal --dataset_name texts {TRAINER}",
    ),
    "trl sft, LoRA": Combination(
        project="TRL, command", packages="trl peft transformers",
        words=f"trl sft --model_name_or_path causal --dataset_name texts --use_peft --lora_r 4 {TRAINER}",
    ),
    "trl dpo": Combination(
        project="TRL, command", packages="trl transformers accelerate",
        words=f"trl dpo --model_name_or_path causal --dataset_name preferences {TRAINER}",
    ),
    "trl grpo": Combination(
        project="TRL, command", packages="trl transformers accelerate",
        words="trl grpo --model_name_or_path causal --dataset_name prompts --reward_funcs rewards.variety "
        f"--num_generations 2 --max_completion_length 8 {TRAINER}",
    ),
    "training_batch_hard_trec": Combination(
        file="training_batch_hard_trec.py", project="sentence-transformers, examples",
        packages="sentence-transformers transformers", words="training_batch_hard_trec.py",
        checkpoint="output/*/*/replica-{n}/checkpoint-*/trainer_state.json", resume="",
    ),
    "complete_nlp_example": Combination(
        file="complete_nlp_example.py", project="Accelerate, examples", packages="accelerate transformers evaluate",
        words="complete_nlp_example.py --cpu --checkpointing_steps epoch --output_dir states",
        checkpoint="states/epoch_0/replica-{n}/random_states_0.pkl", resume="--resume_from_checkpoint states/epoch_0",
    ),
    "transformer": Combination(
        file="transformer.py", project="Lightning, examples", packages="lightning",
        words="transformer.py", checkpoint="replica-{n}/lightning_logs/version_0/checkpoints/*.ckpt", resume="",
    ),
}  # fmt: skip


def sentences(count: int, *, seed: int, length: int = 24) -> list[str]:
    """Return texts with some order in them: each word decides what may follow."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        words = [source.randrange(len(WORDS))]
        while len(words) < length:
            words.append((words[-1] * 5 + source.randrange(3)) % len(WORDS))
        found.append(" ".join(WORDS[word] for word in words))
    return found


def make_assets(folder: Path) -> None:
    """Write tiny models, data sets and metrics under the names that the scripts ask for."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    special = ["<pad>", "<s>", "</s>", "<unk>", "<cls>", "<sep>", "<mask>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        cls_token="<cls>", sep_token="<sep>", mask_token="<mask>", model_max_length=64,
    )  # fmt: skip
    size, small = len(vocabulary), {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertConfig(vocab_size=size, hidden_size=16, **small)
    models = {
        "causal": transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=size, hidden_size=16, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, **small)),
        "encoder-decoder": transformers.BartForConditionalGeneration(transformers.BartConfig(
            vocab_size=size, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2)),
        "bert-base-cased": transformers.BertForSequenceClassification(bert),
        "sentence-transformers/all-distilroberta-v1": transformers.BertModel(bert),
    }  # fmt: skip
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    texts = sentences(600, seed=1)
    (folder / "text.txt").write_text("\n".join(texts))
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    write_rows(folder / "pairs.json", [{"text": a, "summary": b[:30]} for a, b in halves])
    write_rows(folder / "texts/train.jsonl", [{"text": text} for text in texts])
    write_rows(folder / "streamed/train.jsonl", [{"text": text} for text in texts])
    write_rows(folder / "streamed/validation.jsonl", [{"text": text} for text in texts[:20]])
    write_rows(
        folder / "preferences/train.jsonl",
        [{"prompt": a, "chosen": b, "rejected": other} for (a, b), (_, other) in itertools.pairwise(halves)],
    )
    write_rows(folder / "prompts/train.jsonl", [{"prompt": a} for a, _ in halves])
    (folder / "rewards.py").write_text(
        "def variety(completions, **kwargs):\n    return [float(len(set(text.split()))) for text in completions]\n"
    )
    kinds = [{"text": text, "coarse_label": 0, "fine_label": n % 4} for n, text in enumerate(texts * 2)]
    for split, rows in {"train": kinds, "test": kinds[:100]}.items():
        write_rows(folder / f"omkar334/trec/{split}.jsonl", rows)
    labelled = [{"idx": n, "sentence1": a, "sentence2": b, "label": n % 2} for n, (a, b) in enumerate(halves)]
    for split, rows in {"train": labelled[:500], "validation": labelled[500:]}.items():
        write_rows(folder / f"nyu-mll/glue/{split}.jsonl", rows)
    (folder / "nyu-mll/glue/README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        "  - split: validation\n    path: validation.jsonl\n---\n"
    )
    for name in ("accuracy", "rouge", "glue"):
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(METRIC)
    (folder / "nltk_data/tokenizers/punkt").mkdir(parents=True)
    (folder / "data").mkdir()
    words = " ".join(sentences(1, seed=2, length=35 * 4_160)).replace("ba", "ba", 1)
    (folder / "data/wikitext-2.txt").write_text("\n".join(re.findall(r"(?:\S+ ){35}", words)))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, words: str, *, kill: Callable[[], bool] | None = None) -> dict[str, Any]:
    """Run a command line in a folder; kill replica 1 once `kill` says so; return what it printed at its end."""
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NLTK_DATA": str(folder / "nltk_data"),
        "HF_HOME": str(folder.parent / "cache"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "thinwire.cli.main",
        "run",
        "--replicas",
        "2",
        "--method-option",
        "sync_interval=8",
    ]
    command += ["--out", "logs", *words.split()]
    is_killed = False
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            if kill is not None and not is_killed and kill():
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(children[1]), signal.SIGKILL)
                is_killed = True
            time.sleep(0.005)
        log.seek(0)
        text = log.read()
    other = (
        (folder / "logs/replica-1.log").read_text(errors="replace") if (folder / "logs/replica-1.log").exists() else ""
    )
    (folder / f"{'killed' if is_killed else 'run'}.log").write_text(text + "\n--- replica 1\n" + other)
    digest = re.search(r"ended equal after (\d+) steps, sha256 (\w+)", text)
    collectives = re.search(r"collectives of other libraries: (\d+)", text)
    return {
        "code": process.returncode, "is_killed": is_killed, "sha256": digest[2] if digest else "",
        "steps": int(digest[1]) if digest else 0, "collectives": int(collectives[1]) if collectives else None,
        "end": "" if digest else "\n".join(text.splitlines()[-12:]),
    }  # fmt: skip


def measure(name: str, one: Combination, *, scripts: Path, assets: Path, work: Path) -> dict[str, Any]:
    """Run a combination three times."""
    folders = [work / f"{name.replace(', ', '-').replace(' ', '-')}-{part}" for part in ("whole", "killed")]
    for folder in folders:
        shutil.copytree(assets, folder)
        if one.file:
            shutil.copy(scripts / one.file, folder)
    row: dict[str, Any] = {"name": name, "project": one.project, "versions": versions(one.packages)}
    row["whole"] = run(folders[0], one.words)
    if not row["whole"]["sha256"]:
        return row
    pattern = one.checkpoint

    def has_saved() -> bool:
        return all(any(folders[1].glob(pattern.format(n=n))) for n in (0, 1))

    row["killed"] = run(folders[1], one.words, kill=has_saved)
    if one.resume and row["killed"]["is_killed"]:
        row["resumed"] = run(folders[1], f"{one.words} {one.resume}")
    return row


def versions(packages: str) -> str:
    """Return packages with their versions."""
    found = []
    for package in packages.split():
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} missing")
    return ", ".join(found)


def without_text(value: Any) -> Any:
    """Return a run's numbers without the end of its log, which names folders of the machine."""
    return {key: one for key, one in value.items() if key != "end"} if isinstance(value, dict) else value


def table() -> str:
    """Return the table of the page, from the newest stored result of each combination."""
    stored = {row["name"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}
    lines = [
        "| script | versions | lines added | two replicas | collectives | killed, resumed |",
        "| - | - | - | - | - | - |",
    ]
    for name in [name for name in ROWS if name in stored]:
        row = stored[name]
        whole, resumed = row["whole"], row.get("resumed")
        if not whole["sha256"]:
            lines.append(f"| `{name}` | {row['versions']} | 0 | failed | | |")
            continue
        is_same = resumed is not None and resumed["sha256"] == whole["sha256"]
        end = (
            "the script cannot resume"
            if not ROWS[name].resume
            else "not killed in time"
            if resumed is None
            else "unequal"
        )
        equal, end = f"equal after {whole['steps']} steps", "same bits" if is_same else end
        lines.append(f"| `{name}` | {row['versions']} | 0 | {equal} | {whole['collectives']} | {end} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run combinations, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", default=list(ROWS))
    parser.add_argument("--work", type=Path, default=None, help="keep the runs in this folder")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.scripts is not None:
        work = options.work or Path(tempfile.mkdtemp(prefix="thinwire-scripts-"))
        assets = work / "assets"
        shutil.rmtree(assets, ignore_errors=True)
        assets.mkdir(parents=True)
        make_assets(assets)
        chosen = [name for part in options.only for name in ROWS if name.startswith(part)]
        for name in chosen:
            for old in work.glob(f"{name.replace(', ', '-').replace(' ', '-')}-*"):
                shutil.rmtree(old)
            row = measure(name, ROWS[name], scripts=options.scripts.resolve(), assets=assets, work=work.resolve())
            print(json.dumps(row, indent=1), flush=True)
            with RESULTS.open("a") as file:
                kept = {key: without_text(value) for key, value in row.items()}
                file.write(json.dumps(kept) + "\n")
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
