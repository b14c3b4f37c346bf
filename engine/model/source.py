"""Opening a model by what the user calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.model.card import TokenizerCard
from engine.model.cuda_random import RANDOM_PREFIX, random_spec
from engine.model.fetch import fetch_default_model
from engine.model.pace import Pace
from engine.model.scripted import read_strings, scripted_card, scripted_spec
from engine.model.spec import ModelError, ModelSpec, ReadWeight, Weight, read_device_weights

DEFAULT_MODEL = "smollm2"
PACED_PREFIX = "paced:"
SCRIPTED_MODEL = "scripted"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An open model: its numbers, its tokenizer, and its weights on demand."""

    spec: ModelSpec
    card: TokenizerCard
    read: ReadWeight | None = None
    """Gives a canonical weight by name; None: the model has no weights (scripted)."""
    pace: Pace | None = None
    """How long its steps take; None: as long as they do."""

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """The device weights, one after the other (``spec.device_weights`` has the shapes)."""
        return iter(()) if self.read is None else read_device_weights(self.spec, self.read)


def open_model(model: str) -> ModelSource:
    """Open ``smollm2``, ``scripted``, ``scripted:FILE``, ``paced:PROFILE``, ``random:SHAPE``, a
    GGUF file or a Hugging Face folder.

    Downloads the default model if it is not in the cache. Raises ModelError in one sentence.
    """
    if model == SCRIPTED_MODEL:
        return _scripted(model, ())
    if model.startswith(SCRIPTED_MODEL + ":"):
        return _scripted(SCRIPTED_MODEL, read_strings(Path(model.partition(":")[2]).expanduser()))
    if model.startswith(PACED_PREFIX):
        return _paced(model)
    if model.startswith(RANDOM_PREFIX):
        return _random(model)
    if model == DEFAULT_MODEL:
        return _gguf(fetch_default_model(), DEFAULT_MODEL)
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _gguf(path, None)
    raise ModelError(
        f"no model {model!r}: it is neither {DEFAULT_MODEL}, {SCRIPTED_MODEL} or "
        f"{SCRIPTED_MODEL}:FILE, nor a GGUF file or a folder that exists."
    )


def _paced(model: str) -> ModelSource:
    """The scripted model at a GPU's pace."""
    pace = Pace.load(model.removeprefix(PACED_PREFIX))
    return dataclasses.replace(_scripted(f"{PACED_PREFIX}{pace.name}", ()), pace=pace)


def _random(model: str) -> ModelSource:
    """Bytes as text, for prompts; what it answers means nothing. No ids end an answer."""
    spec = dataclasses.replace(random_spec(model), eos_ids=())
    card = dataclasses.replace(
        scripted_card(()), vocab_size=spec.vocab_size, eos_ids=(), add_bos=False
    )
    return ModelSource(spec, card)


def _scripted(name: str, strings: tuple[str, ...]) -> ModelSource:
    return ModelSource(scripted_spec(name, strings), scripted_card(strings))


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn what a damaged file does to its readers into one sentence."""
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"{path} is damaged or not as its kind should be ({type(error).__name__}: {reason}); "
            "get it again."
        ) from error


def _named_read(path: Path, read: ReadWeight) -> ReadWeight:
    def read_named(name: str) -> Weight:
        with _damage_named(path):
            return read(name)

    return read_named


def _gguf(path: Path, name: str | None) -> ModelSource:
    # Imported on use: who serves the scripted model needs no reader of weights.
    from engine.model.gguf import GgufFile
    from engine.model.gguf_tokenizer import gguf_card

    with _damage_named(path):
        file = GgufFile(path, name)
        return ModelSource(file.spec, gguf_card(file), _named_read(path, file.read))


def _folder(path: Path) -> ModelSource:
    from engine.model.folder_tokenizer import folder_card
    from engine.model.safetensors import SafetensorsFolder

    with _damage_named(path):
        folder = SafetensorsFolder(path)
        card = folder_card(path, folder.spec)
        return ModelSource(folder.spec, card, _named_read(path, folder.read))
