# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.support.causal import causal_model, causal_tokenizer
from tests.support.finetuned import bert
from tests.support.portions import one_in
from tests.support.stored import logits, save_base, tiny_bank, tiny_model
from tests.support.tiny import FAMILIES
from tests.support.training import tiny_tokenizer, yes_no
from transformers import BertConfig, BertForMaskedLM, GPT2LMHeadModel, T5EncoderModel

from lamina.bank import Reader, ReaderBank
from lamina.editing.insert import insert_
from lamina.editing.record import edits, location_of
from lamina.errors import BaseMismatchError, ConfigError, ModelNotFoundError, StoreError, UnknownNameError
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.mean import Mean
from lamina.heads.masked_lm import MaskedLM
from lamina.heads.sequence_classification import SequenceClassification
from lamina.layers.base_facts import EARLIER_UNRELATED, StackSettings
from lamina.monitors import LastScore, Monitor
from lamina.registry import lists_to_tuples
from lamina.store import fingerprint, load, load_bank, save, save_bank
from lamina.tasks.task import Task
from lamina.train import finetune, fit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_bank(tiny_bank(), tmp_path / "bank")
    return tmp_path / "bank"


def edit(path: Path, **changes: Any) -> None:
    """Change or (with ...) drop fields of a JSON file; `base__id` is a field inside."""
    fields = json.loads(path.read_text())
    for key, value in changes.items():
        *parents, last = key.split("__")
        inner = fields
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
        if value is ...:
            del inner[last]
    path.write_text(json.dumps(fields))


def base_model(folder: Path, dtype: str = "auto") -> Any:
    return load(folder, dtype=dtype)[0]


class TestRoundTrip:
    def test_logits_come_back_bit_for_bit(self, folder: Path):
        before, after = logits(tiny_bank()), logits(load_bank(folder, tiny_model()))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_everything_about_a_reader_comes_back(self, folder: Path):
        before, after = tiny_bank(), load_bank(folder, tiny_model())
        assert after.info == before.info
        for name in before:
            assert after[name].info == before[name].info
            assert after[name].layers == before[name].layers
            assert after[name].config.fusion == before[name].config.fusion
            assert after[name].config.head == before[name].config.head
            assert after[name].config.seed == before[name].config.seed
        assert not after.training
        assert all(parameter.requires_grad for parameter in after.parameters())

    def test_saving_what_was_loaded_writes_the_same_files(self, folder: Path, tmp_path: Path):
        save_bank(load_bank(folder, tiny_model()), tmp_path / "again" / "bank")
        for path in folder.rglob("*"):
            if path.is_file() and path.name != "tokenizer_config.json":  # transformers notes where it was loaded from
                assert path.read_bytes() == (tmp_path / "again" / "bank" / path.relative_to(folder)).read_bytes()

    def test_precision_comes_back(self, tmp_path: Path):
        bank = tiny_bank()
        bank["mood"].double()
        save_bank(bank, tmp_path)
        after = load_bank(tmp_path, tiny_model())
        assert {parameter.dtype for parameter in after["mood"].parameters()} == {torch.float64}
        assert {parameter.dtype for parameter in after["who"].parameters()} == {torch.float32}

    def test_a_bank_without_readers(self, tmp_path: Path):
        save_bank(ReaderBank(tiny_model()), tmp_path)
        assert list(load_bank(tmp_path, tiny_model())) == []

    def test_through_the_methods_of_the_bank(self, tmp_path: Path):
        tiny_bank().save_pretrained(tmp_path)
        after = ReaderBank.from_pretrained(tmp_path, tiny_model())
        assert torch.equal(logits(after)["who"], logits(tiny_bank())["who"])

    def test_readers_of_two_stacks(self, tmp_path: Path):
        family = FAMILIES["bart"]
        bank = ReaderBank(family.known())
        for stack in family.stacks:
            bank.add(stack, Reader(Mean(), SequenceClassification(("a", "b")), stack=stack))
        save_bank(bank.eval(), tmp_path)
        after = load_bank(tmp_path, family.known())
        batch = family.inputs(bank.model)
        with torch.no_grad():
            first, second = bank(**batch), after(**batch)
        assert all(torch.equal(first[name].logits, second[name].logits) for name in family.stacks)

    def test_an_encoder_is_the_same_with_and_without_its_decoder(self, tmp_path: Path):
        whole = FAMILIES["t5"].known()
        alone = T5EncoderModel(copy.deepcopy(whole.config))  # which it changes
        alone.load_state_dict(whole.state_dict(), strict=False)
        bank = ReaderBank(alone)
        bank.add("a", Reader(Mean(), SequenceClassification(("a", "b")), stack="main"))
        save_bank(bank.eval(), tmp_path)
        after = load_bank(tmp_path, whole)
        batch = FAMILIES["t5"].inputs(whole)
        with torch.no_grad():
            expected = bank(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            assert torch.equal(after(**batch)["a"].logits, expected["a"].logits)
        save_bank(after, tmp_path)
        edit(tmp_path / "lamina.json", base__stacks={"decoder": {"layers": 1, "width": 1, "fingerprint": ""}})
        with pytest.raises(BaseMismatchError, match="stack was decoder, here main"):
            load_bank(tmp_path, alone)

    def test_saving_again_leaves_nothing_stale(self, folder: Path):
        bank = tiny_bank()
        bank.remove("who")
        save_bank(bank, folder)
        assert [path.name for path in (folder / "readers").iterdir()] == ["mood"]
        assert list(load_bank(folder, tiny_model())) == ["mood"]

    def test_saving_moves_no_weight_and_keeps_the_mode(self, tmp_path: Path):
        bank = tiny_bank().train()
        before = {name: tensor.clone() for name, tensor in bank.state_dict().items()}
        save_bank(bank, tmp_path)
        assert bank.training
        assert all(torch.equal(before[name], tensor) for name, tensor in bank.state_dict().items())

    def test_a_failed_save_keeps_the_old_bank(self, folder: Path):
        bank = tiny_bank()
        bank["mood"].info = {"scores": object()}
        bank.remove("who")
        with pytest.raises(StoreError, match=r"reader.json cannot be written"):
            save_bank(bank, folder)
        assert list(load_bank(folder, tiny_model())) == ["mood", "who"]
        assert sorted(path.name for path in folder.iterdir()) == ["README.md", "lamina.json", "processor", "readers"]

    def test_a_failed_save_keeps_the_location_of_the_model(self, tmp_path: Path):
        model = tiny_model()
        save(model, tmp_path / "base")

        def fail(path: Path) -> None:
            raise StoreError(f"{path.name} is refused.")

        with pytest.raises(StoreError, match=r"x is refused"):
            save_bank(ReaderBank(model, saves_base=True), tmp_path / "bank", files={"x": fail})
        assert location_of(model) == str(tmp_path / "base")


class TestBase:
    def test_is_loaded_by_the_manifest(self, tmp_path: Path):
        base = save_base(tmp_path / "base", seed=1)
        bank = tiny_bank(base_model(base))
        save_bank(bank, tmp_path / "bank")
        after = load_bank(tmp_path / "bank")
        assert torch.equal(logits(after)["mood"], logits(bank)["mood"])
        assert after.processor("good film")["input_ids"] == bank.processor("good film")["input_ids"]

    @pytest.mark.long
    def test_that_writes_text_has_its_head_where_it_is_asked_for(self, tmp_path: Path):
        causal_model().save_pretrained(tmp_path / "writes")
        save_base(tmp_path / "reads")
        for name, plain, asked in (("writes", "GPT2Model", "GPT2LMHeadModel"), ("reads", "BertModel", "BertModel")):
            bank = ReaderBank(base_model(tmp_path / name))
            bank.add("a", Reader(Mean(), SequenceClassification(("a", "b"))))
            save_bank(bank.eval(), tmp_path / "bank")
            kinds = [type(load_bank(tmp_path / "bank", writes=writes).model).__name__ for writes in (False, True)]
            assert kinds == [plain, asked]

    @pytest.mark.parametrize("watch", [True, False])
    def test_that_readers_were_added_to_watch_has_its_head(self, watch: bool, tmp_path: Path):
        causal_model().save_pretrained(tmp_path / "base")
        bank = ReaderBank(GPT2LMHeadModel.from_pretrained(tmp_path / "base"), causal_tokenizer())
        rows = [{"text": word, "label": word} for word in ("good", "fun")] * 4
        task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, text="text")
        bank.add("a", task, watch=watch)
        fit(bank, {"a": task}, epochs=1)
        save_bank(bank, tmp_path / "bank")
        after = load_bank(tmp_path / "bank")
        assert type(after.model).__name__ == ("GPT2LMHeadModel" if watch else "GPT2Model")
        save_bank(after, tmp_path / "again")
        assert isinstance(load_bank(tmp_path / "again").model, type(after.model))

    @pytest.mark.parametrize("trained", one_in(2, [False, True], 1))
    def test_with_inserted_layers_comes_back(self, trained: bool, tmp_path: Path):
        model = tiny_model(1)
        insert_(model, "ffn", 2)
        save(model, tmp_path / "base")
        bank = ReaderBank(base_model(tmp_path / "base"), train_base=trained)
        bank.add("a", Reader(Mean(), SequenceClassification(("a", "b"))))
        if trained:
            with torch.no_grad():
                bank.model.get_parameter("encoder.layer.1.output.dense.inserted_0.weight").add_(0.1)
        save_bank(bank.eval(), tmp_path / "bank")
        after = load_bank(tmp_path / "bank")
        assert torch.equal(logits(after)["a"], logits(bank)["a"])
        assert edits(after.model) == edits(model)

    @pytest.mark.long
    def test_that_was_edited_is_named_where_it_was_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        bank = tiny_bank(base_model(save_base(tmp_path / "base")))
        insert_(bank.model, "ffn", 2)
        bank = tiny_bank(bank.model)
        save_bank(bank, tmp_path / "bank")
        assert "the base was changed after it was loaded" in caplog.text
        with pytest.raises(StoreError, match=r"names no base, since it was .* changed and not saved"):
            load_bank(tmp_path / "bank")
        caplog.clear()
        monkeypatch.chdir(tmp_path)
        save(bank.model, "edited")
        save_bank(bank, tmp_path / "bank")
        assert caplog.text == ""
        monkeypatch.chdir(tmp_path / "base")
        assert torch.equal(logits(load_bank(tmp_path / "bank"))["mood"], logits(bank)["mood"])

    @pytest.mark.long
    def test_that_was_fine_tuned_is_named_where_it_was_saved(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        model = bert()
        finetune(model, yes_no(), processor=tiny_tokenizer(), epochs=1, progress=False, output=tmp_path / "tuned")
        save_bank(tiny_bank(model), tmp_path / "bank")
        assert json.loads((tmp_path / "bank" / "lamina.json").read_text())["base"]["id"] == str(tmp_path / "tuned")
        assert caplog.text == ""
        model = load(tmp_path / "tuned", "sequence_classification")[0]
        finetune(model, yes_no(), processor=tiny_tokenizer(), epochs=1, progress=False)
        save_bank(tiny_bank(model), tmp_path / "bank")
        assert "the base was changed" in caplog.text

    def test_of_a_bank_with_monitors_has_its_head_for_text(self, tmp_path: Path):
        causal_model().save_pretrained(tmp_path / "base")
        bank = ReaderBank(base_model(tmp_path / "base"))
        for name in ("watched", "other"):
            bank.add(name, Reader(Mean(), SequenceClassification(("a", "b"), pooling="mean")))
        bank.keep_monitor(Monitor("watched", "b", LastScore(), threshold=0.5))
        bank.eval().save_pretrained(tmp_path / "bank")
        opened = [ReaderBank.from_pretrained(tmp_path / "bank", readers=names) for names in (None, ["other"])]
        assert [type(bank.model).__name__ for bank in opened] == ["GPT2LMHeadModel", "GPT2Model"]

    def test_that_was_trained_keeps_its_head(self, tmp_path: Path):
        model = BertForMaskedLM(tiny_model().config)
        bank = ReaderBank(model, train_base=True)
        bank.add("word", Reader(LastLayer(), MaskedLM()))
        save_bank(bank.eval(), tmp_path)
        after = load_bank(tmp_path)
        assert isinstance(after.model, BertForMaskedLM)
        assert torch.equal(logits(after)["word"], logits(bank)["word"])

    def test_the_tokenizer_of_a_given_base_is_found_beside_it(self, tmp_path: Path):
        base = save_base(tmp_path / "base", seed=1)
        save_bank(tiny_bank(base_model(base)), tmp_path / "bank")
        assert load_bank(tmp_path / "bank", base_model(base)).processor is not None
        given = tiny_bank().processor
        assert load_bank(tmp_path / "bank", base_model(base), given).processor is given
        assert load_bank(tmp_path / "bank", processor=given).processor is given

    @pytest.mark.long
    def test_is_loaded_in_the_precision_it_had(self, tmp_path: Path):
        base = save_base(tmp_path / "base")
        save_bank(tiny_bank(base_model(base, dtype="bfloat16").float()), tmp_path / "bank")
        with pytest.raises(BaseMismatchError, match="fingerprint was"):
            load_bank(tmp_path / "bank")  # rounded once, these weights are not the saved ones
        bank = ReaderBank(base_model(base, dtype="bfloat16"))
        bank.add("a", Reader(Mean(), SequenceClassification(("a", "b")))).to(torch.bfloat16)
        save_bank(bank, tmp_path / "bank")
        assert load_bank(tmp_path / "bank").model.dtype == torch.bfloat16

    def test_is_loaded_in_the_revision_it_had(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        model, asked = base_model(save_base(tmp_path / "base")), []
        model.config._commit_hash = "0123abc"
        save_bank(tiny_bank(model), tmp_path / "bank")
        monkeypatch.setattr(
            "lamina.store.bank_folder.load", lambda name, head=None, **given: asked.append(given) or load(name)
        )
        load_bank(tmp_path / "bank")
        monkeypatch.setattr("lamina.store.bank_folder.is_dir", lambda path: False)  # as if the base were on the hub
        load_bank(tmp_path / "bank")
        assert [given.get("revision") for given in asked] == [None, "0123abc"]  # a folder has no revisions

    def test_of_an_earlier_version_that_left_out_token_dropout_is_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        model = FAMILIES["esm"].known()
        with monkeypatch.context() as earlier:
            earlier.setattr(StackSettings, "of", partial(StackSettings.of, unrelated=EARLIER_UNRELATED))
            ReaderBank(model).save_pretrained(tmp_path / "earlier")
        ReaderBank(model).save_pretrained(tmp_path / "now")
        load_bank(tmp_path / "earlier", model)
        model.config.token_dropout = not model.config.token_dropout
        with pytest.raises(BaseMismatchError, match=r"another base: token_dropout was \w+, here \w+\. Give"):
            load_bank(tmp_path / "now", model)
        model.encoder.layer[0].LayerNorm.eps = 0.5
        with pytest.raises(BaseMismatchError, match=r"another base: module '[\w.*]+LayerNorm' was [^;]*\. Give"):
            load_bank(tmp_path / "earlier", model)

    def test_that_was_never_saved_must_be_given(self, folder: Path):
        with pytest.raises(StoreError, match=r"names no base, since it was built in memory.*Pass `model`"):
            load_bank(folder)

    def test_that_is_gone_is_named(self, folder: Path):
        edit(folder / "lamina.json", base__id="/nowhere/base")
        with pytest.raises(
            ModelNotFoundError, match="no model '/nowhere/base'; it is the base of this bank, and there"
        ):
            load_bank(folder)

    def test_with_other_weights_is_refused(self, folder: Path):
        model = tiny_model()
        saved = fingerprint(model, "main")
        model.encoder.layer[1].output.dense.bias.data[0] += 1e-4
        with pytest.raises(BaseMismatchError, match="fingerprint was") as caught:
            load_bank(folder, model)
        assert caught.value.differs == {"fingerprint": (saved, fingerprint(model, "main"))}

    @pytest.mark.parametrize(
        ("model", "differs"),
        [
            (lambda: tiny_model(num_hidden_layers=2), {"layers": (4, 3)}),
            (lambda: tiny_model(hidden_size=64), {"width": (32, 64)}),
            (lambda: tiny_model(hidden_size=64, num_hidden_layers=2), {"layers": (4, 3), "width": (32, 64)}),
            (lambda: FAMILIES["electra"].known(), {"model_type": ("bert", "electra")}),
            (
                lambda: FAMILIES["bart"].known(),
                {"model_type": ("bert", "bart")},
            ),
        ],
    )
    def test_of_another_kind_is_refused_by_what_differs(self, folder: Path, model: Any, differs: dict[str, Any]):
        with pytest.raises(BaseMismatchError, match="trained on another base") as caught:
            load_bank(folder, model())
        assert caught.value.differs == differs

    def test_in_another_precision_is_refused_and_says_so(self, folder: Path):
        with pytest.raises(BaseMismatchError, match="dtype was float32, here bfloat16"):
            load_bank(folder, tiny_model().to(torch.bfloat16))

    def test_that_is_refused_is_left_alone(self, folder: Path):
        model = tiny_model(1).train()
        with pytest.raises(BaseMismatchError, match="fingerprint"):
            load_bank(folder, model)
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())


class TestDamage:
    def test_a_folder_that_is_not_there(self, tmp_path: Path):
        with pytest.raises(StoreError, match=r"no bank .*none'; there is no such folder, and it cannot be loaded"):
            load_bank(tmp_path / "none", tiny_model())

    def test_a_file_in_place_of_the_folder(self, folder: Path):
        with pytest.raises(StoreError, match=r"lamina.json is a file; a bank is a folder"):
            load_bank(folder / "lamina.json", tiny_model())

    def test_no_manifest(self, folder: Path):
        (folder / "lamina.json").unlink()
        with pytest.raises(StoreError, match=r"bank has no lamina.json; give a folder that save_pretrained wrote"):
            load_bank(folder, tiny_model())

    @pytest.mark.parametrize("version", [2, None, "1"])
    def test_unknown_format(self, folder: Path, version: Any):
        edit(folder / "lamina.json", format=version)
        with pytest.raises(StoreError, match=f"has format {version}; this version of lamina reads format 1"):
            load_bank(folder, tiny_model())

    @pytest.mark.parametrize(
        ("file", "change", "message"),
        one_in(
            2,
            [
                ("lamina.json", {"readerz": []}, "unknown key 'readerz'.*Did you mean 'readers'"),
                ("lamina.json", {"base__name": "x"}, "unknown key 'base.name'; known: base.id, base.revision"),
                ("lamina.json", {"base__stacks__main__depth": 3}, "unknown key 'base.stacks.main.depth'"),
                (
                    "lamina.json",
                    {"processor__file": 3},
                    "'processor.file'; known: processor.files, ",
                ),
                ("readers/mood/reader.json", {"sed": 1}, "unknown key 'sed'.*Did you mean 'seed'"),
                ("readers/mood/reader.json", {"fusion__name": "ada_layer"}, "unknown name 'ada_layer'.*'ada_layers'"),
                ("readers/mood/reader.json", {"fusion__dims": 4}, "unknown key 'dims'.*Did you mean 'dim'"),
                ("readers/mood/reader.json", {"head__pooling": "max"}, "unknown pooling 'max'"),
                ("readers/mood/reader.json", {"stack": "decoder"}, "unknown stack 'decoder'; known: main"),
            ],
        ),
    )
    def test_names_that_are_not_known(self, folder: Path, file: str, change: dict[str, Any], message: str):
        edit(folder / file, **change)
        with pytest.raises(UnknownNameError, match=message):
            load_bank(folder, tiny_model())

    @pytest.mark.parametrize(
        ("file", "change", "message"),
        one_in(
            2,
            [
                ("lamina.json", {"readers": ...}, "lamina.json has no 'readers'"),
                ("lamina.json", {"base__stacks__main__width": "32"}, "has '32' as 'base.stacks.main.width'"),
                ("lamina.json", {"readers": ["../mood"]}, r"names a reader '\.\./mood'"),
                ("lamina.json", {"readers": ["/etc"]}, "names a reader '/etc'"),
                ("lamina.json", {"readers": [".."]}, r"names a reader '\.\.'"),
                (
                    "lamina.json",
                    {"readers": ["mood", "mood"]},
                    "names a reader 'mood'; every name must be a plain folder name",
                ),
                ("lamina.json", {"readers": ["mood", "gone"]}, r"gone.reader.json is not there"),
                (
                    "readers/mood/reader.json",
                    {"layers": [0, 1, 2, 3]},
                    r"was trained on the layers \[0, 1, 2, 3\]; .*\[1, 2",
                ),
                (
                    "readers/mood/reader.json",
                    {"fusion__dim": 8},
                    r"'fusion.projection' is \(3, 16, 32\) instead of \(3, 8, 32\) \(and \d+ more\)",
                ),
                ("readers/who/reader.json", {"seed": None}, "has 'None' as 'seed'"),
            ],
        ),
    )
    def test_files_that_do_not_fit(self, folder: Path, file: str, change: dict[str, Any], message: str):
        edit(folder / file, **change)
        with pytest.raises(StoreError, match=message):
            load_bank(folder, tiny_model())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"fusion__alpha": -1.0}, r"alpha is -1.0"),
            ({"fusion__dim": "x"}, r"ada_layers: dim is 'x'; it must be a whole number"),
        ],
    )
    def test_settings_that_cannot_be_name_the_file(self, folder: Path, change: dict[str, Any], message: str):
        edit(folder / "readers/mood/reader.json", **change)
        with pytest.raises(ConfigError, match=message) as caught:
            load_bank(folder, tiny_model())
        assert "reader.json" in caught.value.__notes__[0]

    def test_weights_cut_off(self, folder: Path):
        path = folder / "readers" / "who" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(StoreError, match=r"who.model.safetensors is not safetensors"):
            load_bank(folder, tiny_model())

    def test_weights_of_another_reader(self, folder: Path):
        shutil.copy(folder / "readers/who/model.safetensors", folder / "readers/mood/model.safetensors")
        with pytest.raises(StoreError, match=r"mood.model.safetensors does not fit the reader"):
            load_bank(folder, tiny_model())


class TestCard:
    def front(self, text: str) -> dict[str, Any]:
        return yaml.safe_load(text.split("---\n")[1])

    def test_tells_what_is_in_the_folder(self, folder: Path):
        text = (folder / "README.md").read_text()
        front = self.front(text)
        assert [own["task"]["name"] for own in front.pop("model-index")[0]["results"]] == ["mood"]
        assert front == {
            "library_name": "lamina",
            "tags": ["lamina", "frozen-base", "text-classification", "token-classification"],
        }
        bank = tiny_bank()
        assert "| mood | sequence classification | ada_layers | 1-3 | bad, good | " in text
        assert f"| {bank['mood'].size():,} | mcc 0.281 |" in text
        assert "| who | token classification | mean | 1, 3 | O, B-PER, B-LOC |" in text

    def test_names_a_base_from_the_hub_and_no_local_path(self, tmp_path: Path):
        model = tiny_model()
        model.name_or_path = "someone/tiny"
        save_bank(tiny_bank(model), tmp_path)
        assert self.front((tmp_path / "README.md").read_text())["base_model"] == "someone/tiny"
        model.name_or_path = str(tmp_path)
        save_bank(tiny_bank(model), tmp_path)
        assert str(tmp_path) not in (tmp_path / "README.md").read_text()

    def test_labels_are_cut_and_cannot_break_the_table(self):
        bank = ReaderBank(tiny_model())
        bank.add("x", Reader(Mean(), SequenceClassification(("a|b", "c\nd", *map(str, range(10))))))
        row = next(line for line in str(bank.generate_model_card("t")).splitlines() if line.startswith("| x |"))
        assert "a\\|b, c d, 0, 1, 2, 3, 4, 5 and 4 more" in row


def test_lists_become_tuples_at_every_depth():
    assert lists_to_tuples({"a": [1, [2, {"b": [3]}]], "c": "x"}) == {"a": (1, (2, {"b": (3,)})), "c": "x"}


def test_a_masked_lm_reader_refuses_another_vocabulary(tmp_path: Path):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=50, tie_word_embeddings=False, **shape)
    model = BertForMaskedLM(config).eval()
    bank = ReaderBank(model)
    bank.add("mlm", Reader(LastLayer(), MaskedLM()))
    bank.save_pretrained(tmp_path)
    ids = torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        expected = bank.eval()(input_ids=ids)["mlm"].logits
        again = ReaderBank.from_pretrained(tmp_path, model)
        assert torch.equal(again(input_ids=ids)["mlm"].logits, expected)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 4 * 50 * 16
    with pytest.raises(BaseMismatchError, match="vocabulary was"):
        ReaderBank.from_pretrained(tmp_path, model.bert)


def test_some_readers_are_loaded_from_a_set_an_array_or_an_iterator(tmp_path: Path):
    bank = tiny_bank(tiny_model())
    save_bank(bank, tmp_path)
    for names in ({*bank}, np.array([*bank]), iter([*bank]), dict.fromkeys(bank).keys()):
        assert {*load_bank(tmp_path, tiny_model(), readers=names)} == {*bank}  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"^load: readers is 5; it must be a list or a set or None\."):
        load_bank(tmp_path, tiny_model(), readers=5)  # pyright: ignore[reportArgumentType]
    for use in (partial(save_bank, bank), load_bank):
        with pytest.raises(ConfigError, match=r": folder is 5; it must be a text or a path\."):
            use(5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("option", ["train_base", "saves_base", "info"])
def test_options_of_a_bank_have_their_types(option: str):
    with pytest.raises(ConfigError, match=rf"^bank: {option} is 'no'; it must be (True or False|a dict)"):
        ReaderBank(tiny_model(), **{option: "no"})  # pyright: ignore[reportArgumentType]
