"""Before training: what machines and wires there are, and what can be trained on them."""
