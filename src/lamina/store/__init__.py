"""Save and load models, edited models and banks of readers; compute fingerprints that identify a base model."""

from lamina.layers.fingerprints import fingerprint
from lamina.store.bank_folder import bank_of_states, load_bank, push_bank, save_bank
from lamina.store.hub import model_card
from lamina.store.load_model import load, outline
from lamina.store.models import empty_model, load_config, load_processor, saved_class
from lamina.store.save_model import save

__all__ = ["bank_of_states", "empty_model", "fingerprint", "load", "load_bank", "load_config", "load_processor"]
__all__ += ["model_card", "outline", "push_bank", "save", "save_bank", "saved_class"]
