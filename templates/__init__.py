"""The Jinja templates that kernels are rendered from, one family a file."""
