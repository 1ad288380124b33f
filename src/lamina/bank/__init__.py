"""The bank: readers that share one model, so that one forward pass serves them all."""

from lamina.bank.bank import ReaderBank
from lamina.bank.reader import BankOutput, Reader, ReaderModule, ReaderOutput
from lamina.bank.reader_collection import NAME
from lamina.layers.layer_guard import is_read_by_bank

__all__ = ["NAME", "BankOutput", "Reader", "ReaderBank", "ReaderModule", "ReaderOutput", "is_read_by_bank"]
