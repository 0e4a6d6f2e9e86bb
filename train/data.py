"""From examples to prompts: template, tokens, the length limit, and an order that one integer resumes."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsIndex

import numpy as np

from jetrl_jax.errors import UserError, unknown
from jetrl_jax.train.tasks import Example, Message

TOO_LONG = ("drop", "truncate", "stop")
PLACEHOLDER = "{prompt}"


class PromptTokenizer(Protocol):
    """What is asked of a tokenizer here; `models/tokenizer.py` has the real one."""

    def encode(self, text: str, /) -> list[int]: ...
    def render_chat(self, messages: list[Message], /) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    """An example with the tokens that the policy is given."""

    ids: tuple[int, ...]
    example: Example

    @property
    def answer(self) -> str:
        return self.example.answer


@dataclass(frozen=True)
class Counts:
    """total = kept + dropped; the truncated ones are among the kept."""

    total: int
    kept: int
    dropped: int
    truncated: int


class PromptStream:
    """The prompts of a run, in an endless order that depends on (seed, position) alone.

    template: text with "{prompt}" in it, put around the example's text (of a chat, around its last user message); other braces,
      as in `\\boxed{}`, are left alone. system: a system message in front; without chat, a first paragraph.
    too_long: what becomes of a prompt over max_prompt_length tokens. "drop" leaves it out. "truncate" takes characters off the
      *front of the example's own text* until it fits: what is asked, and the cue to answer, stand at the end, and template, system
      text, chat markup and a leading BOS stay whole (cutting tokens would take those first); dropped if not one character fits.
      "stop" raises UserError. `counts` says how many of each.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: PromptTokenizer, *, max_prompt_length: int, too_long: str = "drop",
                 template: str | None = None, system: str | None = None, chat: bool = True, shuffle: bool = True, seed: int = 0):
        if too_long not in TOO_LONG:
            raise unknown("data.too_long", too_long, TOO_LONG)
        if max_prompt_length < 1:
            raise UserError(f"data.max_prompt_length={max_prompt_length} must be at least 1 token")
        if template is not None and PLACEHOLDER not in template:
            raise UserError(f"data.template={template!r} has no {PLACEHOLDER}; put it where the question belongs, or unset the template")
        if seed < 0:
            raise UserError(f"seed={seed} must not be negative")
        if not examples:
            raise UserError("the data set has no examples")
        self._tokenizer, self._template, self._system, self._chat = tokenizer, template, system, chat
        self._limit, self._shuffle, self._seed = max_prompt_length, shuffle, seed
        self._prompts: list[Prompt] = []
        truncated, shortest = 0, None
        for number, example in enumerate(examples, 1):
            ids = self._ids(example, number)
            length = len(ids)
            if length > max_prompt_length:
                shortest = min(length, shortest or length)
                if too_long == "stop":
                    raise UserError(f"the prompt of example {number} has {length} tokens, more than data.max_prompt_length="
                                    f"{max_prompt_length}; raise the limit, or set data.too_long to 'drop' or 'truncate'")
                ids = self._truncated(example, number) if too_long == "truncate" else []
                truncated += bool(ids)
            if ids:
                self._prompts.append(Prompt(tuple(ids), example))
        if not self._prompts:
            cause = "and what stands around them leaves no room to truncate " if too_long == "truncate" else ""
            raise UserError(f"all {len(examples)} prompts are longer than data.max_prompt_length={max_prompt_length} {cause}"
                            f"(the shortest has {shortest} tokens); raise the limit")
        self.counts = Counts(len(examples), len(self._prompts), len(examples) - len(self._prompts), truncated)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    def batch(self, position: SupportsIndex, n: int) -> list[tuple[int, Prompt]]:
        """The n prompts from `position` on, as (data position, prompt). A pure function of (seed, position): position counts prompts
        over epochs without end, each epoch in an order of its own, so that it is all a checkpoint has to hold."""
        start = operator.index(position)
        if start < 0 or n < 1:
            raise ValueError(f"batch needs position >= 0 and n >= 1, got {start} and {n}")
        return [(p, self._prompts[self._index(p)]) for p in range(start, start + n)]

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self._prompts))
        return int(_order(self._seed, epoch, len(self._prompts))[place]) if self._shuffle else place

    def _ids(self, example: Example, number: int, keep: int | None = None) -> list[int]:
        """Tokens of the example, of whose own text only the last `keep` characters are used (None: all of it)."""
        prompt = example.prompt
        if isinstance(prompt, str):
            text = self._wrapped(prompt, keep)
            messages: list[Message] = [{"role": "user", "content": text}]
        else:
            if not self._chat:
                raise UserError(f"the prompt of example {number} is a list of chat messages; set data.chat=True, or give plain text")
            messages = [dict(message) for message in prompt]
            last = _last_user(prompt)
            if last is not None:
                messages[last]["content"] = self._wrapped(messages[last]["content"], keep)
            elif self._template is not None:
                raise UserError(f"example {number} has no user message for data.template to go around; leave data.template unset")
        if self._chat:
            if self._system is not None:
                if messages[0]["role"] == "system":
                    raise UserError(f"example {number} has a system message of its own; unset data.system, or remove that message")
                messages.insert(0, {"role": "system", "content": self._system})
            ids = self._tokenizer.render_chat(messages)
        else:
            ids = self._tokenizer.encode(text if self._system is None else f"{self._system}\n\n{text}")
        if not ids:
            raise UserError(f"the prompt of example {number} has no tokens; give it some text")
        return ids

    def _wrapped(self, text: str, keep: int | None) -> str:
        kept = text if keep is None else text[len(text) - keep :]
        return kept if self._template is None else self._template.replace(PLACEHOLDER, kept)

    def _truncated(self, example: Example, number: int) -> list[int]:
        """Tokens of the longest tail of the example's text that fits, found by bisection; [] if not one character does."""
        best: list[int] = []
        fits, over = 0, len(_own_text(example.prompt))
        while over - fits > 1:
            keep = (fits + over) // 2
            ids = self._ids(example, number, keep)
            if len(ids) <= self._limit:
                best, fits = ids, keep
            else:
                over = keep
        return best


def _own_text(prompt: str | tuple[Message, ...]) -> str:
    """The text that a template goes around and that truncation shortens."""
    if isinstance(prompt, str):
        return prompt
    last = _last_user(prompt)
    return "" if last is None else prompt[last]["content"]


def _last_user(messages: Sequence[Message]) -> int | None:
    return next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)


@functools.lru_cache(maxsize=4)  # a batch may straddle two epochs
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    """The permutation of an epoch, [size]. Sorted raw words, since those of a bit generator are the same in every version of numpy,
    and `Generator.permutation` need not be."""
    return np.argsort(np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size), kind="stable")
