"""The bank: readers that share one model, and so one pass."""

from lamina.bank.bank import NAME, ReaderBank
from lamina.bank.reader import BankOutput, Reader, ReaderModule, ReaderOutput
from lamina.layers.layer_guard import is_read_by_bank

__all__ = ["NAME", "BankOutput", "Reader", "ReaderBank", "ReaderModule", "ReaderOutput", "is_read_by_bank"]
