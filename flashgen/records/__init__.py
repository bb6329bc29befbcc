"""What calls did, written down, and done again by addresses alone."""
