"""A model's config from the settings that a recipe carries, for estimates that cannot reach the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig

_MORE_KEYS = {  # what a family's model reads of its config, though the config's class does not name it
    "deberta-v2": ("position_buckets", "share_att_key", "norm_rel_ebd"),
    "t5": ("decoder_start_token_id",),
}


def config_of(architecture: Mapping[str, Any]) -> PretrainedConfig:
    """Build a config.

    Args:
        architecture: Its settings, "model_type" among them.

    Raises:
        ConfigError: If there is no "model_type", or transformers has no such family.
        UnknownNameError: If a key does not exist.
    """
    from transformers import AutoConfig

    settings = dict(architecture)
    family = settings.pop("model_type", None)
    if family is None:
        raise ConfigError("'architecture' has no 'model_type'; it says which family the settings are of.")
    try:
        default = AutoConfig.for_model(family)
    except ValueError as error:
        raise ConfigError(f"transformers has no family '{family}'; model_type names one.") from error
    known = [*default.to_dict(), *default.attribute_map, *_MORE_KEYS.get(family, ())]
    for key in settings:
        if key not in known:
            raise UnknownNameError(op="recipe", got=key, known=known, what="key")
    return AutoConfig.for_model(family, **settings)
