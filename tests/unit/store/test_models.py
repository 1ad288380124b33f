from __future__ import annotations

from typing import Any

import pytest
from tests.support.stored import tiny_config
from transformers import AutoModelForAudioXVector, AutoModelForTokenClassification, BertForMaskedLM

from lamina.errors import ConfigError, StoreError, UnsupportedModelError
from lamina.layers import stacks
from lamina.store import empty_model
from lamina.store.models import model_errors


class TestEmptyModel:
    def test_has_the_architecture_and_no_memory(self):
        model = empty_model(tiny_config())
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert stacks(model)["main"].layers == 4

    def test_of_a_family_without_backbone(self):
        class Odd(type(tiny_config())):
            model_type = "odd"

        with pytest.raises(UnsupportedModelError, match="the family 'odd' is not supported"):
            empty_model(Odd(), AutoModelForAudioXVector)  # the error lists its families: AutoModel has hundreds

    @pytest.mark.parametrize("kind", [AutoModelForTokenClassification, BertForMaskedLM])
    def test_has_the_head_of_its_class(self, kind: type):
        assert type(empty_model(tiny_config(), kind)).__name__ == kind.__name__.replace("AutoModel", "Bert")

    def test_an_error_of_lamina_in_a_constructor_is_raised_as_it_is(self):
        class Odd(BertForMaskedLM):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                raise ConfigError("no such width") from ValueError("odd")

        with pytest.raises(ConfigError, match="no such width") as caught:
            empty_model(tiny_config(), Odd)
        assert type(caught.value.__cause__) is ValueError


def test_an_error_of_lamina_keeps_its_cause():
    with pytest.raises(StoreError) as caught, model_errors("m", "bert"):
        raise StoreError("damaged") from (cause := ValueError("cut"))
    assert caught.value.__cause__ is cause
