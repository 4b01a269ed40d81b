"""Generic training step for frameworks whose own step cannot be traced."""
