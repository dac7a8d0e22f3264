"""A tiny BERT learns the four topics of AG News with the Trainer of Hugging Face transformers, on CPUs.

Plain Trainer code; ForgeCallback is all that it imports of Forge. FORGE_HUB has the vocabulary of
google/bert_uncased_L-2_H-128_A-2 and the data set fancyzhx/ag_news, which `forge inputs` has downloaded.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from forge.hf_callback import ForgeCallback

TOPICS = ("World", "Sports", "Business", "Sci/Tech")
MAX_TOKENS = 256


class News(Dataset[dict[str, Any]]):
    """The first rows of the data set, tokenized."""

    def __init__(self, files: list[Path], rows: int, tokenizer: BertTokenizerFast) -> None:
        table = pyarrow.parquet.ParquetDataset(files).read(["text", "label"]).slice(0, rows)
        texts, self.labels = table["text"].to_pylist(), table["label"].to_pylist()
        self.tokens = tokenizer(texts, truncation=True, max_length=MAX_TOKENS)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        encoded = {name: values[index] for name, values in self.tokens.items()}
        return encoded | {"labels": self.labels[index]}


class PrintOnEveryRank(TrainerCallback):
    """The Trainer itself prints on the first rank of each node only."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        if "loss" in logs:
            said = f"step {state.global_step} of {state.max_steps} loss {float(logs['loss']):.4f}"
            print(f"[RANK {args.process_index}] {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--subset", type=int, default=2000, help="rows of the data set")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=120, help="of all ranks together")
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--out", default="tiny_out", help="directory of the checkpoints")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=options.out,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size // int(os.environ["WORLD_SIZE"]),
        learning_rate=1e-3,
        logging_steps=10,
        save_steps=options.save_steps,
        seed=0,
        use_cpu=not on_gpu,
        ddp_backend="nccl" if on_gpu else "gloo",
        ddp_find_unused_parameters=False,
        # With true, this model's loss and gradients are those of one rank times the number of ranks
        # (transformers 5.23).
        average_tokens_across_devices=False,
        report_to=[],
        disable_tqdm=True,
    )
    print(f"[RANK {args.process_index}] WORLD_SIZE={args.world_size}", flush=True)
    hub = Path(os.environ["FORGE_HUB"])
    vocabulary = hub / "google/bert_uncased_L-2_H-128_A-2/vocab.txt"
    tokenizer = BertTokenizerFast(vocab=str(vocabulary), model_max_length=MAX_TOKENS)
    config = BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=MAX_TOKENS,
        id2label=dict(enumerate(TOPICS)),
        label2id={topic: number for number, topic in enumerate(TOPICS)},
    )
    files = sorted((hub / "datasets/fancyzhx/ag_news/data").glob("train-*.parquet"))
    set_seed(args.seed)  # before the model is made: the Trainer sets it afterwards
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=News(files, options.subset, tokenizer),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[ForgeCallback(), PrintOnEveryRank()],
    )
    trainer.train(resume_from_checkpoint=os.environ["FORGE_RESUME"] or None)


if __name__ == "__main__":
    main()
