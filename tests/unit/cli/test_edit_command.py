from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.stored import tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES
from tests.support.towers import two_towers
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DPTConfig,
    DPTForDepthEstimation,
)

from lamina.editing import block_config
from lamina.editing.record import edits
from lamina.store import load


def run(lamina: Any, *arguments: object) -> dict[str, Any]:
    ran = lamina("edit", *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    return json.loads(ran.out)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_insertion_leaves_the_outputs(lamina, base: Path, tmp_path: Path):
    facts = run(lamina, base, "--insert", "both", "--layers", "top:2", "-o", tmp_path / "out")
    count = tiny_model().num_parameters()
    added = 2 * (3 * 4 * 8 * 8 + 32 * 32)
    assert facts["before"] == {"layers": {"main": 4}, "parameters": count, "trainable": count}
    assert facts["after"]["parameters"] == count + added
    assert facts["unchanged_parameters"] == count
    assert facts["output_difference"] <= 1e-5
    (made,) = facts["edits"]
    assert (made["kind"], made["layers"], made["parameters"]) == ("insert", [2, 3], 8)
    model = load(tmp_path / "out")[0]
    assert [edit.kind for edit in edits(model)] == ["insert"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(tiny_tokenizer())


@pytest.mark.long
def test_the_options_of_an_insertion(lamina, base: Path, tmp_path: Path):
    out = tmp_path / "out"
    options = ("--init", "xavier", "--activation", "gelu", "--placement", "output", "--seed", 5)
    facts = run(lamina, base, "--insert", "ffn", "--layers", "1,3", *options, "-o", out)
    settings = facts["edits"][0]["settings"]
    assert (settings["init"], settings["activation"], settings["placement"]) == ("xavier", "gelu", "output")
    assert facts["edits"][0]["layers"] == [1, 3]
    assert facts["output_difference"] > 1e-3
    assert run(lamina, base, "--insert", "ffn", *options, "--dry-run")["edits"][0]["seed"] == facts["edits"][0]["seed"]


@pytest.mark.full
def test_a_tower_is_named(lamina, tmp_path: Path):
    model, out = tmp_path / "model", tmp_path / "out"
    two_towers().save_pretrained(model)
    assert "Give stack='text'" in lamina("edit", model, "--drop", "1", "-o", out).err
    facts = run(lamina, model, "--drop", "1", "--stack", "vision", "-o", out)
    assert facts["before"]["layers"] == {"text": 3, "vision": 4}
    assert facts["after"]["layers"] == {"text": 3, "vision": 3}
    assert facts["output_difference"] > 1e-3
    assert [block["was"] for block in facts["blocks"]["vision"]["after"]] == [2, 3]
    assert AutoModel.from_pretrained(out).config.vision_config.num_hidden_layers == 2
    dry = run(lamina, model, "--drop", "1", "--stack", "vision", "--dry-run")
    assert dry["edits"] == facts["edits"]


@pytest.mark.parametrize(("family", "layers"), [("wav2vec2", {"main": 4}), ("convnext", {"main": 3})])
def test_convolutions(lamina, tmp_path: Path, family, layers):
    FAMILIES[family].build().save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    facts = run(lamina, tmp_path / "model", "--insert", "convolution", "--layers", "2", "--kernel", 5, "-o", out)
    assert facts["before"]["layers"] == facts["after"]["layers"] == layers
    assert facts["after"]["parameters"] - facts["before"]["parameters"] == 16 * 16 * (5 if family == "wav2vec2" else 25)
    assert facts["output_difference"] <= 1e-5
    assert facts["edits"][0]["settings"]["kernel"] == 5
    assert [(edit.kind, edit.layers) for edit in edits(load(out)[0])] == [("insert", (2,))]


def test_a_family_that_has_neither_layers_nor_convolutions_is_refused(lamina, tmp_path: Path):
    FAMILIES["swin"].config().save_pretrained(tmp_path)
    ran = lamina("edit", tmp_path, "--insert", "convolution", "--dry-run")
    assert (ran.code, "the family 'swin' is not supported" in ran.err) == (2, True)


def test_all_edits_in_their_order(lamina, base: Path, tmp_path: Path):
    options = ("--merge", "--freeze", "0-1", "--insert", "ffn", "--reinit", "2", "--scope", "block", "--truncate", "2")
    facts = run(lamina, base, *options, "-o", tmp_path / "out")
    assert [made["kind"] for made in facts["edits"]] == ["truncate", "reinit", "insert", "freeze", "merge"]
    assert facts["after"]["layers"] == {"main": 3}
    small = tiny_model(num_hidden_layers=2)
    frozen = [*small.embeddings.parameters(), *small.encoder.layer[0].parameters()]
    assert facts["after"]["parameters"] == small.num_parameters()  # the inserted layers are merged
    assert facts["after"]["trainable"] == small.num_parameters() - sum(weight.numel() for weight in frozen)
    plain, report = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    assert sum(parameter.numel() for parameter in plain.parameters()) == facts["after"]["parameters"]


def test_what_is_frozen_is_not_changed(lamina, base: Path, tmp_path: Path):
    facts = run(lamina, base, "--freeze", "0-1", "-o", tmp_path / "out")
    assert facts["unchanged_parameters"] == facts["after"]["parameters"] == tiny_model().num_parameters()
    frozen = [*tiny_model().embeddings.parameters(), *tiny_model().encoder.layer[0].parameters()]
    assert facts["after"]["trainable"] == facts["after"]["parameters"] - sum(weight.numel() for weight in frozen)


@pytest.mark.long
def test_a_saved_insertion_is_merged_and_frozen(lamina, base: Path, tmp_path: Path):
    run(lamina, base, "--insert", "both", "-o", tmp_path / "one")
    facts = run(lamina, tmp_path / "one", "--train-inserted", "-o", tmp_path / "two")
    inserted = 3 * (3 * 4 * 8 * 8 + 32 * 32)
    pooler = 32 * 32 + 32
    assert facts["after"]["trainable"] == inserted + pooler
    facts = run(lamina, tmp_path / "two", "--merge", "-o", tmp_path / "three")
    assert facts["after"]["parameters"] == tiny_model().num_parameters()
    assert facts["output_difference"] <= 1e-5
    assert [edit.kind for edit in edits(load(tmp_path / "three")[0])] == ["insert", "freeze", "merge"]


@pytest.mark.long
def test_the_head_that_was_saved_is_kept(lamina, tmp_path: Path):
    FAMILIES["bert-SequenceClassification"].build().save_pretrained(tmp_path / "model")
    assert run(lamina, tmp_path / "model", "--truncate", 1, "-o", tmp_path / "out")["architecture"] == (
        "BertForSequenceClassification"
    )
    _, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    facts = run(lamina, tmp_path / "model", "--truncate", 1, "--head", "AutoModel", "--dry-run")
    assert facts["architecture"] == "BertModel"


@pytest.mark.long
def test_both_stacks(lamina, tmp_path: Path):
    FAMILIES["bart"].config().save_pretrained(tmp_path)
    facts = run(lamina, tmp_path, "--truncate", 1, "--stack", "decoder", "--dry-run")
    assert facts["before"]["layers"] == {"encoder": 4, "decoder": 3}
    assert facts["after"]["layers"] == {"encoder": 4, "decoder": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "position", "total", "added"),
    [
        pytest.param("deberta-v2", "attention", 435_063_810, 4_718_592, marks=pytest.mark.full),
        pytest.param("deberta-v2", "ffn", 435_063_810, 25_165_824, marks=pytest.mark.full),
        ("deberta-v2", "both", 435_063_810, 4_718_592 + 25_165_824),
    ],
)
def test_a_dry_run_needs_a_config_alone(lamina, tmp_path: Path, family, position, total, added):
    """DeBERTa-v3-large with a 2-way head: table 8 of the paper on insertion."""
    settings = {
        "model_type": family,
        "vocab_size": 128100,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "max_relative_positions": -1,
        "position_biased_input": False,
        "layer_norm_eps": 1e-7,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    facts = run(lamina, tmp_path, "--insert", position, "--head", "AutoModelForSequenceClassification", "--dry-run")
    assert facts["before"]["parameters"] == total
    assert facts["after"]["parameters"] == total + added
    assert facts["output_difference"] is None
    assert facts["saved"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_table(lamina, base: Path, tmp_path: Path):
    ran = lamina("edit", base, "--truncate", 2, "--reinit", "2", "-o", tmp_path / "out")
    assert (ran.code, ran.err) == (0, "")
    assert f"{base}: BertModel" in ran.out
    row = next(line for line in ran.out.splitlines() if "parameters" in line and "│" in line)
    assert f"{tiny_model().num_parameters():,}" in row
    assert f"{tiny_model(num_hidden_layers=2).num_parameters():,}" in row
    assert "truncate: main 3; 16 tensors" in ran.out
    assert "reinit: main 2; 6 tensors, seed " in ran.out
    assert "largest difference of the outputs on a small batch: " in ran.out
    assert f"saved in {tmp_path / 'out'}" in ran.out
    ran = lamina("edit", base, "--freeze", "all", "--dry-run")
    assert "freeze: main 0, 1, 2, 3; " in ran.out
    assert "dry run: nothing was saved" in ran.out


@pytest.mark.long
def test_a_seed_gives_the_same_weights(lamina, base: Path, tmp_path: Path):
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for out, seed in ((one, 3), (same, 3), (other, 4)):
        run(lamina, base, "--reinit", "all", "--seed", seed, "-o", out)
    weights = [(out / "model.safetensors").read_bytes() for out in (one, same, other)]
    assert weights[0] == weights[1] != weights[2]


def test_nothing_is_overwritten_unless_asked(lamina, base: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(base, out)
    before = contents(out)
    ran = lamina("edit", base, "--truncate", 1, "-o", out)
    assert (ran.code, ran.out) == (2, "")
    assert (
        ran.err == f"error: edit: {out} is not empty. Give another folder, or --overwrite to replace what is in it.\n"
    )
    assert contents(out) == before
    for depth in (2, 1):  # what something else saved, and what this saved
        run(lamina, base, "--truncate", depth, "-o", out, "--overwrite")
        assert load(out)[0].config.num_hidden_layers == depth
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_a_model_may_be_edited_in_place(lamina, base: Path, tmp_path: Path):
    out = tmp_path / "model"
    shutil.copytree(base, out)
    for _ in range(2):
        run(lamina, out, "--insert", "ffn", "--layers", "1", "-o", out, "--force")  # the older name of --overwrite
    assert len(edits(load(out)[0])) == 2


def test_a_replacement_that_fails_leaves_the_old_model(lamina, base: Path, tmp_path: Path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(base, out)
    before, move = contents(out), os.renames

    def fail(source: Path, target: Path) -> None:
        if source.name == "config.json" and source.parent.name == "new":
            raise OSError(28, "No space left on device")
        move(source, target)

    monkeypatch.setattr(os, "renames", fail)
    ran = lamina("edit", base, "--truncate", 1, "-o", out, "--overwrite")
    assert ran.code == 2
    assert f"error: save: {out} cannot be written (No space left on device); nothing in it was changed" in ran.err
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-o", "OUT"], "edit: no edit is asked for"),
        (["--truncate", 1, "--layers", 2, "-o", "OUT"], "edit: --layers was given without --insert"),
        (["--insert", "ffn", "--seed", 3, "-o", "OUT"], "edit: --seed was given without random weights"),
        (["--insert", "ffn", "--scope", "block", "-o", "OUT"], "edit: --scope was given without --reinit"),
        (["--truncate", 1], r"edit: there is no folder to save to. Use -o OUT, or --dry-run"),
        (["--truncate", 9, "-o", "OUT"], "truncate_: keep is 9; the main stack has 3 blocks"),
        (["--reinit", "7", "-o", "OUT"], "reinit_: layer 7 does not exist"),
        (["--reinit", "some", "-o", "OUT"], "reinit_: layers is 'some', which is not a layer selector"),
        (["--reinit", "1", "--scope", "model", "-o", "OUT"], "edit: unknown --scope 'model'; known: linear, block"),
        (["--insert", "middle", "-o", "OUT"], "edit: unknown --insert 'middle'; known: attention, ffn, both"),
        (
            ["--insert", "ffn", "--init", "ones", "-o", "OUT"],
            "edit: unknown --init 'ones'; known: identity, unit, xavier, he, zero",
        ),
        (["--insert", "ffn", "--stack", "decoder", "-o", "OUT"], "unknown stack 'decoder'"),
        (["--insert", "convolution", "-o", "OUT"], "the family 'bert' is not supported; no row says where its"),
        (["--insert", "convolution", "--kernel", 4, "-o", "OUT"], "insert_: kernel is 4; it must be odd"),
        (["--merge", "-o", "OUT"], "merge_: the model has no inserted layers"),
        (["--train-inserted", "-o", "OUT"], "freeze_: train is 'inserted', and the model has no inserted layers"),
        (["--train", "heads", "-o", "OUT"], "freeze_: unknown part to train 'heads'; known: embeddings, "),
        (["--freeze", "1", "--head", "AutoHead", "-o", "OUT"], "unknown head 'AutoHead'"),
    ],
)
def test_bad_input_is_one_sentence(lamina, base: Path, tmp_path: Path, options, told):
    out = tmp_path / "out"
    ran = lamina("edit", base, *(out if each == "OUT" else each for each in options))
    assert (ran.code, ran.out) == (2, "")
    assert told in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert not out.exists()


def test_places_that_cannot_be_saved_to(lamina, base: Path, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_text("mine")
    ran = lamina("edit", base, "--truncate", 1, "-o", tmp_path / "file", "--overwrite")
    assert (ran.code, "is a file, not a folder" in ran.err) == (2, True)
    ran = lamina("edit", base, "--truncate", 1, "-o", tmp_path / "photos", "--overwrite")
    assert (ran.code, "holds no model; --overwrite replaces models only" in ran.err) == (2, True)
    (tmp_path / "photos" / "config.json").write_text('{"theme": "dark"}')
    ran = lamina("edit", base, "--truncate", 1, "-o", tmp_path / "photos", "--overwrite")
    assert (ran.code, "holds no model; --overwrite replaces models only" in ran.err) == (2, True)
    assert contents(tmp_path / "photos") == {"me.png": b"mine", "config.json": b'{"theme": "dark"}'}


def test_force_leaves_what_is_not_of_the_model(lamina, base: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(base, out)
    mine = ["model_old.safetensors", "model.safetensors.bak", "pytorch_model.bin", "notes/config.json"]
    for name in mine:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    for depth in (2, 1):
        run(lamina, base, "--truncate", depth, "-o", out, "--overwrite")
        assert load(out)[0].config.num_hidden_layers == depth
    assert {name: (out / name).read_text() for name in mine} == dict.fromkeys(mine, "mine")


def test_a_model_that_is_not_there_or_has_an_unknown_head(lamina, base: Path, tmp_path: Path):
    ran = lamina("edit", tmp_path / "none", "--truncate", 1, "--dry-run")
    assert (ran.code, "no model" in ran.err) == (2, True)
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForEverything"]}))
    ran = lamina("edit", folder, "--truncate", 1, "--dry-run")
    assert ran.code == 2
    assert "unknown head 'BertForEverything'" in ran.err


def test_a_head_that_needs_more_is_compared_by_its_backbone(lamina, base: Path, tmp_path: Path, monkeypatch):
    from transformers import BertForSequenceClassification

    folder = tmp_path / "model"
    AutoModelForSequenceClassification.from_pretrained(base).save_pretrained(folder)

    def refuse(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        raise ValueError("it needs labels")

    monkeypatch.setattr(BertForSequenceClassification, "forward", refuse)
    assert run(lamina, folder, "--insert", "ffn", "-o", tmp_path / "out")["output_difference"] <= 1e-5


@pytest.mark.parametrize("head", one_in(3, ["RobertaPreLayerNormModel", "MegatronBertModel", "BertForMaskedLM"]))
def test_a_head_whose_layers_would_be_new_is_refused(lamina, base: Path, tmp_path: Path, head: str):
    """Its class runs with the config, but not with the weights."""
    out, options = tmp_path / "out", ("--freeze", "0", "--head", head)
    ran = lamina("edit", base, *options, "-o", out)
    assert ran.code == (0 if head == "BertForMaskedLM" else 2)
    if ran.code:
        assert f"the weights in {base} are not those of a {head}" in ran.err
        assert "of its parameters, would start at random ('" in ran.err
        assert not out.exists()
        assert lamina("edit", base, *options, "--new-weights", "-o", out).code == 0
    assert type(load(out, head)[0]).__name__ == head


def test_a_head_of_which_most_would_be_new_is_refused(lamina, base: Path, tmp_path: Path):
    plain = tiny_model()
    state = {key: value for key, value in plain.state_dict().items() if not key.startswith("encoder.layer")}
    plain.save_pretrained(tmp_path / "cut", state_dict=state)
    ran = lamina("edit", tmp_path / "cut", "--freeze", "0", "-o", tmp_path / "out")
    assert (ran.code, "hold no block of a BertModel" in ran.err) == (2, True)


@pytest.mark.parametrize("edit", [("--train", "encoder"), ("--merge",)])
def test_a_stack_belongs_to_an_edit_of_one(lamina, edit: tuple[str, ...]):
    ran = lamina("edit", "minilm", *edit, "--stack", "nonsense", "--dry-run")
    assert ran.code == 2
    assert "edit: --stack was given without one of --truncate, --reinit, --insert" in ran.err


def test_blocks_are_dropped_and_repeated_and_shown(lamina, base: Path, tmp_path: Path):
    out = tmp_path / "out"
    facts = run(lamina, base, "--drop", "2", "--duplicate", "1", "--repeat", "-o", out)
    assert [made["kind"] for made in facts["edits"]] == ["drop", "duplicate"]
    assert facts["after"]["layers"] == {"main": 4}
    assert [block["was"] for block in facts["blocks"]["main"]["after"]] == [1, 1, 3]
    assert facts["blocks"]["main"]["gone"] == [2]
    assert facts["lost"] == []
    shown = lamina("inspect", out)
    assert "before  [1][2][3]\n  after   [1][1+][3]\n" in shown.out
    assert AutoModel.from_pretrained(out).config.num_hidden_layers == 3


def test_a_plan_holds_edits_in_any_order(lamina, base: Path, tmp_path: Path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "seed: 3\nedits:\n- insert: {position: ffn}\n- merge: {}\n- keep: {layers: [3, 1]}\n- reinit: {layers: 1}\n"
        "- duplicate: {layers: 2, identity: false}\n"
    )
    one = run(lamina, base, "--plan", plan, "-o", tmp_path / "one")
    assert [made["kind"] for made in one["edits"]] == ["insert", "merge", "keep", "reinit", "duplicate"]
    run(lamina, base, "--plan", plan, "-o", tmp_path / "two")
    first, second = (AutoModel.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = run(lamina, base, "--plan", plan, "--seed", 4, "--dry-run")
    assert [made["seed"] for made in other["edits"]] != [made["seed"] for made in one["edits"]]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("edits: [{drop: {layers: 1}}]", ("--drop", "2"), "--drop was given with --plan; the plan holds all edits"),
        ("edits: [{cut: {layers: 1}}]", (), "unknown edit 'cut'"),
        ("edits: [{drop: {layer: 1}}]", (), "unknown key 'layer'"),
        ("edits: [{drop: {layers: 9}}]", (), "layer 9 does not exist"),
        *(
            (f"edits: [{{{edit}: {value}}}]", (), f"the edit '{edit}' has {shown} in place of arguments; it takes ")
            for edit, value, shown in (
                *(("freeze", empty, empty.title()) for empty in ("0", "false", "[]")),
                *(("freeze", "''", "''"), ("drop", "2", "2"), ("truncate", "[2]", "[2]"), ("merge", "true", "True")),
                *(("keep", "'2'", "'2'"), ("drop_least", "0", "0")),
            )
        ),
        ("edits: [{drop_least: {count: 1}}]", (), "has no task to measure on"),
        ("edits: [{drop_least: {count: 1, by: luck}}]", (), "'luck'"),
        ("edits: []", (), "edits: "),
        ("- merge: {}", (), "error: plan: plan.yaml holds no keys; it needs 'edits', in YAML"),
        ("edits: [", (), "error: plan: plan.yaml is not YAML; "),
        ("edits: []\nedits: []", (), "error: plan: plan.yaml, line 2: the key 'edits' is also in line 1"),
        ("edits: [{merge: {}}]", ("--task", "cola"), "--task was given without drop_least in the plan"),
        ("edits: [{merge: {}}]", ("--seed", "1"), "--seed was given without an edit in the plan that uses it"),
        ("edits: [{merge: {}}]\ntask: {preset: cola, epochs: 3}", (), "'epochs' is for lamina train"),
        ("edits: [{merge: {}}]\ntask: cola", (), "no edit measures on a task; only drop_least does"),
    ],
)
def test_plans_that_are_wrong(lamina, base: Path, tmp_path: Path, text, options, message):
    plan = tmp_path / "plan.yaml"
    plan.write_text(text)
    ran = lamina("edit", base, "--plan", plan, *options, "-o", tmp_path / "out")
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert message in ran.err.replace(f"{tmp_path}/", "")


def test_a_file_of_a_task_that_is_wrong(lamina, base: Path, tmp_path: Path):
    (task := tmp_path / "task.yaml").write_text("preset: [")
    ran = lamina("edit", base, "--drop", "auto:1", "--task", task, "--dry-run")
    assert (ran.code, ran.err.partition(";")[0]) == (2, f"error: task: {task} is not YAML")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drop", "auto:1"), "--drop auto:1 has no --task to measure on"),
        (("--drop", "auto:x", "--task", "cola"), "--drop auto:x names no number of blocks"),
        (("--drop", "1", "--heal", "2"), "--heal was given without --drop auto:N"),
        (("--drop", "1", "--data", "."), "--data was given without --drop auto:N"),
        (("--keep", "1", "--repeat"), "--repeat was given without --duplicate"),
        (("--drop", "1-"), "no block would stay"),
        (("--keep", "0"), "no block would stay"),
        (("--duplicate", "1"), "ends in a norm"),
    ],
)
def test_cuts_that_are_wrong(lamina, base: Path, tmp_path: Path, options, message):
    ran = lamina("edit", base, *options, "-o", tmp_path / "out")
    assert (ran.code, message in ran.err) == (2, True), ran.err


@pytest.mark.long
@pytest.mark.parametrize("by", one_in(2, ["influence", "readers"]))
def test_the_least_important_block_is_found_and_its_cost_measured(lamina, base: Path, tmp_path: Path, by, caplog):
    rows = [f"{'abcdef'[n % 6]} {'good' if n % 2 else 'bad'},{n % 2}" for n in range(60)]
    for name, end in {"train": " the", "validation": ""}.items():  # no text is in both
        own = [row.replace(",", f"{end},") for row in rows]
        (tmp_path / f"{name}.csv").write_text("\n".join(["sentence,label", *own]) + "\n")
    task = tmp_path / "task.yaml"
    task.write_text("files: {train: train.csv, validation: validation.csv}\n")
    options = ("--drop", "auto:1", "--by", by, "--task", task, "--data", tmp_path, "--no-progress")
    facts = run(lamina, base, *options, "-o", tmp_path / "out")
    (lost,) = facts["lost"]
    assert (lost["by"], lost["scored_by"], len(lost["dropped"]), lost["values"]) == (by, "readers", 1, 3)
    assert set(lost["costs"]) == {"1", "2", "3"}
    assert lost["dropped"] == [int(min(lost["costs"], key=lambda layer: (lost["costs"][layer], -int(layer))))]
    assert lost["interval"] is not None
    assert lost["bytes"][1] < lost["bytes"][0]
    assert facts["after"]["layers"] == {"main": 3}
    # what the user can change, and no name from within
    assert len(caplog.records) == (by == "readers")
    assert all("--by readers chooses blocks on 6 rows of 'task'" in record.message for record in caplog.records)
    refused = lamina("edit", base, *options, "--heal", "1", "-o", tmp_path / "no")
    assert (refused.code, "--heal needs a" in refused.err) == (2, True), refused.err


def test_a_model_that_no_longer_runs_is_not_saved(lamina, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    images = {"image_size": 64, "patch_size": 16, "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
    model = DPTForDepthEstimation(DPTConfig(**sizes, **images, backbone_out_indices=[0, 1, 2, 3]))
    model.save_pretrained(tmp_path / "dpt")
    ran = lamina("edit", tmp_path / "dpt", "--drop", 4, "-o", tmp_path / "out")
    assert (ran.code, "the head reads the outputs of the blocks 1, 2, 3, 4" in ran.err) == (2, True)
    monkeypatch.setattr(block_config, "_check_taps", lambda *_, **__: None)  # as for a setting that nobody knows
    ran = lamina("edit", tmp_path / "dpt", "--drop", 4, "-o", tmp_path / "out")
    assert (ran.code, "the model ran before the edits and fails after them (ValueError: " in ran.err) == (2, True)
    assert not (tmp_path / "out").exists()
