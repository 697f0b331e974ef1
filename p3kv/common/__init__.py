"""Addresses, names, words and spans, which all parts use."""
