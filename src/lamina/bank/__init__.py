"""The bank: readers that share one model, and so one pass."""

from lamina.bank.bank import NAME, ReaderBank
from lamina.bank.reader import BankOutput, Reader, ReaderModule, ReaderOutput
from lamina.layers.guard import is_held

__all__ = ["NAME", "BankOutput", "Reader", "ReaderBank", "ReaderModule", "ReaderOutput", "is_held"]
