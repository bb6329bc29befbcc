"""Masks that are ready to use, one file each."""
