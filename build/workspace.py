"""The folders of the build, and the corpus as a training run reads it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from build.corpus import Corpus, check_corpus, load_corpus
from build.data import Tokens, cached_stream
from build.errors import BuildError
from build.tokenizer import load_tokenizer

#: Help of the option --any-corpus.
ANY_CORPUS_HELP = "accept another standard library than the recorded one"
MODELS = Path(__file__).resolve().parent.parent / "models"


@dataclass(frozen=True)
class Workspace:
    """The models folder; unpublished files are in its ignored folder `.train`."""

    models: Path = MODELS

    @property
    def scratch(self) -> Path:
        """Folder of checkpoints and token streams."""
        return self.models / ".train"

    def checkpoint(self, name: str) -> Path:
        """Return the checkpoint of the model `name`."""
        return self.scratch / name / "checkpoint.pt"

    def recorded_corpus(self, name: str) -> str | None:
        """Return the SHA-256 of the corpus of the published model `name`, None if there is no such model."""
        provenance = self.models / name / "provenance.json"
        if not provenance.exists():
            return None
        recorded: str = json.loads(provenance.read_text())["corpus"]["sha256"]
        return recorded

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of all demo models."""
        if not (self.models / "target" / "tokenizer.json").exists():
            raise BuildError("there is no tokenizer in models/target; `python -m build.models` makes it")
        return load_tokenizer(self.models / "target")


def publish_folder(new: Path, published: Path) -> None:
    """Move `new` to `published`; readers find the old or the new folder, except for one instant in between.

    A process that has mapped the files of the old folder keeps them.
    """
    old = new.with_name(f"{new.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if published.exists():
        published.rename(old)
    new.rename(published)
    shutil.rmtree(old, ignore_errors=True)


def load_model(folder: Path, device: str) -> LlamaForCausalLM:
    """Load a published model in float32, for measuring or distilling."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.nn.Module.to(model, device)
    return model.eval()


@dataclass(frozen=True)
class TrainingText:
    """The corpus as token streams, (n,) each."""

    corpus: Corpus
    train: Tokens
    held_out: Tokens


def training_text(workspace: Workspace, name: str, any_corpus: bool) -> TrainingText:
    """Load, check and encode the corpus; the streams are cached under the corpus's hash."""
    corpus = load_corpus()
    check_corpus(corpus, workspace.recorded_corpus(name), any_corpus)
    tokenizer = workspace.tokenizer()
    folder = workspace.scratch / f"tokens-{corpus.sha256[:12]}"
    return TrainingText(
        corpus,
        cached_stream(folder / "train.npy", tokenizer, corpus.train),
        cached_stream(folder / "held_out.npy", tokenizer, corpus.held_out),
    )
