"""Text to token ids and back, by the tokenizer that lies in the model's own folder (transformers' AutoTokenizer, never the network).

Known traps: SmolLM2 pads with its eos token, so padding is told apart by lengths and masks, never by `pad_id`. transformers may advise to
"fix" the regex of a Qwen tokenizer; the advice changes the ids of some texts, so it is not followed. Qwen's tokenizer composes letters
(NFC), so `decode(encode(text))` may differ from `text` in bytes.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl_jax.errors import UserError
from jetrl_jax.models.fields import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with what generation must know about its model."""

    inner: Any  # transformers' tokenizer
    folder: Path
    stop_ids: tuple[int, ...]  # ascending; any of them ends a sequence
    pad_id: int  # an id that the embedding has; what it is never matters
    vocab_size: int  # with added tokens; the model's own vocab_size is often larger
    embedded: int | None  # vocab_size by config.json, where there is one

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the model expects around it (Llama's bos; Qwen has none)."""
        return self._checked(self.inner.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def render_chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> list[int]:
        """Ids of a conversation by the model's chat template, ending where the assistant's answer begins.

        `messages` are objects with `role` and `content`; `options` go to the template (Qwen3's `enable_thinking=False`).
        Errors: `UserError` if there is no template or it refuses the messages.
        """
        if not self.inner.chat_template:
            raise UserError(f"the tokenizer in {self.folder} has no chat template: set data.chat to False, or choose an instruct model")
        try:
            ids = self.inner.apply_chat_template(
                list(messages), **({"add_generation_prompt": True} | options), tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program of the model's, and may raise anything
            raise UserError(f"the chat template in {self.folder} refuses the messages ({error}): {list(messages)!r}") from error
        return self._checked(ids)

    def _checked(self, ids: list[int]) -> list[int]:
        # Out-of-range ids do not fail in an embedding lookup under jit: they silently read something else.
        if self.embedded is not None and max(ids, default=0) >= self.embedded:
            token = self.inner.convert_ids_to_tokens(max(ids))
            raise UserError(
                f"the tokenizer in {self.folder} gives {token!r} the id {max(ids)}, but config.json has vocab_size = {self.embedded}: "
                "tokenizer and weights are of different models"
            )
        return ids


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in a model's folder.

    `stop_ids` is the union of the tokenizer's eos and the `eos_token_id` (an integer or a list) of config.json and generation_config.json:
    Llama 3 and Qwen name their end-of-turn token in only some of these places.
    Errors: `UserError` for a missing or broken tokenizer, and for ids that are no integers.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}): copy the tokenizer's files of the model into it")
    configs = {}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            configs[name] = read_json(folder / name, "fetch the file again")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would tell every user that torch, not needed here, is missing
    from transformers import AutoTokenizer  # here, because it takes seconds to import

    try:
        inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # from three libraries, of many kinds
        raise UserError(f"the tokenizer in {folder} cannot be loaded ({error}): fetch its files again") from error

    stops = set() if inner.eos_token_id is None else {inner.eos_token_id}
    pads = [inner.pad_token_id]
    for name, raw in configs.items():
        stops.update(_ids(folder / name, raw, "eos_token_id"))
        pads.append(raw.get("pad_token_id"))
    embedded = configs.get("config.json", {}).get("vocab_size")
    # A pad token that was added later may have no row in the embedding; some old configs say -1 for none.
    usable = [pad for pad in [*pads, *sorted(stops)] if isinstance(pad, int) and 0 <= pad < (embedded or len(inner))]
    return Tokenizer(inner, folder, tuple(sorted(stops)), usable[0] if usable else 0, len(inner), embedded)


def _ids(path: Path, raw: Mapping[str, Any], field: str) -> list[int]:
    value = raw.get(field)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"{path}: {field} = {value!r} must be a token id or a list of token ids")
    return ids
