"""The bank: readers that share one model, and so one pass."""

from lamina.bank.bank import NAME, ReaderBank, is_held
from lamina.bank.reader import BankOutput, Reader, ReaderModule, ReaderOutput

__all__ = ["NAME", "BankOutput", "Reader", "ReaderBank", "ReaderModule", "ReaderOutput", "is_held"]
