"""The tokenizer's wrapper, on a byte-level tokenizer made here: ids, chat template, stop and pad ids, bad folders."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from jetrl_jax.errors import UserError
from jetrl_jax.models.tokenizer import load_tokenizer

SPECIAL = ["<bos>", "<eos>", "<pad>", "<end>", "<user>", "<assistant>"]
BOS, EOS, PAD, END, USER, ASSISTANT = range(6)
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% if brief %}brief:{% endif %}{% endif %}"
)


def make(folder: Path, *, bos=False, tokenizer=None, config=None, generation=None) -> Path:
    """A folder with a tokenizer of the 256 bytes and six special tokens, and the config files given."""
    folder.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={t: i for i, t in enumerate(SPECIAL + letters)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    raw.save(str(folder / "tokenizer.json"))
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": "<eos>"} if tokenizer is None else tokenizer)
    for name, content in [("tokenizer_config.json", settings_), ("config.json", config), ("generation_config.json", generation)]:
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def message(action, *arguments, **options):
    with pytest.raises(UserError) as caught:
        action(*arguments, **options)
    return str(caught.value)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    config = {"model_type": "llama", "vocab_size": 300}
    return load_tokenizer(make(tmp_path_factory.mktemp("chat"), tokenizer={"eos_token": "<end>", "chat_template": TEMPLATE}, config=config))


@given(text=st.text(max_size=20))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_are_those_of_the_file_and_texts_come_back(chat, text):
    ids = chat.encode(text)
    assert ids == RawTokenizer.from_file(str(chat.folder / "tokenizer.json")).encode(text).ids
    if not any(token in text for token in SPECIAL):
        assert chat.decode(ids) == text


def test_special_tokens_are_read_in_and_left_out(chat, tmp_path):
    ids = chat.encode("<user>a b<end>")
    assert (ids[0], ids[-1]) == (USER, END)
    assert chat.decode(ids) == "a b"
    with_bos = load_tokenizer(make(tmp_path, bos=True))
    assert with_bos.encode("x") == [BOS, *chat.encode("x")]
    assert (chat.vocab_size, with_bos.embedded) == (262, None)


def test_chat_template(chat):
    user = [{"role": "user", "content": "1+1?"}]
    assert chat.render_chat(user) == chat.encode("<user>1+1?<end><assistant>")
    assert chat.render_chat(user, brief=True) == chat.encode("<user>1+1?<end><assistant>brief:")
    assert chat.render_chat(user, add_generation_prompt=False) == chat.encode("<user>1+1?<end>")
    turns = [*user, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}]
    assert chat.render_chat(turns) == chat.encode("<user>1+1?<end><assistant>2<end><user>sure?<end><assistant>")


def test_a_template_adds_no_second_bos(tmp_path):
    tokenizer = load_tokenizer(make(tmp_path, bos=True, tokenizer={"chat_template": "<bos>{{ messages[0].content }}"}))
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == tokenizer.encode("x")


def test_a_template_that_refuses_and_one_that_is_not_there(chat, tmp_path):
    found = message(chat.render_chat, [{"role": "tool", "content": "x"}])
    assert "no such role" in found and "'tool'" in found and str(chat.folder) in found
    found = message(load_tokenizer(make(tmp_path)).render_chat, [{"role": "user", "content": "x"}])
    assert "no chat template" in found and "data.chat" in found and str(tmp_path) in found


def test_a_template_in_a_file_of_its_own(tmp_path):
    (make(tmp_path) / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == tokenizer.encode("<user>x<end><assistant>")


@pytest.mark.parametrize("eos, config, generation, expected", [
    ("<eos>", None, None, (EOS,)),
    ("<eos>", {"eos_token_id": END}, None, (EOS, END)),
    ("<eos>", {"eos_token_id": [EOS, END]}, {"eos_token_id": EOS}, (EOS, END)),
    ("<end>", {"eos_token_id": None}, {"eos_token_id": [PAD, EOS]}, (EOS, PAD, END)),
    (None, {}, {"eos_token_id": 0}, (0,)),
    (None, None, None, ()),
])
def test_stop_ids_are_the_union_of_three_files(eos, config, generation, expected, tmp_path):
    config = None if config is None else {"model_type": "llama"} | config
    folder = make(tmp_path, tokenizer={} if eos is None else {"eos_token": eos}, config=config, generation=generation)
    assert load_tokenizer(folder).stop_ids == expected


@pytest.mark.parametrize("tokenizer, config, expected", [
    ({"pad_token": "<pad>", "eos_token": "<eos>"}, {}, PAD),
    ({"pad_token": "<eos>", "eos_token": "<eos>"}, {}, EOS),  # SmolLM2's: pad is eos, and eos still stops
    ({"eos_token": "<eos>"}, {"pad_token_id": END}, END),
    ({"eos_token": "<eos>"}, {"pad_token_id": -1}, EOS),
    ({"eos_token": "<eos>"}, {}, EOS),
    ({}, {}, 0),
    ({"pad_token": "<pad>", "eos_token": "<eos>"}, {"vocab_size": PAD}, EOS),  # a pad token without a row in the embedding
])
def test_pad_id_and_what_stands_in_for_it(tokenizer, config, expected, tmp_path):
    loaded = load_tokenizer(make(tmp_path, tokenizer=tokenizer, config={"model_type": "llama"} | config))
    assert loaded.pad_id == expected
    assert loaded.stop_ids == ((EOS,) if tokenizer else ())


def test_ids_without_a_row_in_the_embedding(tmp_path):
    tokenizer = load_tokenizer(make(tmp_path, tokenizer={"chat_template": "{{ messages[0].content }}"}, config={"vocab_size": 100}))
    assert tokenizer.encode("!") == [SPECIAL.index(SPECIAL[-1]) + 1]
    for found in (message(tokenizer.encode, "\xff"), message(tokenizer.render_chat, [{"role": "user", "content": "\xff"}])):
        assert "vocab_size = 100" in found and str(tmp_path) in found


def test_folders_that_hold_no_tokenizer(tmp_path):
    assert "has no tokenizer" in (found := message(load_tokenizer, tmp_path / "nowhere")) and "tokenizer.json" in found
    (make(tmp_path / "broken") / "tokenizer.json").write_text("{")
    assert "cannot be loaded" in (found := message(load_tokenizer, tmp_path / "broken")) and str(tmp_path / "broken") in found


@pytest.mark.parametrize("value", ["2", 1.5, True, -1, [1, None]])
def test_stop_ids_that_are_none(value, tmp_path):
    found = message(load_tokenizer, make(tmp_path, generation={"eos_token_id": value}))
    assert f"generation_config.json: eos_token_id = {value!r}" in found


def test_a_broken_generation_config(tmp_path):
    assert "generation_config.json is not valid JSON" in message(load_tokenizer, make(tmp_path, generation="{"))
