"""Calls: which way they go, and those like one that was done."""
