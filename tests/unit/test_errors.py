"""Errors: their base classes, their fields, and pickling to another process."""

from __future__ import annotations

import pickle
import re

import pytest

from lamina import errors
from lamina.errors import (
    BaseMismatchError,
    CacheError,
    ConfigError,
    DataError,
    LaminaError,
    LayerIndexError,
    MissingExtraError,
    ModelNotFoundError,
    NotFiniteError,
    OutOfMemoryError,
    StoreError,
    UnknownNameError,
    UnsupportedModelError,
    convert_errors,
    memory_errors,
)

EVERY: list[tuple[LaminaError, type[Exception], dict[str, object], str]] = [
    (ConfigError("a: b; c. D."), ValueError, {}, "a: b; c. D."),
    (
        CacheError("a: b; c. D.", needed_bytes=3, free_bytes=2),
        OSError,
        {"needed_bytes": 3, "free_bytes": 2},
        "a: b; c. D.",
    ),
    (
        UnknownNameError(op="fit", got="epoch", known=["epochs", "seed"], what="option"),
        LookupError,
        {"op": "fit", "got": "epoch", "known": ("epochs", "seed")},
        "fit: unknown option 'epoch'; known: epochs, seed. Did you mean 'epochs'?",
    ),
    (
        LayerIndexError(op="tap", got=9, layers=4),
        IndexError,
        {"op": "tap", "got": 9, "layers": 4},
        "tap: layer 9 does not exist; the model has 4 layers, embeddings included. Use 0..3, or -1 for the last.",
    ),
    (
        UnsupportedModelError(op="tap", model_type="led", reason="it un-pads", hint="Use another."),
        TypeError,
        {"op": "tap", "model_type": "led", "reason": "it un-pads"},
        "tap: the family 'led' is not supported; it un-pads. Use another.",
    ),
    (
        ModelNotFoundError(op="load", got="x", reason="no such folder"),
        OSError,
        {"op": "load", "got": "x", "reason": "no such folder"},
        "load: no model 'x'; no such folder. Give a local folder with config.json, or a hub id while the hub can be "
        "reached.",
    ),
    (
        DataError("a: b; c. D.", path="p", row=3, column="label"),
        ValueError,
        {"path": "p", "row": 3, "column": "label"},
        "a: b; c. D.",
    ),
    (StoreError("a: b; c. D."), OSError, {}, "a: b; c. D."),
    (
        NotFiniteError("a: b; c. D.", name="ner", step=3),
        ArithmeticError,
        {"name": "ner", "step": 3, "row": None},
        "a: b; c. D.",
    ),
    (
        OutOfMemoryError(
            op="train", reason="DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes."
        ),
        MemoryError,
        {"op": "train"},
        "train: 3.0 GiB more memory could not be allocated. Use a smaller batch_size, eval_batch_size or max_length.",
    ),
    (
        BaseMismatchError(op="load", differs={"width": (3, 4)}),
        StoreError,
        {"op": "load", "differs": {"width": (3, 4)}},
        "load: these readers were trained on another base: width was 3, here 4. "
        "Give the base that they were trained on (model=, or --model), or train them again on this one.",
    ),
    (
        MissingExtraError(op="demo", package="altair", extra="demo"),
        ImportError,
        {"op": "demo", "package": "altair", "extra": "demo"},
        "demo: needs the package 'altair', which is not installed. Run: pip install 'lamina[demo]'",
    ),
]


def ident(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, LaminaError) else None


def test_a_name_that_begins_or_ends_a_known_one_is_meant_by_it():
    def message(got: str, known: list[str]) -> str:
        return str(UnknownNameError(op="fit", got=got, known=known))

    assert message("acc", ["mcc", "accuracy"]).endswith("Did you mean 'accuracy'?")
    assert message("men", ["elementwise", "mean"]).endswith("Did you mean 'mean'?")
    assert "mean" not in message("classification", ["token_classification", "image_classification"])
    assert message("epoch", ["epoch_size", "epochs"]).endswith("Did you mean 'epochs'?")


def test_every_error_is_looked_at():
    found = {one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, LaminaError)}
    assert found - {LaminaError} == {type(error) for error, *_ in EVERY}


@pytest.mark.parametrize(("error", "builtin", "fields", "message"), EVERY, ids=ident)
def test_what_an_error_is_and_says(
    error: LaminaError, builtin: type[Exception], fields: dict[str, object], message: str
):
    assert isinstance(error, LaminaError)
    assert isinstance(error, builtin)
    assert str(error) == message
    assert {key: getattr(error, key) for key in fields} == fields


@pytest.mark.parametrize(("error", "builtin", "fields", "message"), EVERY, ids=ident)
def test_errors_pass_between_processes(
    error: LaminaError, builtin: type[Exception], fields: dict[str, object], message: str
):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == message
    assert {key: getattr(back, key) for key in fields} == fields


def test_the_tree_is_the_one_in_the_docstring():
    assert errors.__doc__ is not None
    assert all(type(error).__name__ in errors.__doc__ for error, *_ in EVERY)


def test_a_name_like_no_other_gets_no_suggestion():
    assert str(UnknownNameError(op="x", got="zzz", known=["mean"])) == ("x: unknown name 'zzz'; known: mean.")
    assert "known: none." in str(UnknownNameError(op="x", got="zzz", known=[]))


def test_of_a_long_list_the_nearest_names_are_given_and_where_all_stand():
    known = [*(f"other{number}" for number in range(40)), "epochs", "epoch_size"]
    said = str(UnknownNameError(op="fit", got="epoch", known=known, what="option", see="help(lamina.fit)"))
    named = "known: epochs, epoch_size and 40 others (all: help(lamina.fit)). Did you mean 'epochs'?"
    assert said == f"fit: unknown option 'epoch'; {named}"
    assert "known: other0, other1, other2, other3, other4 and 37 others." in str(
        UnknownNameError(op="fit", got="zzz", known=known)
    )


def test_the_extra_of_a_failed_import():
    error = MissingExtraError.of(ImportError("no", name="vl_convert"), op="figures", extra="report")
    assert error.package == "vl_convert"
    assert "pip install 'lamina[report]'" in str(error)
    assert MissingExtraError.of(ImportError("no"), op="figures", extra="report").package == "?"


class PanicException(BaseException):
    """What a library in Rust raises where it is at fault itself."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("a file:\n  line 2.\nmore"), "a file: line 2"),
        (KeyError("x"), "KeyError 'x'"),
        (RecursionError(), "RecursionError"),
        (PanicException("index out of bounds"), "index out of bounds"),
    ],
)
def test_errors_of_others_become_one_of_ours(error: BaseException, reason: str):
    with pytest.raises(StoreError, match=f"^load: x \\({re.escape(reason)}\\)$") as raised, foreign(StoreError):
        raise error
    assert raised.value.__cause__ is error


def foreign(ours: type[LaminaError], *kinds: type[Exception]):
    return convert_errors(lambda reason: ours(f"load: x ({reason})"), *kinds)


@pytest.mark.parametrize("error", [KeyboardInterrupt("x"), ConfigError("x"), ValueError("x")])
def test_what_is_not_asked_for_stays_as_it_is(error: BaseException):
    with pytest.raises(type(error), match=r"^x$"), foreign(StoreError, OSError):
        raise error


class CudaError(RuntimeError):
    """As torch's own."""


CudaError.__name__ = "OutOfMemoryError"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("[x.cpp:9] DefaultCPUAllocator: not enough memory: you tried to allocate 1073741824 bytes."),
            "1.0 GiB more memory",
        ),
        (
            CudaError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1 GiB"),
            "20.00 MiB more memory",
        ),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), "the memory that this needs"),
        (MemoryError("Unable to allocate 8.00 PiB for an array"), "8.00 PiB more memory"),
        (MemoryError(), "the memory that this needs"),
    ],
)
def test_what_memory_could_not_be_had_is_said(error: Exception, said: str):
    told = rf"^fit: {said} could not be allocated\. Use a smaller batch_size, eval_batch_size or max_length\.$"
    with pytest.raises(OutOfMemoryError, match=told) as raised, memory_errors("fit"):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("x"), OutOfMemoryError(op="a", reason="b"), KeyboardInterrupt("x")])
def test_other_errors_are_no_lack_of_memory(error: BaseException):
    with pytest.raises(type(error)) as raised, memory_errors("fit"):
        raise error
    assert raised.value is error
