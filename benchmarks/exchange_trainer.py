"""A small BERT that Trainer of transformers trains on invented texts; run by exchange_scripts.py."""

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

TEXTS = 4096
TOKENS = 16
WORDS = 500


class Texts(Dataset[dict[str, Any]]):
    """Random words, of which the first one decides the label."""

    def __init__(self) -> None:
        self.words = torch.randint(
            WORDS, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.words[index], "labels": int(self.words[index, 0]) % 2}


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
    )
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(BertForSequenceClassification(config), arguments, train_dataset=Texts()).train()


main()
